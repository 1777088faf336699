//! The protocol of one link, above frames and below bytes. PURE: headers in, events out; no I/O, no clock, no
//! allocation.
//!
//!     inbound   waiting --hello--> open --message with more--> inside a message --last fragment--> open
//!                                  open --bye--> ended       any --violation--> error.Protocol (the link ends)
//!
//! SN-1 The first frame is a hello, and no other is. SN-2 Frames of another epoch are dropped and counted, whatever
//! else they say. SN-3 Numbers of a lane grow by one; a frame that was taken already is dropped and counted. SN-4 A
//! message delivers exactly the body bytes it announced. SN-5 One DATA message at a time; CONTROL may come between its
//! fragments. SN-6 Nothing comes after a bye.
//! SN-7 Segments are spoken of only where the two sides share memory.

const std = @import("std");
const assert = std.debug.assert;
const body = @import("body.zig");
const crossing = @import("crossing.zig");
const frame = @import("frame.zig");
const limits = @import("../limits.zig");

/// What the peer said and this side accepted.
pub const Event = union(enum) {
    dropped,
    hello: frame.Hello,
    /// `more`: fragments follow.
    message: frame.Header,
    fragment: frame.Header,
    /// Segments in the payload (SN-7).
    release: frame.Header,
    retire: frame.Header,
    bye,
};

pub const Inbound = struct {
    state: enum { waiting, open, ended } = .waiting,
    /// Bodies may come in segments.
    segments: bool = false,
    epoch: u64 = 0,
    next: [2]u64 = .{ 0, 0 },
    /// Body bytes of the unfinished message that have not come yet.
    missing: u64 = 0,
    frames_dropped: u64 = 0,
    messages: u64 = 0,
    bytes: u64 = 0,
    /// Why `receive` said error.Protocol.
    problem: []const u8 = "",

    pub const Error = error{Protocol};

    fn fail(self: *Inbound, problem: []const u8) Error {
        assert(problem.len > 0);
        self.problem = problem;
        self.state = .ended;
        return error.Protocol;
    }

    /// Take one frame: its bytes are `bytes`, header first. Every byte is looked at once.
    pub fn receive(self: *Inbound, header: frame.Header, bytes: [*]const u8) Error!Event {
        assert(header.length >= frame.BYTES); // `decode` has looked
        assert(self.problem.len == 0 or self.state == .ended);
        assert(self.missing == 0 or self.state != .waiting);
        switch (self.state) {
            .waiting => {
                if (header.kind != .hello) return self.fail("a frame before the hello"); // SN-1
                return .{ .hello = try self.greet(header, bytes[frame.BYTES..][0..frame.Hello.PAYLOAD_BYTES]) };
            },
            .ended => return self.fail("a frame after the goodbye"), // SN-6
            .open => {},
        }
        if (header.epoch != self.epoch) { // SN-2
            self.frames_dropped += 1;
            return .dropped;
        }
        switch (header.kind) {
            .message, .fragment => {},
            .bye => {
                self.state = .ended;
                return .bye;
            },
            .release, .retire => {
                if (!self.segments) return self.fail("a segment on a link without any"); // SN-7
                return if (header.kind == .release) .{ .release = header } else .{ .retire = header };
            },
            .hello => return self.fail("a second hello"),
            .beat, .credit => return self.fail("a frame of the byte stream inside a ring"),
        }
        const lane = @intFromEnum(header.lane);
        if (header.sequence < self.next[lane]) { // SN-3
            self.frames_dropped += 1;
            return .dropped;
        }
        if (header.sequence != self.next[lane]) return self.fail("a frame out of order");
        self.next[lane] += 1;
        return switch (header.kind) {
            .message => self.takeMessage(header, bytes),
            .fragment => self.takeFragment(header),
            else => unreachable, // sorted out above
        };
    }

    fn greet(self: *Inbound, header: frame.Header, payload: *const [frame.Hello.PAYLOAD_BYTES]u8) Error!frame.Hello {
        assert(self.state == .waiting);
        assert(self.epoch == 0);
        const hello = frame.Hello.decodePayload(payload);
        if (header.epoch == 0) return self.fail("a hello without an epoch");
        if (hello.abi != limits.ABI_VERSION) return self.fail("a hello of another version of the library");
        if (hello.slot >= limits.LINKS_MAX) return self.fail("a hello with a slot out of range");
        // The range first: isPowerOfTwo asserts that its argument is not 0.
        if (hello.ring_bytes < limits.RING_BYTES or hello.ring_bytes > limits.RING_BYTES_MAX or
            !std.math.isPowerOfTwo(hello.ring_bytes)) return self.fail("a hello with a ring size out of range");
        self.epoch = header.epoch;
        self.state = .open;
        return hello;
    }

    fn takeMessage(self: *Inbound, header: frame.Header, bytes: [*]const u8) Error!Event {
        if (header.lane == .data and self.missing != 0) return self.fail("a message inside another one"); // SN-5
        assert(header.bodyOffset() <= header.length); // `decode` has looked
        assert(header.n_bodies <= limits.BODIES_MAX);
        const here = header.length - header.bodyOffset();
        var announced: u64 = 0;
        var carried: u64 = 0;
        for (0..header.n_bodies) |i| {
            const word = std.mem.readInt(u64, bytes[header.sizesOffset() + 8 * i ..][0..8], .little);
            const entry = body.Entry.decode(word) orelse return self.fail("a body in a segment that cannot be");
            if (entry.segment != null and !self.segments) return self.fail("a segment on a link without any"); // SN-7
            if (entry.size > limits.MESSAGE_BYTES_MAX - announced - carried)
                return self.fail("a message above MESSAGE_BYTES_MAX");
            (if (entry.segment == null) &announced else &carried).* += entry.size;
        }
        if (here > announced or (here < announced) != header.more) // SN-4
            return self.fail("a message whose sizes do not add up");
        assert(announced + carried <= limits.MESSAGE_BYTES_MAX);
        if (header.n_bodies > 0) self.missing = announced - here;
        assert(!header.more or self.missing > 0);
        self.messages += @intFromBool(!header.chunk);
        self.bytes += header.head_size + here + carried;
        return .{ .message = header };
    }

    fn takeFragment(self: *Inbound, header: frame.Header) Error!Event {
        const here = header.length - frame.BYTES;
        if (here > self.missing or (here < self.missing) != header.more) // SN-4
            return self.fail("a fragment whose size does not add up");
        self.missing -= here;
        assert(header.more == (self.missing > 0));
        self.bytes += here;
        return .{ .fragment = header };
    }
};

