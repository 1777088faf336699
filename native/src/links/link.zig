//! One link as T0 sees it: a session over a pair of byte rings and a bell, whatever is at the other end of the rings
//! (the peer process, or T1 with a socket). T1 touches only what is marked so.
//!
//!     free --open--> greeting --hello--> up --our bye--> closing --peer's bye or end--> down --free--> free
//!                        \________________\__peer's bye, signals, violations____________/
//!
//! LI-1 A down record comes after everything that had been received. LI-2 It is the last record. LI-3 What T1 finds
//! out it says in `signals`; only T0 changes the state.

const std = @import("std");
const bell = @import("../rings/bell.zig");
const carriage = @import("../rings/carriage.zig");
const arms = @import("../rings/arms.zig");
const frame = @import("../protocol/frame.zig");
const gate = @import("../rings/gate.zig");
const greeting = @import("greeting.zig");
const limits = @import("../limits.zig");
const pump = @import("pump.zig");
const records = @import("../protocol/record.zig");
const ring = @import("../rings/ring.zig");
const segment = @import("../rings/segment.zig");
const session = @import("../protocol/session.zig");
const socket = @import("../system/socket.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

const Down = records.Down;
const Kind = records.Kind;
const Record = records.Record;
const Signal = records.Signal;
const State = records.State;

pub const StreamPump = pump.Pump(socket.Stream);

/// What is the same for all links of a bus.
pub const Common = struct {
    epoch: u64,
    host: u64,
    ring_bytes: u32,
    beat_ms: u32,
    lease_ms: u32,
    /// T0 counts as stalled after this long; 0 = never.
    stall_ms: u32,
    /// T0's bell, and the memfd of its page, which a hello passes on.
    bell: bell.Bell,
    page_fd: i32,
    /// T1's.
    reactor_bell: bell.Bell,
    pool: *segment.Pool,
    /// Closed for a moment when a peer passes a descriptor, so that there is a number for it.
    spare_fd: i32,
    /// Faults that a test has planned; null unless it has armed this process.
    arms: ?*arms.Arms = null,

    /// Beats that fit `ms`, rounded up.
    pub fn ticks(self: *const Common, ms: u32) u32 {
        return std.math.divCeil(u32, ms, self.beat_ms) catch unreachable; // beat_ms is at least 1
    }
};

pub const Link = struct {
    common: *const Common,
    slot: u32,
    generation: u16,
    state: State,
    kind: Kind,
    fd: i32,

    inbound: session.Inbound = .{},
    outbound: session.Outbound,
    rx: ring.Consumer = undefined,
    tx: ring.Producer = undefined,
    has_rx: bool = false,
    has_tx: bool = false,
    /// The peer's (local) or T1's (stream) bell, and our bit in it.
    peer_bell: bell.Bell = undefined,
    peer_slot: u32 = 0,
    peer_bell_fd: i32 = -1,
    peer_epoch_wanted: u64 = 0,
    peer: frame.Hello = undefined,
    peer_pid: u32 = 0,
    /// Something was written since the last flush.
    dirty: bool = false,
    /// Views of this link are in the batch that T0 holds.
    borrowed: bool = false,
    /// T0 got TM_FULL and waits for a space record.
    blocked: bool = false,
    /// This side is going to say goodbye: the peer's goodbye does not end the link before ours is out.
    leaving: bool = false,
    /// The peer has said goodbye: nothing more comes.
    peer_left: bool = false,
    /// What lets frames through, in an armed process.
    gate: ?*gate.Gate = null,
    /// Bodies in segments, both ways.
    carriage: carriage.Carriage = .{},
    /// Milliseconds behind that the last stalled record told.
    told_behind: u32 = 0,
    down: Down = .none,
    detail: [limits.DETAIL_BYTES]u8 = @splat(0),

    /// The hello of a local peer, until it is complete.
    inbox: greeting.Inbox = .{},

    // Written by T1 (except at open, under the reactor's lock).
    signals: std.atomic.Value(u32) = .init(0),
    t1: Watched align(64) = .{},

    /// T1's own; T0 sets it up under the reactor's lock.
    pub const Watched = struct {
        pump: StreamPump = undefined,
        /// The rings are mapped and beats may be counted.
        live: bool = false,
        lease: bool = false,
        /// Ticks until a hello must have come; 0 = no limit.
        hello_ticks: u32 = 0,
        /// Ticks that a closed stream may linger; 0 = not closing.
        linger_ticks: u32 = 0,
        /// The socket has been told that nothing more comes.
        shut: bool = false,
        lease_ticks: u32 = 0,
        silent_ticks: u32 = 0,
        last_beat: u64 = 0,
        last_moved: u64 = 0,
        /// For how long a planned fault has let nothing through.
        held_ticks: u32 = 0,
        pid_fd: i32 = -1,
        /// The socket is in the epoll set, with these events.
        polled: bool = false,
        events: u32 = 0,
        problem: []const u8 = "",
    };

    /// The handle.
    pub fn id(self: *const Link) u32 {
        return @as(u32, self.generation) << 16 | self.slot;
    }

    // ---- beginning ----

    /// Make the inbound ring and say hello. The link owns nothing after an error. Returns a status.
    pub fn open(self: *Link, common: *const Common, slot: u32, generation: u16, kind: Kind, fd: i32) i32 {
        self.* = .{
            .common = common,
            .slot = slot,
            .generation = generation,
            .state = .greeting,
            .kind = kind,
            .fd = fd,
            .outbound = .{ .epoch = common.epoch },
            .inbound = .{ .segments = kind == .local },
        };
        const refused = if (common.arms) |one| one.refusesMemory() else 0;
        const rc = if (refused != 0) status.ofErrno(refused) else switch (kind) {
            .local => self.openLocal(),
            .stream => self.openStream(),
        };
        if (rc < 0) {
            self.fd = -1; // stays the caller's
            self.releaseAll();
        }
        return rc;
    }

    fn hello(self: *const Link) frame.Hello {
        return .{
            .slot = self.slot,
            .pid = @intCast(sys.getpid()),
            .ring_bytes = self.common.ring_bytes,
            .host = self.common.host,
            .beat_ms = self.common.beat_ms,
            .lease_ms = self.common.lease_ms,
        };
    }

    fn openLocal(self: *Link) i32 {
        const common = self.common;
        var map: ring.Map = undefined;
        const rc = greeting.send(self.fd, self.hello(), common.epoch, common.page_fd, common.bell.fd, &map);
        if (rc < 0) return rc;
        self.rx = .{ .map = map };
        self.has_rx = true;
        return status.OK;
    }

    fn openStream(self: *Link) i32 {
        const rc = sys.setNonblocking(self.fd);
        if (rc < 0) return status.ofErrno(rc);
        socket.setNoDelay(self.fd);
        const inbound = ring.Map.ofOwn(self.common.ring_bytes) orelse return status.ofErrno(-sys.ENOMEM);
        self.rx = .{ .map = inbound };
        self.has_rx = true;
        const outbound = ring.Map.ofOwn(self.common.ring_bytes) orelse return status.ofErrno(-sys.ENOMEM);
        self.tx = .{ .map = outbound };
        self.has_tx = true;
        self.peer_bell = self.common.reactor_bell;
        self.peer_slot = self.slot;
        self.t1.pump = StreamPump.init(.{ .fd = self.fd }, self.common.epoch, inbound, outbound);
        self.hello().encodeFrame(self.common.epoch, self.tx.place()[0..frame.Hello.FRAME_BYTES]);
        self.tx.commit(frame.Hello.FRAME_BYTES);
        return status.OK;
    }

    pub const Greeted = enum { waiting, up, failed };

    /// Read what is there of a local peer's hello. `.up`: it is complete, and the rings stand.
    pub fn greetLocal(self: *Link) Greeted {
        const complete = self.inbox.receive(self.fd) catch return self.refuseHello();
        if (!complete) return .waiting;
        const refused = if (self.common.arms) |one| one.refusesDescriptor() else 0;
        if (refused != 0) return self.failHello(greeting.NO_DESCRIPTOR);
        const bytes = self.inbox.bytes[0..frame.BYTES];
        const header = frame.decode(bytes) catch |why| return self.failHello(frame.explain(why));
        const event = self.inbound.receive(header, &self.inbox.bytes) catch return self.failHello(self.inbound.problem);
        self.peer = event.hello; // the first frame is a hello or an error
        self.peer_pid = self.inbox.sender() catch return self.refuseHello();
        if (!self.isExpected()) return .failed;
        const adopted = self.inbox.adopt(self.peer.ring_bytes) catch return self.refuseHello();
        self.tx = .{ .map = adopted.ring };
        self.has_tx = true;
        self.peer_bell = adopted.bell;
        self.peer_bell_fd = adopted.bell.fd;
        self.peer_slot = self.peer.slot;
        return .up;
    }

    fn refuseHello(self: *Link) Greeted {
        return self.failHello(self.inbox.problem);
    }

    fn failHello(self: *Link, problem: []const u8) Greeted {
        self.fail(problem);
        return .failed;
    }

    fn isExpected(self: *Link) bool {
        if (self.peer_epoch_wanted == 0 or self.peer_epoch_wanted == self.inbound.epoch) return true;
        self.fail("a hello of another epoch than expected");
        return false;
    }

    // ---- sending ----

    fn reserveOf(lane: frame.Lane) u64 {
        return if (lane == .control) 0 else limits.RING_CONTROL_RESERVE_BYTES;
    }

    /// Whether `bytes` fit now. If not, a space record will follow.
    pub fn ensureRoom(self: *Link, bytes: u64, lane: frame.Lane) bool {
        const reserve = reserveOf(lane);
        if ((self.tx.room(bytes, reserve) catch return self.brokenRing()) >= bytes) return true;
        self.blocked = true;
        self.tx.askForRoom();
        // The consumer may have made room between the look and the asking.
        return (self.tx.room(bytes, reserve) catch return self.brokenRing()) >= bytes;
    }

    /// End because of counters in shared memory; always false.
    pub fn brokenRing(self: *Link) bool {
        self.fail("a ring whose counters are broken");
        return false;
    }

    fn refuse(self: *const Link) ?i32 {
        return switch (self.state) {
            // The ring of a stream is our own: what is written waits in it for the hello and its credit.
            .greeting => if (self.kind == .local) status.FULL else null,
            .up => null,
            .closing => status.ERR_STATE,
            .down => status.ERR_DOWN,
            .free, .zombie => status.ERR_LINK,
        };
    }

    /// Send all of a message that fits; see `tm_link_send`.
    pub fn send(self: *Link, lane: frame.Lane, message: session.Message, cursor: *session.Cursor) i32 {
        if (self.refuse()) |why| return why;
        if (cursor.started == session.Cursor.NO) {
            if (lane == .data and self.outbound.missing != 0) return status.ERR_STATE;
            if (!carriage.begin(self, lane, message, cursor)) return self.fullOrDown();
        } else if (lane != .data or cursor.body_bytes > message.total or
            self.outbound.missing != message.total - cursor.body_bytes)
        {
            return status.ERR_STATE; // not the message that is unfinished here
        }
        var rest = message;
        rest.carrying = cursor.started == session.Cursor.YES;
        while (cursor.body_bytes < message.total) {
            const span = ring.alignFrame(self.outbound.fragmentLength());
            if (!self.ensureRoom(span, .data)) return self.fullOrDown();
            cursor.body_bytes += self.outbound.writeFragment(self.tx.place(), rest, cursor.body_bytes);
            self.tx.commit(span);
        }
        return status.OK;
    }

    fn fullOrDown(self: *const Link) i32 {
        return if (self.down == .none) status.FULL else status.ERR_DOWN;
    }

    /// Write the goodbye. The link ends when the peer's has come, or its end, or nothing for as long as a lease: so
    /// two sides that close at the same time lose nothing of each other. What is said lies in a local peer's memory
    /// at once; of a stream T1 says when all has left.
    pub fn sayBye(self: *Link) i32 {
        if (self.refuse()) |why| return why;
        if (self.outbound.missing != 0) return status.ERR_STATE;
        if (!self.ensureRoom(frame.BYTES, .control)) return self.fullOrDown();
        self.outbound.writeBye(self.tx.place());
        self.tx.commit(frame.BYTES);
        self.state = .closing;
        if (self.peer_left and self.kind == .local) self.end(.closed);
        return status.OK;
    }

    // ---- receiving ----

    /// Append records of what has come; `into` has room for one at least. `signals` were read before anything else was
    /// looked at, so what was sent before the end is seen before the end (LI-1). True: look again, there is more.
    pub fn poll(self: *Link, signals: u32, into: []Record, count: *u32) bool {
        var n: u32 = 0;
        defer count.* = n;
        if (self.state == .free or self.state == .zombie or (self.state == .down and self.down == .none)) return false;
        // The peer may have written before its hello, which came another way, has been looked at.
        const readable = self.state != .greeting or self.kind == .stream;
        const max: u32 = @intCast(@min(into.len, limits.POLL_LINK_RECORDS));
        while (readable and n < max and self.state != .down) {
            const record = self.next() orelse break;
            into[n] = record;
            n += 1;
        }
        if (self.gate) |one| one.leave(self);
        if (n == max) return true;
        if (self.state == .up and self.blocked and self.isRoomy()) {
            self.blocked = false;
            into[n] = self.newRecord(.space);
            n += 1;
            if (n == max) return true;
        }
        const behind = if (self.state == .up) self.rx.behind() else self.told_behind;
        if (behind != self.told_behind) {
            self.told_behind = behind;
            into[n] = self.newRecord(.stalled);
            into[n].flags = behind;
            n += 1;
            if (n == max) return true;
        }
        const has_ended = self.state != .down and signals & Signal.DOWN != 0;
        if (has_ended and !gate.delaysEnd(self, signals)) self.endBySignal(signals);
        if (self.state == .down and self.down != .none) {
            into[n] = self.newRecord(.down);
            into[n].flags = @intFromEnum(self.down);
            n += 1;
            self.down = .none; // LI-2
        }
        return false;
    }

    fn isRoomy(self: *Link) bool {
        if (!carriage.hasLanded(self)) return false;
        const half = self.tx.map.capacity / 2;
        return (self.tx.room(half, 0) catch return self.brokenRing()) >= half;
    }

    fn newRecord(self: *const Link, kind: records.RecordKind) Record {
        return .{ .link = self.id(), .kind = @intFromEnum(kind) };
    }

    /// The next record from the ring, or null when there is none (or the link has ended on it).
    fn next(self: *Link) ?Record {
        // Bounded: each turn consumes a frame, and the ring holds finitely many.
        while (true) {
            if (self.gate != null and !gate.seek(self)) return null;
            const available = self.rx.available() catch return self.failed("a ring whose counters are broken");
            if (available == 0) return null;
            if (available < frame.BYTES) return self.failed("a ring that ends in the middle of a frame");
            const bytes = self.rx.place();
            const header = frame.decode(bytes[0..frame.BYTES]) catch |why| return self.failed(frame.explain(why));
            if (header.span() > available) return self.failed("a ring that ends in the middle of a frame");
            const event = self.inbound.receive(header, bytes) catch return self.failed(self.inbound.problem);
            const base = self.rx.map.offset(self.rx.cursor);
            self.rx.advance(header.span());
            switch (event) {
                .dropped => continue,
                .message, .fragment => return self.content(header, base),
                .release, .retire => if (!carriage.receive(self, header, bytes)) return null,
                .hello => |said| {
                    self.peer = said;
                    self.peer_pid = said.pid;
                    if (!self.isExpected()) return null;
                    return self.nowUp();
                },
                .bye => {
                    self.peer_left = true;
                    if (self.leaving and (self.state != .closing or self.kind == .stream)) continue;
                    self.end(.closed);
                    return null;
                },
            }
        }
    }

    fn failed(self: *Link, problem: []const u8) ?Record {
        self.fail(problem);
        return null;
    }

    fn content(self: *const Link, header: frame.Header, base: u32) Record {
        var one = self.newRecord(if (header.kind == .message) .message else .fragment);
        if (header.more) one.flags |= records.FLAG_MORE;
        if (header.lane == .control) one.flags |= records.FLAG_CONTROL;
        if (header.chunk) one.flags |= records.FLAG_CHUNK;
        one.n_bodies = header.n_bodies;
        one.head_offset = base + frame.BYTES;
        one.head_size = header.head_size;
        one.sizes_offset = base + header.sizesOffset();
        one.body_offset = base + header.bodyOffset();
        one.body_size = header.length - header.bodyOffset();
        return one;
    }

    /// The link works in both directions from here on.
    pub fn nowUp(self: *Link) Record {
        std.debug.assert(self.has_tx);
        if (self.state == .greeting) self.state = .up; // a stream may be closing already
        return self.newRecord(.up);
    }

    /// Give back what has been read; wakes a peer that waits for room.
    pub fn release(self: *Link) void {
        if (self.has_rx and self.rx.release() and self.has_tx) self.peer_bell.ring(self.peer_slot);
    }

    // ---- ending ----

    fn end(self: *Link, why: Down) void {
        if (self.state == .down) return;
        self.state = .down;
        self.down = why;
    }

    /// End because the peer broke the protocol.
    pub fn fail(self: *Link, problem: []const u8) void {
        self.explainDown("the peer sent ", problem);
        self.end(.protocol);
    }

    /// End as if the wire had been lost.
    pub fn lose(self: *Link) void {
        self.explainDown("", "lost by a planned fault");
        self.end(.eof);
    }

    fn explainDown(self: *Link, prefix: []const u8, text: []const u8) void {
        _ = std.fmt.bufPrintZ(&self.detail, "{s}{s}", .{ prefix, text }) catch {
            self.detail[0] = 0; // all texts are literals shorter than the buffer
        };
    }

    fn endBySignal(self: *Link, signals: u32) void {
        // Who has said goodbye does not ask how the peer takes it.
        if (self.state == .closing or self.peer_left) return self.end(.closed);
        if (signals & Signal.PROTOCOL != 0) {
            self.explainDown("the peer sent ", self.t1.problem);
            return self.end(.protocol);
        }
        if (signals & Signal.EXITED != 0) return self.end(.exited);
        if (signals & Signal.EOF != 0) {
            if (signals & Signal.TORN != 0) self.explainDown("", "the stream ended in the middle of a frame");
            return self.end(.eof);
        }
        if (signals & Signal.NO_HELLO != 0) {
            self.explainDown("", "no hello came in time");
            return self.end(.lease);
        }
        std.debug.assert(signals & Signal.LEASE != 0);
        self.end(.lease);
    }

    /// Give back all memory and descriptors. T1 must not know the link any more.
    pub fn releaseAll(self: *Link) void {
        self.common.pool.forgetLink(self.slot);
        self.carriage.shelf.deinit();
        if (self.has_rx) self.rx.map.deinit();
        if (self.has_tx) self.tx.map.deinit();
        self.has_rx = false;
        self.has_tx = false;
        if (self.peer_bell_fd >= 0) sys.unmap(@ptrCast(@alignCast(self.peer_bell.page)), bell.PAGE_BYTES);
        self.closeFds();
        self.state = .free;
    }

    /// Close descriptors only; also what a forked child does.
    pub fn closeFds(self: *Link) void {
        sys.closeAt(&self.peer_bell_fd);
        sys.closeAt(&self.fd);
        sys.closeAt(&self.t1.pid_fd);
        self.inbox.closeFds();
    }
};
