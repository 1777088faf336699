//! T1: the thread that never waits for Python. Lifelines, ended processes, ended sockets, beats, leases, and the
//! bytes of stream links; and whether T0 still turns. It changes no state of T0's; what it finds goes into
//! `Link.signals`, and T0's bell is rung.
//!
//! RT-1 A lifeline is answered before any lock is taken. RT-2 The lock is held while events are handled, never while
//! waiting; T0 takes it only to open, watch, close and free links. RT-3 Silence is counted in ticks that T1 itself has
//! seen: after a stop of this process, or of the whole machine, no lease has run out meanwhile.

const std = @import("std");
const arms = @import("../rings/arms.zig");
const bell = @import("../rings/bell.zig");
const limits = @import("../limits.zig");
const link = @import("link.zig");
const socket = @import("../system/socket.zig");
const stall = @import("../protocol/stall.zig");
const sys = @import("../system/sys.zig");

const Link = link.Link;
const Signal = @import("../protocol/record.zig").Signal;

/// What ends a link whose peer says nothing: 0 is never for a hello, and for a lease that of the bus.
pub const Watched = struct { lease: bool, hello_ms: u32, lease_ms: u32 = 0 };

/// What an epoll event is about: tag in the top byte, generation and slot of a link below.
const Tag = enum(u8) { bell = 1, timer = 2, lifeline = 3, socket = 4, process = 5, gate = 6 };

fn dataOf(tag: Tag, about: u32) u64 {
    return @as(u64, @intFromEnum(tag)) << 56 | about;
}

