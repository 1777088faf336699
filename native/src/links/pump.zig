//! The byte stream of a link whose peer is not on this host: moves frames between a pair of rings (the other end of
//! each is T0) and a stream socket, and does what only T1 can do in time: credits and beats. Generic over its I/O, so
//! that tests and fuzzers drive the same code over torn, slow and broken streams. No clock: silence and beats are
//! counted in ticks.
//!
//!     T0 --outbound ring--> [transmit] --> socket        socket --> [receive] --inbound ring--> T0
//!
//! PP-1 The socket can always be read: a peer sends no more than it has credit for, and credit is room in the inbound
//! ring. PP-2 Credits, beats and a hello need no credit; the first two are taken out of the stream here, as they
//! come. PP-3 They leave only between two frames, and a frame begins only when all of it has credit. So neither side
//! can wait in
//!      the middle of a frame for a credit that the other cannot send.
//! PP-4 T0 sees whole frames only: the head of the inbound ring moves when the last byte of a frame is there.

const std = @import("std");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const ring = @import("../rings/ring.zig");

/// What an `Io` has: `read(buffer) i64` and `write(bytes) i64`: bytes moved, 0 = end of stream (read), negative: see
/// here.
pub const WOULD_BLOCK: i64 = -11;

pub const Wait = enum { nothing, socket };