/// Bytes that the caller lends.
pub const Span = extern struct {
    bytes: ?[*]const u8,
    size: u64,
    /// UNDECIDED, IN_FRAMES, or the segment that holds a copy of the bytes.
    segment: u32 = UNDECIDED,
    reserved: u32 = 0,

    pub const UNDECIDED = 0;
    pub const IN_FRAMES = 0xFFFF_FFFF;

    /// The segment, if there is one.
    pub fn ref(self: Span) ?body.Ref {
        return body.Ref.parse(self.segment);
    }
};

/// Where an unfinished message goes on.
pub const Cursor = extern struct {
    /// Body bytes that have left, in frames and in segments.
    body_bytes: u64 = 0,
    /// NO until the first frame is out.
    started: u64 = NO,

    pub const NO = 0;
    pub const YES = 1;
    /// With every body in frames, whatever spans say.
    pub const FRAMES_ONLY = 2;
};

/// A message that is to be sent; everything in it is lent.
pub const Message = struct {
    head: []const u8,
    bodies: []Span = &.{},
    /// Bytes of all bodies.
    total: u64 = 0,
    /// Bodies go in the segments that their spans name; else all in frames.
    carrying: bool = false,
    /// It is a chunk of a larger message.
    chunk: bool = false,

    fn segmentOf(self: Message, span: Span) ?body.Ref {
        return if (self.carrying) span.ref() else null;
    }

    /// Whether a body is above one fragment.
    pub fn hasLarge(self: Message) bool {
        for (self.bodies) |span| {
            if (span.size > limits.FRAME_PAYLOAD_BYTES_MAX) return true;
        }
        return false;
    }

    /// Body bytes in segments.
    pub fn carried(self: Message) u64 {
        var sum: u64 = 0;
        for (self.bodies) |span| {
            if (self.segmentOf(span) != null) sum += span.size;
        }
        assert(sum <= self.total);
        return sum;
    }

    /// Bytes of its first frame, before padding.
    pub fn firstLength(self: Message) u32 {
        assert(self.head.len <= limits.HEAD_BYTES_MAX);
        assert(self.bodies.len <= limits.BODIES_MAX);
        const head_size: u32 = @intCast(self.head.len);
        if (self.bodies.len == 0) return frame.BYTES + head_size;
        const table: u32 = @intCast(8 * self.bodies.len);
        const fixed = frame.BYTES + std.mem.alignForward(u32, head_size, 8) + table;
        const room = (frame.BYTES + limits.FRAME_PAYLOAD_BYTES_MAX) -| fixed;
        const length = fixed + @as(u32, @intCast(@min(room, self.total - self.carried())));
        assert(length <= limits.FRAME_BYTES_MAX);
        return length;
    }
};

