//! One session with another host, as its thread serves it: the machine, a connection at a time, and a local socket for
//! each channel.
//!
//! PE-1 A local socket is read when its bytes can leave, into the memory from which they leave; so what this side keeps
//! is bounded however fast others write. PE-2 A local socket that takes nothing holds its own channel only. PE-3 Each
//! event is told once, and none after the end.

const std = @import("std");
const assert = std.debug.assert;
const channels = @import("channels.zig");
const limits = @import("../limits.zig");
const machines = @import("machine.zig");
const queues = @import("queue.zig");
const resends = @import("resend.zig");
const sys = @import("../system/sys.zig");
const Connection = @import("connection.zig").Connection;
const Held = @import("../tls/tls.zig").Held;
const Local = @import("local.zig").Local;

const Index = channels.Index;
const CONTROL = channels.CONTROL;

/// As in `trimesh.h`.
pub const EventKind = enum(u32) { opened = 1, resumed = 2, interrupted = 3, down = 4, ended = 5 };

/// What has happened; bytes follow.
pub const Event = extern struct {
    session: u32,
    kind: EventKind,
    channel: u32 = 0,
    /// Of which connection, counted from 1; of `down`: the `Ending`.
    number: u32 = 0,
    size: u32 = 0,
};

const Opening = extern struct { number: u32, fd: i32, size: u32 = 0 };

/// What is counted, for others to look at.
pub const Counts = extern struct {
    connections: u64 = 0,
    frames_sent: u64 = 0,
    frames_received: u64 = 0,
    bytes_sent: u64 = 0,
    bytes_received: u64 = 0,
    resent: u64 = 0,
    duplicates: u64 = 0,
    unacknowledged: u64 = 0,
    channels: u64 = 0,
};

/// What a session has of the thread that serves it.
pub const Outside = struct {
    context: *anyopaque,
    tell: *const fn (context: *anyopaque, event: Event, bytes: []const u8) void,
    /// One word of the epoll set for the connection of a session, and for each channel.
    connectionWord: *const fn (session: u32) u64,
    localWord: *const fn (session: u32, index: Index) u64,
};

