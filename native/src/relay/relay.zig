//! The sessions of this process with other hosts, and the thread that serves them (`trimesh-t3`), beside T1: encrypting
//! bulk data takes a core, and T1 must see a lifeline within a millisecond.
//!
//! RY-1 The owner never waits for the thread: it queues commands, and takes events from a queue. RY-2 `lock` is held
//! for the queues only; the thread holds `driving` while it makes, uses and closes anything, a turn at a time. RY-3 A
//! fork comes between two turns, and the thread lets it pass first. RY-4 Nothing is read from other hosts while the
//! owner has left more than limit HOST_EVENTS_BYTES of events.

const std = @import("std");
const assert = std.debug.assert;
const channels = @import("channels.zig");
const limits = @import("../limits.zig");
const machines = @import("machine.zig");
const peers = @import("peer.zig");
const queues = @import("queue.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const Held = @import("../tls/tls.zig").Held;

const Peer = peers.Peer;
const Event = peers.Event;

const Tag = enum(u8) { wake = 1, timer = 2, connection = 3, local = 4 };

fn dataOf(tag: Tag, session: u32, index: channels.Index) u64 {
    return @as(u64, @intFromEnum(tag)) << 56 | @as(u64, index) << 32 | session;
}

fn connectionWord(session: u32) u64 {
    return dataOf(.connection, session, 0);
}

fn localWord(session: u32, index: channels.Index) u64 {
    return dataOf(.local, session, index);
}

const CommandKind = enum(u32) { begin = 1, attach = 2, open = 3, answer = 4, drop = 5, close = 6, abort = 7 };

/// What the owner wants; bytes follow.
const Command = extern struct {
    kind: CommandKind,
    session: u32,
    channel: u32 = 0,
    fd: i32 = -1,
    /// Of `begin`: the session; of `attach`: of TLS.
    object: usize = 0,
    /// The first of the bytes that come encrypted.
    wire_size: u32 = 0,
    size: u32 = 0,
};

const Slot = struct {
    /// The thread's.
    peer: ?*Peer,
    is_dirty: bool,
    /// The owner's; the thread frees it last.
    is_taken: std.atomic.Value(bool),
    generation: u16,
    next_channel: u32,
    own_channels: std.atomic.Value(u32),
    counts: [COUNTS]std.atomic.Value(u64),

    fn publish(self: *Slot, peer: *const Peer) void {
        const now = peer.counts();
        const words: *const [COUNTS]u64 = @ptrCast(&now);
        for (words, &self.counts) |word, *count| count.store(word, .monotonic);
    }
};

const COUNTS = @sizeOf(peers.Counts) / 8;

/// All zeros at first.
pub const Relay = struct {
    lock: sys.Mutex,
    gate: sys.Mutex,
    driving: sys.Mutex,
    commands: queues.Queue(Command),
    events: queues.Queue(Event),
    is_held: bool,
    /// Commands that the thread takes in one turn.
    taken: queues.Queue(Command),
    epoll: i32,
    timer: i32,
    wake: i32,
    /// Readable: events are there.
    bell: i32,
    alive: *u32,
    stopping: std.atomic.Value(bool),
    thread: sys.Thread,
    dirty: [limits.HOST_SESSIONS_MAX]u16,
    dirty_count: u32,
    slots: [limits.HOST_SESSIONS_MAX]Slot,
    /// What `poll` has given out last.
    said: [@max(limits.HOST_PURPOSE_BYTES_MAX, limits.DETAIL_BYTES)]u8,

    /// Make one and start its thread. A status.
    pub fn create(out: *?*Relay) i32 {
        const pages = sys.mapPrivate(@sizeOf(Relay)) orelse return status.ofErrno(-sys.ENOMEM);
        const self: *Relay = @ptrCast(@alignCast(pages));
        const rc = self.init();
        if (rc < 0) {
            sys.unmap(pages, @sizeOf(Relay));
            return rc;
        }
        out.* = self;
        return status.OK;
    }

    fn init(self: *Relay) i32 {
        const none = status.ofErrno(-sys.ENOMEM);
        self.alive = @ptrCast(@alignCast(sys.mapWipedOnFork() orelse return none));
        self.alive.* = 1;
        self.commands = queues.Queue(Command).init() orelse return none; // who has no megabyte has no process either
        self.events = queues.Queue(Event).init() orelse return none;
        self.taken = queues.Queue(Command).init() orelse return none;
        self.epoll = sys.epollCreate();
        self.timer = sys.timerfd(limits.HOST_TICK_MS);
        self.wake = sys.eventfd();
        self.bell = sys.eventfd();
        var rc: i32 = 0;
        for ([_]i32{ self.epoll, self.timer, self.wake, self.bell }) |fd| rc = @min(rc, fd);
        if (rc >= 0) rc = sys.epollAdd(self.epoll, self.wake, sys.IN, dataOf(.wake, 0, 0));
        if (rc >= 0) rc = sys.epollAdd(self.epoll, self.timer, sys.IN, dataOf(.timer, 0, 0));
        if (rc < 0) {
            self.giveBack();
            return status.ofErrno(rc);
        }
        self.thread = sys.threadStart(main, self) orelse {
            self.giveBack();
            return status.ERR_THREAD;
        };
        return status.OK;
    }

    fn giveBack(self: *Relay) void {
        self.closeOwn();
        self.commands.deinit();
        self.events.deinit();
        self.taken.deinit();
        sys.unmap(@ptrCast(@alignCast(self.alive)), 4096);
    }

    fn closeOwn(self: *Relay) void {
        for ([_]*i32{ &self.epoll, &self.timer, &self.wake, &self.bell }) |fd| {
            if (fd.* >= 0) sys.closeAt(fd);
        }
    }

    /// Join the thread, which never waits, and end all sessions without a word.
    pub fn destroy(self: *Relay) void {
        self.stopping.store(true, .seq_cst);
        sys.eventfdSignal(self.wake);
        sys.threadJoin(self.thread);
        self.takeCommands();
        for (&self.slots) |*slot| if (slot.peer) |peer| peer.destroy();
        self.giveBack();
        sys.unmap(@ptrCast(@alignCast(self)), @sizeOf(Relay));
    }

    // ---- forks ----

    /// Whether this process is a forked child of the one that made it.
    pub fn isForked(self: *const Relay) bool {
        return self.alive.* != 1;
    }

    /// Come to rest, and keep the thread out.
    pub fn beforeFork(self: *Relay) void {
        self.gate.lock();
        self.driving.lock();
        self.lock.lock();
    }

    /// Go on.
    pub fn afterForkParent(self: *Relay) void {
        self.lock.unlock();
        self.driving.unlock();
        self.gate.unlock();
    }

    /// Close every descriptor, touch nothing else.
    pub fn afterForkChild(self: *Relay) void {
        for (&self.slots) |*slot| if (slot.peer) |peer| peer.closeFds();
        while (self.commands.shift()) |one| {
            sys.close(one.head.fd);
            if (one.head.kind == .begin) @as(*Peer, @ptrFromInt(one.head.object)).closeFds();
        }
        self.closeOwn();
        self.afterForkParent();
    }

    // ---- the owner ----

    fn queue(self: *Relay, command: Command, a: []const u8, b: []const u8) i32 {
        self.lock.lock();
        defer self.lock.unlock();
        if (!self.commands.push(command, a, b)) return status.ofErrno(-sys.ENOMEM);
        sys.eventfdSignal(self.wake);
        return status.OK;
    }

    fn slotOf(self: *Relay, session: u32) ?*Slot {
        const place = session & 0xFFFF;
        if (place >= self.slots.len) return null;
        const slot = &self.slots[place];
        const is_its = slot.is_taken.load(.acquire) and slot.generation == session >> 16;
        return if (is_its) slot else null;
    }

    /// Begin a session without a connection; `control` is taken over on success. A status.
    pub fn begin(self: *Relay, options: machines.Options, control: i32, session_out: *u32) i32 {
        const place = for (&self.slots, 0..) |*slot, place| {
            if (!slot.is_taken.load(.acquire)) break place;
        } else return status.ERR_LIMIT;
        const slot = &self.slots[place];
        assert(slot.peer == null); // the thread frees the place last
        const generation = if (slot.generation == std.math.maxInt(u16)) 1 else slot.generation + 1;
        const id = @as(u32, generation) << 16 | @as(u32, @intCast(place));
        const peer = Peer.create(.{
            .id = id,
            .epoll = self.epoll,
            .own_channels = &slot.own_channels,
            .outside = .{
                .context = self,
                .tell = tell,
                .connectionWord = connectionWord,
                .localWord = localWord,
            },
            .session = options,
        }) orelse return status.ofErrno(-sys.ENOMEM);
        slot.own_channels.store(0, .monotonic);
        slot.next_channel = if (options.is_dialler) 1 else 2;
        for (&slot.counts) |*count| count.store(0, .monotonic);
        const rc = self.queue(.{ .kind = .begin, .session = id, .fd = control, .object = @intFromPtr(peer) }, "", "");
        if (rc < 0) {
            peer.destroy();
            return rc;
        }
        slot.generation = generation;
        slot.is_taken.store(true, .release);
        session_out.* = id;
        return status.OK;
    }

    /// Use a new connection; socket and TLS session are taken over on success. A status.
    pub fn attach(self: *Relay, session: u32, fd: i32, tls: ?*Held, wire: []const u8, plain: []const u8) i32 {
        if (self.slotOf(session) == null) return status.ERR_LINK;
        if (wire.len > limits.HOST_WIRE_BYTES or plain.len > limits.HOST_WIRE_BYTES) return status.ERR_TOO_LARGE;
        if (tls) |held| if (held.session.state != .open) return status.ERR_STATE;
        if (tls) |held| held.handOver();
        const object = if (tls) |held| @intFromPtr(held) else 0;
        const command = Command{
            .kind = .attach,
            .session = session,
            .fd = fd,
            .object = object,
            .wire_size = @intCast(wire.len),
        };
        const rc = self.queue(command, wire, plain);
        if (rc < 0) if (tls) |held| held.takeBack();
        return rc;
    }

    /// Open a channel; the socket is taken over on success. A status.
    pub fn openChannel(self: *Relay, session: u32, fd: i32, purpose: []const u8, channel_out: *u32) i32 {
        const slot = self.slotOf(session) orelse return status.ERR_LINK;
        if (purpose.len > limits.HOST_PURPOSE_BYTES_MAX) return status.ERR_TOO_LARGE;
        const is_full = slot.own_channels.load(.monotonic) >= limits.HOST_CHANNELS_MAX;
        if (is_full or slot.next_channel > std.math.maxInt(u32) - 4) return status.ERR_LIMIT;
        const command = Command{ .kind = .open, .session = session, .channel = slot.next_channel, .fd = fd };
        assert(fd >= 0);
        _ = slot.own_channels.fetchAdd(1, .monotonic);
        const rc = self.queue(command, purpose, "");
        if (rc < 0) {
            _ = slot.own_channels.fetchSub(1, .monotonic);
            return rc;
        }
        channel_out.* = slot.next_channel;
        slot.next_channel += 2;
        return status.OK;
    }

    /// Take a channel with a socket, which is taken over on success, or (-1) refuse it. A status.
    pub fn answer(self: *Relay, session: u32, channel: u32, fd: i32) i32 {
        if (self.slotOf(session) == null) return status.ERR_LINK;
        return self.queue(.{ .kind = .answer, .session = session, .channel = channel, .fd = fd }, "", "");
    }

    pub const How = enum(u32) { drop = 1, close = 2, abort = 3 };

    /// End a connection, or a session. A status.
    pub fn end(self: *Relay, session: u32, how: How) i32 {
        const slot = self.slotOf(session) orelse return status.ERR_LINK;
        const kind: CommandKind = switch (how) {
            .drop => .drop,
            .close => .close,
            .abort => .abort,
        };
        const rc = self.queue(.{ .kind = kind, .session = session }, "", "");
        if (rc == status.OK and how == .abort) slot.generation +%= 1; // the handle is dead; the place, when it is free
        return rc;
    }

    /// What was counted. A status.
    pub fn counts(self: *Relay, session: u32, out: *peers.Counts) i32 {
        const slot = self.slotOf(session) orelse return status.ERR_LINK;
        const words: *[COUNTS]u64 = @ptrCast(out);
        for (words, &slot.counts) |*word, *count| word.* = count.load(.monotonic);
        return status.OK;
    }

    pub const Polled = struct { event: Event, bytes: []const u8 };

    /// Take an event; its bytes stay until the next call.
    pub fn poll(self: *Relay) ?Polled {
        self.lock.lock();
        defer self.lock.unlock();
        const one = self.events.shift() orelse {
            sys.eventfdClear(self.bell);
            return null;
        };
        assert(one.bytes.len <= self.said.len);
        @memcpy(self.said[0..one.bytes.len], one.bytes);
        if (self.is_held and self.events.length() < limits.HOST_EVENTS_BYTES / 2) {
            self.is_held = false;
            sys.eventfdSignal(self.wake);
        }
        return .{ .event = one.head, .bytes = self.said[0..one.bytes.len] };
    }

    // ---- the thread ----

    fn tell(context: *anyopaque, event: Event, bytes: []const u8) void {
        const self: *Relay = @ptrCast(@alignCast(context));
        const slot = &self.slots[event.session & 0xFFFF];
        assert(bytes.len <= self.said.len); // where `poll` gives them out
        if (slot.peer) |peer| {
            assert(peer.id == event.session);
            slot.publish(peer); // who hears of it looks there
        }
        self.lock.lock();
        defer self.lock.unlock();
        if (self.events.length() == 0) sys.eventfdSignal(self.bell);
        if (!self.events.push(event, bytes, "")) @panic("no memory is left for what has happened to hosts");
        if (self.events.length() > limits.HOST_EVENTS_BYTES) self.is_held = true; // RY-4
    }

    fn isHeld(self: *Relay) bool {
        self.lock.lock();
        defer self.lock.unlock();
        return self.is_held;
    }

    fn main(argument: ?*anyopaque) callconv(.c) ?*anyopaque {
        const self: *Relay = @ptrCast(@alignCast(argument.?));
        sys.threadName("trimesh-t3");
        var events: [limits.EVENTS_MAX]sys.Event = undefined;
        var n: u32 = 0;
        while (!self.stopping.load(.seq_cst)) {
            self.gate.lock(); // RY-3
            self.driving.lock();
            self.gate.unlock();
            self.work(events[0..n]);
            const wait_ms: i32 = if (self.dirty_count > 0) 0 else -1;
            self.driving.unlock();
            n = sys.epollWait(self.epoll, &events, wait_ms);
        }
        return null;
    }

    fn work(self: *Relay, events: []const sys.Event) void {
        var has_ticked = false;
        var is_woken = false;
        for (events) |event| {
            const about: u32 = @truncate(event.data.u64);
            switch (std.enums.fromInt(Tag, event.data.u64 >> 56) orelse unreachable) { // we made the data ourselves
                .wake => {
                    sys.eventfdClear(self.wake);
                    is_woken = true;
                },
                .timer => {
                    sys.eventfdClear(self.timer);
                    has_ticked = true;
                },
                .connection => if (self.find(about)) |peer| {
                    peer.onConnection(event.events);
                    self.mark(peer);
                },
                .local => if (self.find(about)) |peer| {
                    peer.onLocal(@truncate(event.data.u64 >> 32), event.events);
                    self.mark(peer);
                },
            }
        }
        if (is_woken) self.takeCommands();
        const is_held = self.isHeld();
        if (has_ticked or is_woken) {
            for (&self.slots) |*slot| if (slot.peer) |peer| {
                if (has_ticked) peer.tick(is_held);
                self.mark(peer);
            };
        }
        self.turnAll(!is_held);
    }

    fn turnAll(self: *Relay, may_read: bool) void {
        const count = self.dirty_count;
        self.dirty_count = 0;
        for (self.dirty[0..count]) |place| {
            const slot = &self.slots[place];
            assert(slot.is_dirty);
            slot.is_dirty = false;
            const peer = slot.peer orelse continue;
            if (peer.turn(may_read)) self.mark(peer);
            slot.publish(peer);
        }
    }

    fn mark(self: *Relay, peer: *Peer) void {
        const place: u16 = @truncate(peer.id);
        if (self.slots[place].is_dirty) return;
        assert(self.slots[place].peer == peer);
        assert(self.dirty_count < self.dirty.len);
        self.slots[place].is_dirty = true;
        self.dirty[self.dirty_count] = place;
        self.dirty_count += 1;
    }

    fn find(self: *Relay, session: u32) ?*Peer {
        const peer = self.slots[session & 0xFFFF].peer orelse return null;
        return if (peer.id == session) peer else null;
    }

    fn takeCommands(self: *Relay) void {
        assert(self.taken.length() == 0);
        self.lock.lock();
        std.mem.swap(queues.Queue(Command), &self.commands, &self.taken);
        self.lock.unlock();
        while (self.taken.shift()) |one| self.obey(&one.head, one.bytes);
    }

    fn obey(self: *Relay, command: *const Command, bytes: []const u8) void {
        if (command.kind == .begin) {
            const peer: *Peer = @ptrFromInt(command.object);
            const place = &self.slots[command.session & 0xFFFF];
            assert(place.peer == null);
            assert(peer.id == command.session);
            place.peer = peer;
            return peer.join(channels.CONTROL, command.fd);
        }
        const tls: ?*Held = if (command.kind == .attach) @ptrFromInt(command.object) else null;
        const peer = self.find(command.session) orelse return Peer.discard(command.fd, tls);
        assert(command.wire_size <= bytes.len);
        switch (command.kind) {
            .begin => unreachable, // above
            .attach => peer.attach(command.fd, tls, bytes[0..command.wire_size], bytes[command.wire_size..]),
            .open => peer.openChannel(command.channel, command.fd, bytes),
            .answer => peer.answer(command.channel, command.fd),
            .drop => peer.dropConnection(),
            .close => peer.close(),
            .abort => {
                const slot = &self.slots[command.session & 0xFFFF];
                slot.peer = null;
                peer.destroy();
                slot.is_taken.store(false, .release);
            },
        }
    }
};
