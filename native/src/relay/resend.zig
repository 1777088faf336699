//! Frames that the peer may not have got, each in one piece, in memory that never grows. PURE.
//!
//!     not wrapped    [ ....... first ==== at ==== last ........ ]
//!     wrapped        [ === at ==== last ...... first ===== lap .. ]
//!
//! RS-1 A frame has a number, one more than the one before. RS-2 Bytes from `at` on have not left on this connection;
//! a frame that has begun to leave leaves as a whole. RS-3 What is kept is no more than its limit; then each frame has
//! room in one piece. RS-4 Nothing is acknowledged that has not left.

const std = @import("std");
const assert = std.debug.assert;
const frames = @import("frame.zig");
const limits = @import("../limits.zig");

/// Of kept frames; what is beyond limit HOST_RESEND_BYTES is for frames that are no data.
pub const KEPT_BYTES_MAX = limits.HOST_RESEND_BYTES + limits.HOST_RESEND_RESERVE_BYTES;

/// Where one lap ends, less than a frame is lost; so two of them are enough (RS-3).
pub const MEMORY_BYTES = KEPT_BYTES_MAX + 2 * frames.BYTES_MAX;

pub const Resend = struct {
    memory: []u8,
    first: usize = 0,
    last: usize = 0,
    lap: usize = 0,
    is_wrapped: bool = false,
    at: usize = 0,
    /// Of the frame that has begun to leave.
    rest: usize = 0,
    kept: usize = 0,
    unsent: usize = 0,
    /// Numbers: of the first one that is kept, of the next one that leaves on this connection, of the next one that is
    /// made; and the largest `leaving` of all connections.
    oldest: u64 = 0,
    leaving: u64 = 0,
    next: u64 = 0,
    left: u64 = 0,

    /// Where a frame of up to `bytes` of payload can be made, header first. Null: there is no room, see `limit`.
    pub fn place(self: *const Resend, bytes: usize, limit: usize) ?[]u8 {
        const span = frames.BYTES + bytes;
        assert(span <= frames.BYTES_MAX);
        assert(limit <= KEPT_BYTES_MAX);
        if (self.kept + span > limit) return null;
        return self.memory[self.start(span)..][0..span];
    }

    fn start(self: *const Resend, span: usize) usize {
        return if (self.is_wrapped or self.memory.len - self.last >= span) self.last else 0;
    }

    /// A frame was made at a `place`, of this header and as many bytes of payload as it says.
    pub fn commit(self: *Resend, to: []u8, header: frames.Header) void {
        var numbered = header;
        numbered.number = self.next;
        frames.encode(numbered, to[0..frames.BYTES]);
        const begin = @intFromPtr(to.ptr) - @intFromPtr(self.memory.ptr);
        if (begin != self.last) {
            assert(begin == 0);
            assert(!self.is_wrapped);
            self.is_wrapped = true;
            self.lap = self.last;
            if (self.at == self.lap) self.at = 0;
        }
        const span = numbered.span();
        assert(span <= to.len);
        self.last = begin + span;
        assert(!self.is_wrapped or self.last < self.first);
        self.kept += span;
        self.unsent += span;
        self.next += 1;
        self.check();
    }

    /// What is so between two calls.
    fn check(self: *const Resend) void {
        assert(self.oldest <= self.leaving); // RS-1, RS-4
        assert(self.leaving <= self.left);
        assert(self.left <= self.next);
        assert(self.unsent <= self.kept);
        assert(self.kept <= KEPT_BYTES_MAX); // RS-3
        assert((self.kept == 0) == (self.oldest == self.next));
        assert((self.unsent == 0) == (self.leaving == self.next));
        if (self.is_wrapped) {
            assert(self.last < self.first);
            assert(self.first < self.lap);
            assert(self.lap <= self.memory.len);
            assert(self.at <= self.last or self.first <= self.at);
        } else {
            assert(self.first <= self.at);
            assert(self.at + self.rest <= self.last);
            assert(self.last - self.first == self.kept);
        }
    }

    /// What leaves next, without a gap; about `most` bytes. Frames that have not begun to leave say `ack`.
    pub fn outgoing(self: *Resend, ack: u64, most: usize) []const u8 {
        const end = if (self.is_wrapped and self.at >= self.first) self.lap else self.last;
        var to = self.at + self.rest;
        while (to < end and to - self.at < most) {
            frames.acknowledge(self.memory[to..], ack);
            to += frames.spanAt(self.memory[to..]);
        }
        assert(to <= end);
        return self.memory[self.at..to];
    }

    /// What is left of the frame that has begun to leave.
    pub fn begun(self: *const Resend) []const u8 {
        return self.memory[self.at..][0..self.rest];
    }

    /// So many bytes of it have left.
    pub fn sent(self: *Resend, bytes: usize) void {
        assert(bytes <= self.unsent);
        var n = bytes;
        self.unsent -= bytes;
        while (n > 0) {
            if (self.rest == 0) self.rest = frames.spanAt(self.memory[self.at..]);
            const step = @min(n, self.rest);
            self.at += step;
            self.rest -= step;
            n -= step;
            if (self.rest > 0) continue;
            self.leaving += 1;
            self.left = @max(self.left, self.leaving);
            if (self.is_wrapped and self.at == self.lap) self.at = 0;
        }
        self.check();
    }

    /// A new connection: all that is kept leaves again. How many frames had left before.
    pub fn rewind(self: *Resend) void {
        self.at = self.first;
        self.rest = 0;
        self.unsent = self.kept;
        self.leaving = self.oldest;
        self.check();
    }

    /// The peer expects frame `ack` next. False: it was not sent, or had been acknowledged before (RS-4).
    pub fn release(self: *Resend, ack: u64) bool {
        if (ack < self.oldest or ack > self.leaving) return false;
        self.drop(ack);
        self.check();
        return true;
    }

    /// The same of what has left on connections before, right after `rewind`.
    pub fn releaseBefore(self: *Resend, ack: u64) bool {
        if (ack < self.oldest or ack > self.left) return false;
        assert(self.at == self.first);
        assert(self.rest == 0);
        self.drop(ack);
        self.rewind();
        self.left = ack;
        return true;
    }

    fn drop(self: *Resend, ack: u64) void {
        while (self.oldest < ack) : (self.oldest += 1) {
            const span = frames.spanAt(self.memory[self.first..]);
            assert(span <= self.kept);
            self.first += span;
            self.kept -= span;
            if (self.is_wrapped and self.first == self.lap) {
                self.first = 0;
                self.is_wrapped = false;
            }
        }
        assert(self.oldest == ack);
        if (self.kept > 0) return;
        assert(!self.is_wrapped);
        assert(self.rest == 0);
        self.first = 0; // the same few pages again and again while little is under way
        self.last = 0;
        self.at = 0;
    }
};