pub const Reactor = struct {
    common: *const link.Common,
    links: []Link,
    /// Slots in use. Under the lock.
    active: bell.Bits,
    lock: sys.Mutex,
    epoll: i32,
    timer: i32,
    bell: bell.Bell,
    lifelines: [limits.LIFELINES_MAX]i32,
    lifelines_count: u32,
    stopping: std.atomic.Value(bool),
    thread: sys.Thread,
    /// Polls of T0, which counts them.
    polls: std.atomic.Value(u64),
    watch: stall.Watch,
    /// Faults that a test has planned. Under the lock.
    arms: ?*arms.Arms,

    /// Make descriptors and start the thread. `own_bell` is T1's, made by the bus. Returns 0 or -errno; 1: no thread.
    pub fn init(self: *Reactor, common: *const link.Common, links: []Link) i32 {
        self.common = common;
        self.links = links;
        self.active = @splat(0);
        self.lock = .{};
        self.bell = common.reactor_bell;
        self.lifelines = @splat(-1);
        self.lifelines_count = 0;
        self.stopping = .init(false);
        self.polls = .init(0);
        self.watch = .{ .threshold = common.ticks(common.stall_ms) };
        self.arms = null;
        self.timer = -1;
        self.epoll = sys.epollCreate();
        if (self.epoll < 0) return self.epoll;
        self.timer = sys.timerfd(common.beat_ms);
        var rc = self.timer;
        if (rc >= 0) rc = sys.epollAdd(self.epoll, self.timer, sys.IN, dataOf(.timer, 0));
        if (rc >= 0) rc = sys.epollAdd(self.epoll, self.bell.fd, sys.IN, dataOf(.bell, 0));
        if (rc >= 0) {
            if (sys.threadStart(main, self)) |thread| {
                self.thread = thread;
                return 0;
            }
            rc = 1;
        }
        self.closeFds();
        return rc;
    }

    /// Wait for T1 to end; it never waits itself.
    pub fn stopAndJoin(self: *Reactor) void {
        self.stopping.store(true, .seq_cst);
        self.bell.wake();
        sys.threadJoin(self.thread);
    }

    /// Close all descriptors; also what a forked child does.
    pub fn closeFds(self: *Reactor) void {
        sys.closeAt(&self.epoll);
        sys.closeAt(&self.timer);
        for (&self.lifelines) |*fd| sys.closeAt(fd);
    }

    // ---- called by T0 ----

    pub const AddError = error{ Full, System };

    /// Watch a process whose end is ours. `errno_out` says why, for error.System.
    pub fn addLifeline(self: *Reactor, pidfd: i32, errno_out: *i32) AddError!void {
        if (self.lifelines_count == limits.LIFELINES_MAX) return error.Full;
        const fd = sys.duplicate(pidfd);
        errno_out.* = fd;
        if (fd < 0) return error.System;
        errno_out.* = sys.epollAdd(self.epoll, fd, sys.IN, dataOf(.lifeline, 0));
        if (errno_out.* < 0) {
            sys.close(fd);
            return error.System;
        }
        self.lifelines[self.lifelines_count] = fd;
        self.lifelines_count += 1;
    }

    /// Watch a link from now on. Returns 0 or -errno.
    pub fn adopt(self: *Reactor, one: *Link, watched: Watched) i32 {
        self.lock.lock();
        defer self.lock.unlock();
        const t1 = &one.t1;
        t1.lease = watched.lease;
        t1.lease_ticks = self.common.ticks(if (watched.lease_ms == 0) self.common.lease_ms else watched.lease_ms);
        t1.hello_ticks = if (watched.hello_ms == 0) 0 else @max(1, self.common.ticks(watched.hello_ms));
        t1.live = one.kind == .stream;
        t1.events = sys.IN | sys.RDHUP;
        const rc = sys.epollAdd(self.epoll, one.fd, t1.events, dataOf(.socket, one.id()));
        if (rc < 0) return rc;
        t1.polled = true;
        self.active[one.slot / 64] |= bitOf(one.slot);
        return 0;
    }

    /// A local link has got its hello (`live`), or needs more bytes of it.
    pub fn greeted(self: *Reactor, one: *Link, live: bool) void {
        self.lock.lock();
        defer self.lock.unlock();
        if (live) {
            one.t1.live = true;
            one.t1.hello_ticks = 0;
            one.t1.last_beat = @atomicLoad(u64, &one.rx.map.header().beat, .monotonic);
        } else {
            self.setEvents(one, sys.IN | sys.RDHUP);
        }
    }

    /// Look after planned faults from now on. Returns 0 or -errno.
    pub fn arm(self: *Reactor, one: *arms.Arms) i32 {
        self.lock.lock();
        defer self.lock.unlock();
        const rc = sys.epollAdd(self.epoll, one.timer, sys.IN, dataOf(.gate, 0));
        if (rc >= 0) self.arms = one;
        return rc;
    }

    /// Returns 0 or -errno.
    pub fn watchProcess(self: *Reactor, one: *Link, pidfd: i32) i32 {
        self.lock.lock();
        defer self.lock.unlock();
        std.debug.assert(one.t1.pid_fd < 0);
        const refused = if (self.arms) |armed| armed.refusesDescriptor() else 0;
        const fd = if (refused != 0) refused else sys.duplicate(pidfd);
        if (fd < 0) return fd;
        const rc = sys.epollAdd(self.epoll, fd, sys.IN, dataOf(.process, one.id()));
        if (rc < 0) {
            sys.close(fd);
            return rc;
        }
        one.t1.pid_fd = fd;
        return 0;
    }

    /// A link has said goodbye: it may take as long as a lease without any progress.
    pub fn linger(self: *Reactor, one: *Link) void {
        self.lock.lock();
        defer self.lock.unlock();
        one.t1.linger_ticks = one.t1.lease_ticks;
    }

    /// Forget a link; T1 does not touch it after this.
    pub fn abandon(self: *Reactor, one: *Link) void {
        self.lock.lock();
        defer self.lock.unlock();
        self.active[one.slot / 64] &= ~bitOf(one.slot);
        self.unpoll(one);
        if (one.t1.pid_fd >= 0) sys.epollRemove(self.epoll, one.t1.pid_fd);
        one.t1.live = false;
    }

    fn bitOf(slot: u32) u64 {
        return @as(u64, 1) << @intCast(slot % 64);
    }

    // ---- the thread ----

    fn main(argument: ?*anyopaque) callconv(.c) ?*anyopaque {
        const self: *Reactor = @ptrCast(@alignCast(argument.?));
        sys.threadName("trimesh-t1");
        var events: [limits.EVENTS_MAX]sys.Event = undefined;
        while (!self.stopping.load(.seq_cst)) {
            const pending = self.bell.arm() or self.stopping.load(.seq_cst);
            const n = sys.epollWait(self.epoll, &events, if (pending) 0 else -1);
            for (events[0..n]) |event| { // RT-1
                if (event.data.u64 >> 56 == @intFromEnum(Tag.lifeline)) sys.killOwnGroup();
            }
            self.bell.disarm();
            self.lock.lock();
            defer self.lock.unlock(); // RT-2
            self.handle(events[0..n]);
        }
        return null;
    }

    fn handle(self: *Reactor, events: []const sys.Event) void {
        var ticked = false;
        for (events) |event| {
            const about: u32 = @truncate(event.data.u64);
            switch (std.enums.fromInt(Tag, event.data.u64 >> 56) orelse unreachable) { // we made the data ourselves
                .bell, .lifeline => {},
                .timer => ticked = true,
                .socket => if (self.find(about)) |one| self.onSocket(one, event.events),
                .process => if (self.find(about)) |one| self.onProcess(one),
                .gate => self.arms.?.ringAll(self.common.bell),
            }
        }
        var bits: bell.Bits = @splat(0);
        if (self.bell.take(&bits)) self.serveAll(&bits);
        // Last: what the sockets had to say renews leases first.
        if (ticked) {
            sys.eventfdClear(self.timer);
            self.tickAll();
        }
    }

    fn find(self: *Reactor, id: u32) ?*Link {
        const slot = id & 0xFFFF;
        std.debug.assert(slot < self.links.len);
        if (self.active[slot / 64] & bitOf(slot) == 0) return null;
        const one = &self.links[slot];
        return if (one.id() == id) one else null; // an event of a link that was freed meanwhile
    }

    fn tell(self: *Reactor, one: *Link, signals: u32) void {
        _ = one.signals.fetchOr(signals, .acq_rel);
        self.common.bell.ring(one.slot);
    }

    fn setEvents(self: *Reactor, one: *Link, events: u32) void {
        if (!one.t1.polled or one.t1.events == events) return;
        one.t1.events = events;
        const rc = sys.epollModify(self.epoll, one.fd, events, dataOf(.socket, one.id()));
        std.debug.assert(rc == 0); // the descriptor is in the set
    }

    fn unpoll(self: *Reactor, one: *Link) void {
        if (!one.t1.polled) return;
        one.t1.polled = false;
        sys.epollRemove(self.epoll, one.fd);
    }

    fn onProcess(self: *Reactor, one: *Link) void {
        sys.epollRemove(self.epoll, one.t1.pid_fd);
        self.tell(one, Signal.EXITED);
    }

    fn onSocket(self: *Reactor, one: *Link, events: u32) void {
        if (!one.t1.polled) return;
        if (one.kind == .stream) return self.serve(one, events & (sys.IN | sys.HUP | sys.ERR | sys.RDHUP) != 0);
        var signals: u32 = 0;
        if (events & (sys.RDHUP | sys.HUP | sys.ERR) != 0) {
            signals |= Signal.EOF;
            self.unpoll(one);
        }
        if (events & sys.IN != 0) {
            // Later messages on this socket are T0's to fetch, so look away after the first.
            signals |= Signal.READABLE;
            self.setEvents(one, sys.RDHUP);
        }
        if (signals != 0) self.tell(one, signals);
    }

    fn serveAll(self: *Reactor, bits: *const bell.Bits) void {
        for (bits, 0..) |word, i| {
            var left = word & self.active[i];
            while (left != 0) : (left &= left - 1) {
                const one = &self.links[i * 64 + @ctz(left)];
                if (one.kind == .stream) self.serve(one, false);
            }
        }
    }

    /// Move the bytes of a stream link.
    fn serve(self: *Reactor, one: *Link, readable: bool) void {
        if (!one.t1.polled) return;
        const pump = &one.t1.pump;
        if (readable) {
            const delivered = pump.receive() catch |problem| return self.streamEnded(one, problem);
            if (delivered) self.common.bell.ring(one.slot);
            if (one.rx.behind() != pump.peer_behind_ms) {
                @atomicStore(u32, &one.rx.map.header().behind, pump.peer_behind_ms, .monotonic);
                self.common.bell.ring(one.slot);
            }
        }
        if (pump.greeted) one.t1.hello_ticks = 0;
        pump.tend();
        var freed = false;
        const wait = pump.transmit(&freed) catch |problem| switch (problem) {
            // What the peer sent before it went away is still to be read; its end is seen there.
            error.Broken => if (readable) return self.streamEnded(one, error.Broken) else .nothing,
            error.Corrupt => @panic("a frame of our own cannot be decoded"),
        };
        if (freed) self.common.bell.ring(one.slot);
        if (pump.isDone() and !one.t1.shut) {
            // Not before both have said goodbye: until then credits must pass. And the end comes when the peer's end
            // has been read, because closing a TCP socket that has unread bytes throws away what is on its way out.
            one.t1.shut = true;
            socket.shutdownWrite(one.fd);
        }
        self.setEvents(one, if (wait == .socket) sys.IN | sys.OUT else sys.IN);
    }

    fn streamEnded(self: *Reactor, one: *Link, problem: link.StreamPump.ReceiveError) void {
        self.unpoll(one);
        switch (problem) {
            error.Ended, error.Broken => {
                self.tell(one, Signal.EOF | if (one.t1.pump.isTorn()) Signal.TORN else 0);
            },
            error.Protocol => {
                one.t1.problem = one.t1.pump.problem;
                self.tell(one, Signal.PROTOCOL);
            },
        }
    }

    // ---- ticks ----

    fn tickAll(self: *Reactor) void {
        self.watchCaller();
        for (self.active, 0..) |word, i| {
            var left = word;
            while (left != 0) : (left &= left - 1) self.tick(&self.links[i * 64 + @ctz(left)]);
        }
    }

    /// Ring T0, and tell the peers when it does not answer, or does again.
    fn watchCaller(self: *Reactor) void {
        if (self.watch.threshold == 0) return;
        defer self.common.bell.wake();
        const news = self.watch.tick(self.polls.load(.acquire)) orelse return;
        // Whom a debugger holds is not stalled; it is looked at again at the next tick.
        if (news > 0 and sys.isTraced(@intCast(sys.getpid()))) return;
        self.watch.said = news;
        const behind_ms = news *| self.common.beat_ms;
        for (self.active, 0..) |word, i| {
            var left = word;
            while (left != 0) : (left &= left - 1) tellBehind(&self.links[i * 64 + @ctz(left)], behind_ms);
        }
    }

    fn tellBehind(one: *Link, behind_ms: u32) void {
        switch (one.kind) {
            .stream => one.t1.pump.behind_ms = behind_ms, // with the next beat
            .local => if (one.t1.live) {
                @atomicStore(u32, &one.tx.map.header().behind, behind_ms, .monotonic);
                one.peer_bell.ring(one.peer_slot);
            },
        }
    }

    fn tick(self: *Reactor, one: *Link) void {
        const t1 = &one.t1;
        if (t1.hello_ticks > 0) {
            t1.hello_ticks -= 1;
            if (t1.hello_ticks == 0) self.tell(one, Signal.NO_HELLO);
        }
        if (!t1.live) return;
        const moved = hasMoved(one);
        const heard = switch (one.kind) {
            .local => tickLocal(one),
            .stream => t1.pump.tick(),
        };
        t1.held_ticks = if (self.isHeld(one)) t1.held_ticks +| 1 else 0;
        const silent = @max(heard, t1.held_ticks);
        if (one.kind == .stream) self.serve(one, false); // a beat may have been queued
        if (t1.linger_ticks > 0 and !moved) {
            t1.linger_ticks -= 1;
            if (t1.linger_ticks == 0) self.tell(one, Signal.EOF);
        }
        const greeted_or_local = one.kind == .local or t1.pump.greeted;
        if (t1.lease and greeted_or_local and silent == t1.lease_ticks) {
            // Whom a debugger holds is not lost; it is looked at again at the next tick.
            const is_held = one.kind == .local and sys.isTraced(one.peer_pid);
            if (is_held) {
                t1.silent_ticks -|= 1;
                t1.held_ticks -|= 1;
            } else self.tell(one, Signal.LEASE);
        }
    }

    /// Whether a planned fault lets nothing through, heartbeats included.
    fn isHeld(self: *Reactor, one: *Link) bool {
        const armed = self.arms orelse return false;
        const peer = if (one.kind == .local) one.inbound.epoch else one.t1.pump.peer_epoch;
        return armed.table.isHeld(peer, self.common.epoch);
    }

    /// Whether anything passed over the rings since the last tick.
    fn hasMoved(one: *Link) bool {
        const head = @atomicLoad(u64, &one.rx.map.header().head, .monotonic);
        const tail = @atomicLoad(u64, &one.tx.map.header().tail, .monotonic);
        defer one.t1.last_moved = head +% tail;
        return head +% tail != one.t1.last_moved;
    }

    fn tickLocal(one: *Link) u32 {
        const t1 = &one.t1;
        _ = @atomicRmw(u64, &one.tx.map.header().beat, .Add, 1, .monotonic);
        const beat = @atomicLoad(u64, &one.rx.map.header().beat, .monotonic);
        t1.silent_ticks = if (beat == t1.last_beat) t1.silent_ticks +| 1 else 0;
        t1.last_beat = beat;
        return t1.silent_ticks;
    }
};