pub const Peer = struct {
    id: u32,
    epoll: i32,
    outside: Outside,
    /// Channels that were opened here and have not ended; the owner counts up.
    own_channels: *std.atomic.Value(u32),
    machine: machines.Machine,
    openings: queues.Queue(Opening),
    connections: u32,
    is_down: bool,
    is_dirty: bool,
    /// Bytes that local sockets have not taken.
    waiting: usize,
    connection: Connection,
    kept: [resends.MEMORY_BYTES]u8,
    channels: [channels.CHANNELS]channels.Channel,
    buckets: [channels.BUCKETS]Index,
    locals: [channels.CHANNELS]Local,

    pub const Options = struct {
        id: u32,
        epoll: i32,
        outside: Outside,
        own_channels: *std.atomic.Value(u32),
        session: machines.Options,
    };

    /// Begin. Its memory, of which no more is used than is needed, is zeros. False: there is none.
    pub fn create(options: Options) ?*Peer {
        const pages = sys.mapPrivate(@sizeOf(Peer)) orelse return null;
        const self: *Peer = @ptrCast(@alignCast(pages));
        self.openings = queues.Queue(Opening).init() orelse {
            sys.unmap(pages, @sizeOf(Peer));
            return null;
        };
        self.id = options.id;
        self.epoll = options.epoll;
        self.outside = options.outside;
        self.own_channels = options.own_channels;
        self.machine = .init(options.session, .{
            .kept = &self.kept,
            .channels = &self.channels,
            .buckets = &self.buckets,
        });
        self.connection.fd = -1;
        self.locals[CONTROL] = .{};
        return self;
    }

    /// End it without a word, and forget it.
    pub fn destroy(self: *Peer) void {
        self.shut();
        self.openings.deinit();
        sys.unmap(@ptrCast(@alignCast(self)), @sizeOf(Peer));
    }

    /// In a forked child: close the descriptors, and touch nothing else.
    pub fn closeFds(self: *Peer) void {
        sys.closeAt(&self.connection.fd);
        for (self.channels[0..self.machine.table.used], 0..) |*one, index| {
            if (one.is_used) sys.closeAt(&self.locals[index].fd);
        }
        while (self.openings.shift()) |one| sys.close(one.head.fd);
    }

    fn tell(self: *Peer, kind: EventKind, channel: u32, number: u32, bytes: []const u8) void {
        assert(!self.is_down or kind == .down); // PE-3
        const event = Event{ .session = self.id, .kind = kind, .channel = channel, .number = number };
        self.outside.tell(self.outside.context, event, bytes);
    }

    // ---- what the owner asks ----

    /// Use a new connection, in place of the one that there may be.
    pub fn attach(self: *Peer, fd: i32, tls: ?*Held, wire: []const u8, plain: []const u8) void {
        assert(fd >= 0);
        if (self.is_down) return discard(fd, tls);
        self.connection.close(self.epoll);
        self.machine.disconnect();
        self.connections += 1;
        const events = sys.IN | sys.OUT | sys.RDHUP | sys.ET;
        const rc = sys.epollAdd(self.epoll, fd, events, self.outside.connectionWord(self.id));
        if (rc < 0) {
            discard(fd, tls);
            return self.tell(.interrupted, 0, self.connections, "the system does not let the connection be watched");
        }
        self.connection.open(fd, tls, wire, plain);
        self.machine.connect();
    }

    /// Close a socket and a session that have no place.
    pub fn discard(fd: i32, tls: ?*Held) void {
        sys.close(fd);
        if (tls) |held| held.release();
    }

    /// Open a channel as soon as there is room for saying so.
    pub fn openChannel(self: *Peer, number: u32, fd: i32, purpose: []const u8) void {
        if (self.is_down or !self.openings.push(.{ .number = number, .fd = fd }, purpose, "")) {
            sys.close(fd);
            _ = self.own_channels.fetchSub(1, .monotonic);
            if (!self.is_down) self.tell(.ended, number, 0, "");
        }
    }

    /// Take a channel that the peer has opened, or (-1) refuse it.
    pub fn answer(self: *Peer, number: u32, fd: i32) void {
        const found = if (self.is_down) null else self.machine.table.find(number);
        const index = found orelse return sys.close(fd);
        const local = &self.locals[index];
        if (!local.is_asked or self.machine.at(index).is_reset) return sys.close(fd);
        local.is_asked = false;
        if (fd >= 0) return self.join(index, fd);
        self.drop(index);
        self.machine.reset(index);
    }

    /// Join a socket to a channel.
    pub fn join(self: *Peer, index: Index, fd: i32) void {
        assert(fd >= 0);
        assert(self.machine.at(index).is_used);
        const local = &self.locals[index];
        assert(local.fd < 0);
        assert(!local.is_asked);
        local.fd = fd;
        local.is_writable = true;
        const events = sys.IN | sys.OUT | sys.RDHUP | sys.ET;
        const word = self.outside.localWord(self.id, index);
        if (sys.epollAdd(self.epoll, fd, events, word) < 0) return self.abandon(index);
        self.machine.ready(index);
        self.flush(index);
    }

    /// The connection counts as broken.
    pub fn dropConnection(self: *Peer) void {
        if (self.connection.fd >= 0) self.interrupt("it was dropped");
    }

    /// End the session behind what there is to read now.
    pub fn close(self: *Peer) void {
        self.machine.is_closing = true;
        for (self.channels[0..self.machine.table.used], 0..) |*one, index| {
            if (!one.is_used or one.is_finished or self.locals[index].fd < 0) continue;
            self.locals[index].readLast();
            self.machine.ready(@intCast(index));
        }
    }

    // ---- what happens ----

    /// The connection is ready for something.
    pub fn onConnection(self: *Peer, events: u32) void {
        if (events & ~sys.OUT != 0) self.connection.is_readable = true;
        if (events & (sys.OUT | sys.ERR | sys.HUP) != 0) self.connection.is_writable = true;
    }

    /// The socket of a channel is.
    pub fn onLocal(self: *Peer, index: Index, events: u32) void {
        if (self.is_down or !self.machine.at(index).is_used or self.locals[index].fd < 0) return; // closed meanwhile
        if (events & ~sys.OUT != 0 and !self.machine.is_closing) self.machine.ready(index);
        if (events & (sys.OUT | sys.ERR | sys.HUP) == 0) return;
        self.locals[index].is_writable = true;
        self.flush(index);
    }

    /// A tick has passed; `is_held`: nothing is read, so silence says nothing.
    pub fn tick(self: *Peer, is_held: bool) void {
        if (self.is_down) return;
        if (is_held) self.machine.silent_ticks = 0;
        if (self.machine.tick()) |ending| {
            self.end(ending, switch (ending) {
                .lease => "nothing was heard for as long as the lease",
                .closed => "it was closed here",
                .bye, .protocol => "the peer has ended the session",
            });
        } else self.endIfSaid();
    }

    /// Move what can be moved, for a while. True: there is more.
    pub fn turn(self: *Peer, may_read: bool) bool {
        for (0..limits.HOST_ROUNDS) |_| {
            assert((self.connection.fd >= 0) == self.machine.is_connected);
            if (self.is_down or self.connection.fd < 0) return false;
            self.fill();
            const taken = self.connection.round(self.machine.outgoing(limits.HOST_WIRE_BYTES), may_read);
            self.machine.sent(taken);
            self.take();
            if (self.is_down) return false;
            if (self.connection.why().len > 0 and !self.connection.has_moved) {
                self.interrupt(self.connection.why());
                return false;
            }
            self.endIfSaid();
            if (self.is_down or !self.connection.has_moved) return false;
        }
        return true;
    }

    fn fill(self: *Peer) void {
        const machine = &self.machine;
        if (!machine.is_resumed) return;
        self.openAll();
        while (machine.doChore()) |chore| switch (chore) {
            .said => {},
            .closed => |index| self.settle(index),
        };
        while (machine.kept.unsent < limits.HOST_FILL_BYTES) {
            const index = machine.nextTurn() orelse break;
            const to = machine.place(index) orelse break;
            const n = self.locals[index].read(to);
            if (n > 0) {
                machine.give(index, to, @intCast(n));
            } else if (n == -sys.EAGAIN) {
                machine.dry(index);
            } else if (n != -sys.EINTR) machine.finish(index); // its end; or its process has gone with bytes unread
        }
        machine.endFold();
        assert(machine.fold.count == 0);
        if (machine.is_closing and self.openings.length() == 0) _ = machine.bye();
    }

    fn openAll(self: *Peer) void {
        const machine = &self.machine;
        while (self.openings.length() > 0 and !machine.has_said_bye) {
            const has_room = machine.kept.place(limits.HOST_PURPOSE_BYTES_MAX, resends.KEPT_BYTES_MAX) != null;
            if (!has_room or machine.table.count == channels.CHANNELS) return;
            const one = self.openings.shift().?;
            assert(one.head.fd >= 0);
            assert(one.bytes.len <= limits.HOST_PURPOSE_BYTES_MAX);
            const index = machine.open(one.head.number, one.bytes).?;
            self.locals[index] = .{};
            self.join(index, one.head.fd);
            if (machine.is_closing) self.locals[index].readLast();
        }
    }

    fn take(self: *Peer) void {
        while (true) {
            const came = self.machine.receive(self.connection.received()) catch return self.endViolated();
            const got = came orelse return;
            switch (got.news) {
                .nothing, .bye => {},
                .resumed => self.tell(.resumed, 0, self.connections, ""),
                .opened => |one| {
                    self.locals[one.index] = .{ .is_asked = true };
                    self.tell(.opened, self.machine.at(one.index).number, 0, one.purpose);
                },
                .data => |one| self.deliver(one.index, one.bytes),
                .many => |pieces| self.deliverAll(pieces),
                .closed => |index| self.settle(index),
                .reset => |index| {
                    const number = self.machine.at(index).number;
                    self.drop(index);
                    self.machine.forget(index);
                    self.tell(.ended, number, 0, "");
                },
            }
            if (self.is_down) return;
            self.connection.consume(got.size);
        }
    }

    fn endViolated(self: *Peer) void {
        var text: [limits.DETAIL_BYTES]u8 = undefined;
        const words = std.fmt.bufPrint(&text, "the peer sent {s}", .{self.machine.problem}) catch unreachable;
        self.end(.protocol, words);
    }

    fn deliverAll(self: *Peer, pieces: []const u8) void {
        var rest = pieces;
        while (!self.is_down) {
            const news = (self.machine.nextOf(&rest) catch return self.endViolated()) orelse return;
            switch (news) {
                .data => |one| self.deliver(one.index, one.bytes),
                else => {}, // of a channel that has ended
            }
        }
    }

    fn deliver(self: *Peer, index: Index, bytes: []const u8) void {
        const taken = self.locals[index].deliver(bytes) orelse return self.abandon(index);
        assert(taken <= bytes.len);
        self.waiting += bytes.len - taken;
        assert(self.waiting >= self.locals[index].waiting);
        if (taken > 0) self.machine.consumed(index, taken);
    }

    fn flush(self: *Peer, index: Index) void {
        const taken = self.locals[index].flush();
        assert(taken <= self.waiting);
        self.waiting -= taken;
        if (taken > 0) self.machine.consumed(index, taken);
        self.settle(index);
    }

    /// Pass the peer's end of a channel on; forget a channel when both have come.
    fn settle(self: *Peer, index: Index) void {
        if (!self.machine.at(index).peer_closed or !self.locals[index].shut()) return;
        assert(self.locals[index].waiting == 0);
        if (!self.machine.isOver(index)) return;
        const number = self.machine.at(index).number;
        self.drop(index);
        self.machine.forget(index);
        self.tell(.ended, number, 0, "");
    }

    /// End a channel for which the system gives neither memory nor events.
    fn abandon(self: *Peer, index: Index) void {
        if (index == CONTROL) return self.end(.protocol, "the system has nothing left for channel 0");
        self.tell(.ended, self.machine.at(index).number, 0, "");
        self.drop(index);
        self.machine.reset(index);
    }

    /// Close the socket of a channel.
    fn drop(self: *Peer, index: Index) void {
        assert(index != CONTROL);
        assert(self.locals[index].waiting <= self.waiting);
        self.waiting -= self.locals[index].waiting;
        self.locals[index].close(self.epoll);
        const is_own = (self.machine.at(index).number % 2 == 1) == self.machine.options.is_dialler;
        if (!is_own) return;
        const before = self.own_channels.fetchSub(1, .monotonic);
        assert(before > 0);
    }

    // ---- ends ----

    fn interrupt(self: *Peer, why: []const u8) void {
        assert(!self.is_down);
        assert(why.len > 0);
        var text: [limits.DETAIL_BYTES]u8 = undefined;
        @memcpy(text[0..why.len], why);
        self.connection.close(self.epoll);
        self.machine.disconnect();
        self.endIfSaid();
        const is_ending = self.is_down or self.machine.has_bye or self.machine.has_said_bye;
        if (!is_ending) self.tell(.interrupted, 0, self.connections, text[0..why.len]);
    }

    /// End a session whose end was said, and heard.
    fn endIfSaid(self: *Peer) void {
        const machine = &self.machine;
        if (self.is_down) return;
        if (machine.isParted()) return self.end(.closed, "it was closed here");
        if (!machine.has_bye or self.waiting > 0) return;
        const is_told = machine.hasAnsweredBye() and self.connection.isFlushed();
        if (is_told or !machine.is_connected) self.end(.bye, "the peer has ended the session");
    }

    fn end(self: *Peer, ending: machines.Ending, why: []const u8) void {
        assert(!self.is_down); // PE-3
        self.shut();
        assert(self.connection.fd < 0);
        self.tell(.down, 0, @intFromEnum(ending), why);
    }

    fn shut(self: *Peer) void {
        if (self.is_down) return;
        self.is_down = true;
        self.connection.close(self.epoll);
        self.machine.disconnect();
        for (self.channels[0..self.machine.table.used], 0..) |*one, index| {
            if (one.is_used) self.locals[index].close(self.epoll);
        }
        while (self.openings.shift()) |one| sys.close(one.head.fd);
    }

    /// What was counted.
    pub fn counts(self: *const Peer) Counts {
        const machine = &self.machine;
        assert(machine.table.count > 0); // channel 0 stays
        return .{
            .connections = self.connections,
            .frames_sent = machine.kept.next,
            .frames_received = machine.frames_received,
            .bytes_sent = machine.bytes_sent,
            .bytes_received = machine.bytes_received,
            .resent = machine.resent,
            .duplicates = machine.duplicates,
            .unacknowledged = machine.kept.kept,
            .channels = machine.table.count - 1,
        };
    }
};