const testing = std.testing;

fn make(one: *Resend, bytes: usize) void {
    const to = one.place(bytes, KEPT_BYTES_MAX).?;
    @memset(to[frames.BYTES..], @truncate(one.next));
    one.commit(to, .{ .kind = .data, .size = @intCast(bytes), .channel = 1 });
}

test "frames leave in order, and again in order after a new connection" {
    var memory: [MEMORY_BYTES]u8 = undefined;
    var one = Resend{ .memory = &memory };
    for (0..3) |_| make(&one, 10);
    try testing.expectEqual(42 * 3, one.outgoing(5, 1 << 20).len);
    one.sent(50);
    try testing.expectEqual(34, one.begun().len);
    try testing.expect(!one.release(2)); // it has not left as a whole
    try testing.expect(one.release(1));
    try testing.expect(!one.release(0));

    one.rewind();
    try testing.expectEqual(84, one.unsent);
    try testing.expectEqual(1, (try frames.decode(one.outgoing(9, 1)[0..32])).number);
    try testing.expectEqual(9, (try frames.decode(one.outgoing(9, 1)[0..32])).ack);
    try testing.expect(!one.release(2));
    one.sent(84);
    try testing.expect(one.release(3));
    try testing.expectEqual(0, one.kept);
}

test "what a peer had got before is known by the connections before" {
    var memory: [MEMORY_BYTES]u8 = undefined;
    var one = Resend{ .memory = &memory };
    for (0..4) |_| make(&one, 10);
    one.sent(42 * 3);
    one.rewind();
    try testing.expect(!one.releaseBefore(4));
    try testing.expect(one.releaseBefore(3));
    try testing.expectEqual(3, one.leaving);
    try testing.expectEqual(3, (try frames.decode(one.outgoing(0, 1)[0..32])).number);
}

test "a peer may have got what has left on any connection since it said what it had, and nothing else" {
    var memory: [MEMORY_BYTES]u8 = undefined;
    var one = Resend{ .memory = &memory };
    for (0..4) |_| make(&one, 10);
    one.sent(42 * 4);
    one.rewind();
    try testing.expect(one.releaseBefore(1));
    one.rewind();
    try testing.expect(!one.releaseBefore(2)); // nothing has left since
    one.sent(42 * 2 + 20);
    one.rewind();
    one.sent(42 + 20);
    try testing.expect(!one.release(3)); // not on this connection
    try testing.expect(one.release(2));
    one.rewind();
    try testing.expect(!one.releaseBefore(1));
    try testing.expect(!one.releaseBefore(4));
    try testing.expect(one.releaseBefore(3)); // it left on the one before
    try testing.expectEqual(42, one.unsent);
    one.sent(42);
    try testing.expect(one.release(4));
    try testing.expectEqual(0, one.kept);
}

test "there is room for each frame up to the limit, lap after lap" {
    const memory = try testing.allocator.alloc(u8, MEMORY_BYTES);
    defer testing.allocator.free(memory);
    var one = Resend{ .memory = memory };
    var random = std.Random.DefaultPrng.init(7);
    var expected: u64 = 0;
    for (0..3_000) |_| {
        while (one.kept + frames.BYTES_MAX <= KEPT_BYTES_MAX) {
            make(&one, random.random().intRangeAtMost(usize, 1, limits.HOST_FRAME_PAYLOAD_BYTES_MAX));
        }
        try testing.expectEqual(null, one.place(limits.HOST_FRAME_PAYLOAD_BYTES_MAX, KEPT_BYTES_MAX));
        for (0..40) |_| {
            const out = one.outgoing(0, random.random().intRangeAtMost(usize, 1, 200_000));
            if (out.len == 0) break;
            if (one.rest == 0) {
                const header = try frames.decode(out[0..frames.BYTES]);
                try testing.expectEqual(one.leaving, header.number);
                try testing.expectEqual(@as(u8, @truncate(header.number)), out[frames.BYTES]);
            }
            one.sent(random.random().intRangeAtMost(usize, 1, out.len));
        }
        if (random.random().uintLessThan(u8, 10) == 0) one.rewind();
        expected = random.random().intRangeAtMost(u64, one.oldest, one.leaving);
        try testing.expect(one.release(expected));
    }
    try testing.expect(expected > 3_000);
}