/// The pump over an `Io`.
pub fn Pump(comptime Io: type) type {
    return struct {
        const Self = @This();

        io: Io,
        epoch: u64,
        inbound: ring.Producer,
        outbound: ring.Consumer,

        /// Bytes read beyond the head of the inbound ring: the beginning of a frame.
        partial: u64 = 0,
        /// Frame bytes the peer may send in all, frame bytes it has sent, and bytes in the ring that are not counted.
        granted: u64,
        received: u64 = 0,
        uncounted: u64 = 0,

        /// The same for our side.
        credit: u64 = 0,
        peer_window: u64 = 0,
        peer_epoch: u64 = 0,
        sent: u64 = 0,
        /// Bytes of whole frames that may leave and have not yet.
        cleared: u64 = 0,
        /// The last of the cleared frames is a bye.
        bye_cleared: bool = false,
        bye_sent: bool = false,
        bye_received: bool = false,

        /// Frames of our own on their way out.
        own: [2 * frame.BYTES]u8 = undefined,
        own_at: u32 = 0,
        own_end: u32 = 0,

        greeted: bool = false,
        hello_sent: bool = false,
        sent_since_tick: bool = false,
        heard_since_tick: bool = false,
        silent_ticks: u32 = 0,
        /// Milliseconds for which our T0 has not turned, told with every beat; what the peer's beats say of its own.
        behind_ms: u32 = 0,
        peer_behind_ms: u32 = 0,
        /// Why `receive` said error.Protocol.
        problem: []const u8 = "",

        /// The other ends of both rings are T0's.
        pub fn init(io: Io, epoch: u64, inbound: ring.Map, outbound: ring.Map) Self {
            return .{
                .io = io,
                .epoch = epoch,
                .inbound = .{ .map = inbound },
                .outbound = .{ .map = outbound },
                .granted = window(inbound.capacity),
            };
        }

        /// First credit for a ring of this capacity; both sides compute it from the hello.
        fn window(capacity: u32) u64 {
            return capacity - limits.STREAM_SLACK_BYTES;
        }

        // ---- from the socket ----

        pub const ReceiveError = error{ Protocol, Ended, Broken };

        /// Read what is there. True: T0 has something new.
        pub fn receive(self: *Self) ReceiveError!bool {
            var delivered = false;
            for (0..limits.STREAM_ROUNDS) |_| {
                const used = self.inbound.outstanding() catch return self.fail("a ring whose counters are broken");
                const space = self.inbound.map.capacity - used - self.partial;
                if (space == 0) return self.fail("more bytes than it had credit for"); // PP-1
                const n = self.io.read((self.inbound.place() + self.partial)[0..space]);
                if (n == WOULD_BLOCK) break;
                if (n < 0) return error.Broken;
                if (n == 0) return error.Ended;
                self.heard_since_tick = true;
                self.partial += @intCast(n);
                delivered = try self.parse() or delivered;
                if (n < space) break; // the socket is empty, most likely; if not, epoll says so
            }
            return delivered;
        }

        fn fail(self: *Self, problem: []const u8) ReceiveError {
            self.problem = problem;
            return error.Protocol;
        }

        /// Sort what has been read: frames for T0 are committed, frames for us are taken out.
        fn parse(self: *Self) ReceiveError!bool {
            var delivered = false;
            while (self.partial >= frame.BYTES) {
                const at = self.inbound.place();
                const header = frame.decode(at[0..frame.BYTES]) catch |problem|
                    return self.fail(frame.explain(problem));
                if (!self.greeted and header.kind != .hello) return self.fail("a frame before the hello");
                switch (header.kind) {
                    .beat => {
                        self.beaten(header);
                        self.takeOut();
                    },
                    .credit => {
                        try self.credited(header);
                        self.takeOut();
                    },
                    .release, .retire => return self.fail("a segment on a link without any"),
                    .hello, .message, .fragment, .bye => {
                        if (self.partial < header.span()) break;
                        try self.commit(header, at);
                        delivered = true;
                    },
                }
            }
            return delivered;
        }

        fn commit(self: *Self, header: frame.Header, at: [*]const u8) ReceiveError!void {
            const span = header.span();
            if (header.kind == .hello) {
                if (self.greeted) return self.fail("a second hello");
                self.greeted = true;
                self.uncounted += span;
                const hello = frame.Hello.decodePayload(at[frame.BYTES..][0..frame.Hello.PAYLOAD_BYTES]);
                // T0 checks the hello in full; here only what the arithmetic needs.
                if (hello.ring_bytes < limits.RING_BYTES or hello.ring_bytes > limits.RING_BYTES_MAX)
                    return self.fail("a hello with a ring size out of range");
                self.peer_window = window(hello.ring_bytes);
                self.credit = self.peer_window;
                self.peer_epoch = header.epoch;
            } else {
                self.bye_received = header.kind == .bye;
                self.received += span;
                if (self.received > self.granted) return self.fail("more bytes than it had credit for");
            }
            self.inbound.commit(span);
            self.partial -= span;
        }

        fn beaten(self: *Self, header: frame.Header) void {
            if (header.epoch != self.peer_epoch) return; // of another incarnation
            self.peer_behind_ms = @truncate(@min(header.sequence, std.math.maxInt(u32)));
        }

        fn credited(self: *Self, header: frame.Header) ReceiveError!void {
            if (header.epoch != self.peer_epoch) return; // of another incarnation: worth nothing
            if (header.sequence < self.credit or header.sequence - self.sent > self.peer_window)
                return self.fail("a credit out of range");
            self.credit = header.sequence;
        }

        /// Drop the frame at the place of the inbound ring and close the gap, by what was read with it.
        fn takeOut(self: *Self) void {
            const at = self.inbound.place();
            self.partial -= frame.BYTES;
            const rest: usize = @intCast(self.partial);
            @memmove(at[0..rest], at[frame.BYTES..][0..rest]); // no loop: it may be all that a ring holds
        }

        /// Give credit for what T0 has consumed, when it is worth a frame.
        fn grant(self: *Self) void {
            const tail = @atomicLoad(u64, &self.inbound.map.header().tail, .seq_cst);
            const possible = (tail -| self.uncounted) + window(self.inbound.map.capacity);
            if (possible <= self.granted) return;
            if (possible - self.granted < window(self.inbound.map.capacity) / 4) return;
            if (!self.queueOwn(.{ .kind = .credit, .epoch = self.epoch, .sequence = possible })) return;
            self.granted = possible;
        }

        /// Look after credits. To be called after `receive` and when T0 has consumed something.
        pub fn tend(self: *Self) void {
            if (!self.greeted) return;
            self.grant();
            if (self.received + window(self.inbound.map.capacity) / 2 > self.granted) {
                // The peer may run dry: T0 is to wake us when it has made room, and may have done so just now.
                self.inbound.askForRoom();
                self.grant();
            }
        }

        // ---- to the socket ----

        pub const TransmitError = error{ Broken, Corrupt };

        /// Queue a frame of our own. False: both places are taken, ask again later.
        fn queueOwn(self: *Self, header: frame.Header) bool {
            if (self.own_at == self.own_end) {
                self.own_at = 0;
                self.own_end = 0;
            }
            if (self.own_end + frame.BYTES > self.own.len) return false;
            frame.encode(header, self.own[self.own_end..][0..frame.BYTES]);
            self.own_end += frame.BYTES;
            return true;
        }

        /// Write what may leave. `.socket`: the socket is full, call again when it is writable. Sets `freed` when T0
        /// waits for room and there is some now.
        pub fn transmit(self: *Self, freed: *bool) TransmitError!Wait {
            for (0..limits.STREAM_ROUNDS) |_| {
                if (self.own_at < self.own_end and self.cleared == 0) { // PP-3
                    const n = self.io.write(self.own[self.own_at..self.own_end]);
                    if (n == WOULD_BLOCK) return .socket;
                    if (n < 0) return error.Broken;
                    self.own_at += @intCast(n);
                    continue;
                }
                if (self.cleared == 0) try self.clear();
                if (self.cleared == 0) return .nothing;
                const n = self.io.write(self.outbound.place()[0..@intCast(self.cleared)]);
                if (n == WOULD_BLOCK) return .socket;
                if (n < 0) return error.Broken;
                const moved: u64 = @intCast(n);
                self.outbound.advance(moved);
                self.cleared -= moved;
                self.sent_since_tick = true;
                if (self.outbound.release()) freed.* = true;
                if (self.cleared == 0 and self.bye_cleared) self.bye_sent = true;
            }
            return .socket; // more to do; the socket is writable, so epoll comes back at once, after the others
        }

        /// Clear whole frames that have credit, up to one batch.
        fn clear(self: *Self) TransmitError!void {
            std.debug.assert(self.cleared == 0);
            const available = try self.outbound.available();
            const first = self.outbound.place();
            while (self.cleared < available and self.cleared < limits.STREAM_BATCH_BYTES) {
                // Our own T0 wrote these; a ring that cannot be decoded is a bug of ours.
                const header = frame.decode((first + self.cleared)[0..frame.BYTES]) catch return error.Corrupt;
                if (header.kind == .hello) {
                    self.hello_sent = true;
                } else {
                    if (header.span() > self.credit - self.sent) return;
                    self.sent += header.span();
                }
                self.cleared += header.span();
                if (header.kind == .bye) self.bye_cleared = true;
            }
        }

        // ---- ticks ----

        /// One beat has passed. Returns the ticks of silence of the peer.
        pub fn tick(self: *Self) u32 {
            const idle = !self.sent_since_tick and self.cleared == 0 and self.own_at == self.own_end;
            if (idle and self.hello_sent and !self.bye_sent) {
                _ = self.queueOwn(.{ .kind = .beat, .epoch = self.epoch, .sequence = self.behind_ms });
            }
            self.sent_since_tick = false;
            self.silent_ticks = if (self.heard_since_tick) 0 else self.silent_ticks +| 1;
            self.heard_since_tick = false;
            return self.silent_ticks;
        }

        /// Whether neither side has anything more to say, credits included.
        pub fn isDone(self: *const Self) bool {
            return self.bye_sent and self.bye_received;
        }

        /// Whether the stream stopped in the middle of a frame.
        pub fn isTorn(self: *const Self) bool {
            return self.partial > 0;
        }
    };
}