pub const Outbound = struct {
    epoch: u64,
    next: [2]u64 = .{ 0, 0 },
    /// Body bytes of the unfinished DATA message that have not left yet.
    missing: u64 = 0,
    messages: u64 = 0,
    bytes: u64 = 0,

    fn number(self: *Outbound, lane: frame.Lane) u64 {
        const lane_index = @intFromEnum(lane);
        defer self.next[lane_index] += 1;
        return self.next[lane_index];
    }

    /// Write the first frame of a message to `to`, `firstLength` bytes. Returns the body bytes in it, and in segments.
    pub fn writeMessage(self: *Outbound, to: [*]u8, lane: frame.Lane, message: Message) u64 {
        const head = message.head;
        const bodies = message.bodies;
        assert(lane == .control or self.missing == 0); // SN-5
        assert(lane == .data or bodies.len == 0);
        const length = message.firstLength();
        var header = frame.Header{
            .kind = .message,
            .lane = lane,
            .length = length,
            .epoch = self.epoch,
            .sequence = self.number(lane),
            .head_size = @intCast(head.len),
            .n_bodies = @intCast(bodies.len),
        };
        const here = length - header.bodyOffset();
        const carried = message.carried();
        header.more = here < message.total - carried;
        header.chunk = message.chunk;
        frame.encode(header, to[0..frame.BYTES]);
        @memcpy(to[frame.BYTES..][0..head.len], head);
        for (bodies, 0..) |span, i| {
            const entry = body.Entry{ .size = span.size, .segment = message.segmentOf(span) };
            std.mem.writeInt(u64, to[header.sizesOffset() + 8 * i ..][0..8], entry.encode(), .little);
        }
        copySpans(to[header.bodyOffset()..][0..here], message, 0);
        if (bodies.len > 0) self.missing = message.total - carried - here;
        assert(here + carried <= message.total);
        if (lane == .data) assert(header.more == (self.missing > 0)); // SN-4
        self.messages += @intFromBool(!message.chunk);
        self.bytes += head.len + here + carried;
        return here + carried;
    }

    /// Bytes of the next fragment, before padding.
    pub fn fragmentLength(self: *const Outbound) u32 {
        assert(self.missing > 0);
        return frame.BYTES + @as(u32, @intCast(@min(self.missing, limits.FRAME_PAYLOAD_BYTES_MAX)));
    }

    /// Write the next fragment; `done` body bytes have left before. Returns the body bytes in it.
    pub fn writeFragment(self: *Outbound, to: [*]u8, message: Message, done: u64) u64 {
        assert(done >= message.carried()); // they have left with the first frame
        assert(done + self.missing == message.total); // SN-5: no other message has begun meanwhile
        const length = self.fragmentLength();
        const here = length - frame.BYTES;
        frame.encode(.{
            .kind = .fragment,
            .lane = .data,
            .more = here < self.missing,
            .length = length,
            .epoch = self.epoch,
            .sequence = self.number(.data),
        }, to[0..frame.BYTES]);
        copySpans(to[frame.BYTES..][0..here], message, done - message.carried());
        self.missing -= here;
        self.bytes += here;
        return here;
    }

    /// Bytes of a frame about `count` segments, before padding.
    pub fn segmentsLength(count: usize) u32 {
        assert(count > 0);
        assert(count <= limits.SEGMENTS_MAX);
        return frame.BYTES + 4 * @as(u32, @intCast(count));
    }

    /// Write a frame about segments.
    pub fn writeSegments(self: *const Outbound, to: [*]u8, kind: frame.Kind, refs: []const body.Ref) void {
        assert(kind == .release or kind == .retire);
        frame.encode(
            .{ .kind = kind, .epoch = self.epoch, .length = segmentsLength(refs.len) },
            to[0..frame.BYTES],
        );
        for (refs, 0..) |ref, i| std.mem.writeInt(u32, to[frame.BYTES + 4 * i ..][0..4], ref.word(), .little);
    }

    /// Write a goodbye, one header.
    pub fn writeBye(self: *const Outbound, to: [*]u8) void {
        frame.encode(.{ .kind = .bye, .epoch = self.epoch }, to[0..frame.BYTES]);
    }
};

/// Copy bytes of all spans that go in frames, from `skip` on, until `to` is full.
fn copySpans(to: []u8, message: Message, skip: u64) void {
    var left = to;
    var before = skip;
    for (message.bodies) |span| {
        if (left.len == 0) return;
        if (message.segmentOf(span) != null) continue;
        if (before >= span.size) {
            before -= span.size;
            continue;
        }
        const n: usize = @intCast(@min(span.size - before, left.len));
        crossing.copy(left[0..n], span.bytes.?[@intCast(before)..][0..n]);
        left = left[n..];
        before = 0;
    }
    assert(left.len == 0); // the caller has added up the same sizes
}

// ---- tests ----

const testing = std.testing;

const Rig = struct {
    out: Outbound = .{ .epoch = 5 },
    in: Inbound = .{},
    buffer: [limits.FRAME_BYTES_MAX]u8 align(8) = undefined,

    fn hello(self: *Rig) !void {
        const one = frame.Hello{
            .slot = 1,
            .pid = 2,
            .ring_bytes = limits.RING_BYTES,
            .host = 3,
            .beat_ms = 4,
            .lease_ms = 5,
        };
        one.encodeFrame(self.out.epoch, self.buffer[0..frame.Hello.FRAME_BYTES]);
        try testing.expectEqual(one, (try self.deliver()).hello);
    }

    fn deliver(self: *Rig) !Event {
        const header = try frame.decode(self.buffer[0..frame.BYTES]);
        return self.in.receive(header, &self.buffer);
    }

    fn plain(self: *Rig, header: frame.Header) !Event {
        frame.encode(header, self.buffer[0..frame.BYTES]);
        return self.deliver();
    }
};

test "a message with bodies is cut and comes whole" {
    var rig = Rig{};
    try rig.hello();
    const total = 3 * limits.FRAME_PAYLOAD_BYTES_MAX + 17;
    const bytes = try testing.allocator.alloc(u8, total);
    defer testing.allocator.free(bytes);
    for (bytes, 0..) |*byte, i| byte.* = @truncate(i *% 31);
    var spans = [_]Span{
        .{ .bytes = bytes.ptr, .size = 10 },
        .{ .bytes = null, .size = 0 },
        .{ .bytes = bytes.ptr + 10, .size = total - 10 },
    };

    const message = Message{ .head = "head", .bodies = &spans, .total = total };
    var done = rig.out.writeMessage(&rig.buffer, .data, message);
    const first = (try rig.deliver()).message;
    try testing.expectEqualStrings("head", rig.buffer[frame.BYTES..][0..first.head_size]);
    try testing.expect(first.more);
    try testing.expectEqualSlices(u8, bytes[0..done], rig.buffer[first.bodyOffset()..first.length]);
    while (rig.out.missing > 0) {
        const here = rig.out.writeFragment(&rig.buffer, message, done);
        const next = (try rig.deliver()).fragment;
        try testing.expectEqualSlices(u8, bytes[done..][0..here], rig.buffer[frame.BYTES..next.length]);
        done += here;
    }
    try testing.expectEqual(total, done);
    try testing.expectEqual(0, rig.in.missing);
    try testing.expectEqual(rig.out.bytes, rig.in.bytes);
}

test "the largest head and table fit the first frame" {
    const head: [limits.HEAD_BYTES_MAX]u8 = @splat(0);
    const bytes: [1]u8 = .{0};
    var spans: [limits.BODIES_MAX]Span = @splat(.{ .bytes = &bytes, .size = 1 });
    const message = Message{ .head = &head, .bodies = &spans, .total = spans.len };
    try testing.expectEqual(limits.FRAME_BYTES_MAX, message.firstLength());
}

test "control comes between fragments" {
    var rig = Rig{};
    try rig.hello();
    const bytes: [70_000]u8 = @splat(1);
    var spans = [_]Span{.{ .bytes = &bytes, .size = bytes.len }};

    const message = Message{ .head = "a", .bodies = &spans, .total = bytes.len };
    const done = rig.out.writeMessage(&rig.buffer, .data, message);
    _ = try rig.deliver();
    _ = rig.out.writeMessage(&rig.buffer, .control, .{ .head = "cancel" });
    try testing.expectEqual(frame.Lane.control, (try rig.deliver()).message.lane);
    _ = rig.out.writeFragment(&rig.buffer, message, done);
    try testing.expect(!(try rig.deliver()).fragment.more);
}

test "frames of another epoch are dropped and counted" {
    var rig = Rig{};
    try rig.hello();

    const event = try rig.plain(.{ .kind = .message, .lane = .data, .length = 32, .epoch = 6, .sequence = 77 });

    try testing.expectEqual(Event.dropped, event);
    try testing.expectEqual(1, rig.in.frames_dropped);
    _ = rig.out.writeMessage(&rig.buffer, .data, .{ .head = "still fine" });
    _ = (try rig.deliver()).message;
}

test "a frame that comes again is dropped and counted, whatever it is a part of" {
    var rig = Rig{};
    try rig.hello();
    const first = frame.Header{ .kind = .message, .lane = .data, .length = 32, .epoch = 5 };
    _ = (try rig.plain(first)).message;

    try testing.expectEqual(Event.dropped, try rig.plain(first));
    const part = frame.Header{ .kind = .fragment, .lane = .data, .length = 40, .epoch = 5 };
    try testing.expectEqual(Event.dropped, try rig.plain(part));

    try testing.expectEqual(2, rig.in.frames_dropped);
    try testing.expectEqual(1, rig.in.messages);
    _ = (try rig.plain(.{ .kind = .message, .lane = .data, .length = 32, .epoch = 5, .sequence = 1 })).message;
}

test "violations end the session" {
    const cases = [_]frame.Header{
        .{ .kind = .message, .lane = .data, .length = 32, .epoch = 5, .sequence = 1 }, // out of order
        .{ .kind = .fragment, .lane = .data, .length = 33, .epoch = 5 }, // of no message
        .{ .kind = .beat, .epoch = 5 }, // of the byte stream
        .{ .kind = .credit, .epoch = 5 },
    };
    for (cases) |header| {
        var rig = Rig{};
        try rig.hello();
        try testing.expectError(error.Protocol, rig.plain(header));
        try testing.expect(rig.in.problem.len > 0);
        try testing.expectError(error.Protocol, rig.plain(.{ .kind = .message, .lane = .data, .epoch = 5 }));
    }
}

test "a frame before the hello, and a second hello, are violations" {
    var rig = Rig{};
    try testing.expectError(error.Protocol, rig.plain(.{ .kind = .bye, .epoch = 5 }));
    var other = Rig{};
    try other.hello();
    try testing.expectError(error.Protocol, other.hello());
}

test "announced sizes must add up" {
    const cases = [_]struct { sizes: [2]u64, here: u32, more: bool }{
        .{ .sizes = .{ limits.MESSAGE_BYTES_MAX, 1 }, .here = 0, .more = true },
        .{ .sizes = .{ std.math.maxInt(u64), 1 }, .here = 0, .more = true },
        .{ .sizes = .{ 1, 1 }, .here = 3, .more = false },
        .{ .sizes = .{ 1, 1 }, .here = 1, .more = false },
        .{ .sizes = .{ 1, 1 }, .here = 2, .more = true },
    };
    for (cases) |case| {
        var rig = Rig{};
        try rig.hello();
        for (case.sizes, 0..) |size, i| std.mem.writeInt(u64, rig.buffer[32 + 8 * i ..][0..8], size, .little);
        const result = rig.plain(.{
            .kind = .message,
            .lane = .data,
            .more = case.more,
            .length = 48 + case.here,
            .epoch = 5,
            .n_bodies = 2,
        });
        try testing.expectError(error.Protocol, result);
    }
}

test "nothing comes after a bye" {
    var rig = Rig{};
    try rig.hello();
    rig.out.writeBye(&rig.buffer);
    try testing.expectEqual(Event.bye, try rig.deliver());
    _ = rig.out.writeMessage(&rig.buffer, .data, .{ .head = "late" });
    try testing.expectError(error.Protocol, rig.deliver());
}
