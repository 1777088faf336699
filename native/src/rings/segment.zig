//! Segments: memory that bodies travel in to peers of this host. A body is copied once, into a segment of the pool of
//! its sender; every receiver maps that segment (shelf.zig) and says when it is done. The descriptor goes to a peer
//! once, over the socket of the link; after that a segment is named by its place and generation.
//!
//!     empty --make--> free --fill--> held by a message and by receivers --all are done--> free
//!                       \--retire--> empty          (also when a receiver's link ended: SG-2)
//!
//! SG-1 Nothing is written to a segment that is held. SG-2 A receiver whose link has ended may still look at what
//! it holds, and it is unknown until when: such a segment is never filled again, its memory goes with the last
//! mapping. SG-3 All pages of a segment are there before it is written to or named: nothing faults for want of memory.

const std = @import("std");
const assert = std.debug.assert;
const arms = @import("arms.zig");
const bell = @import("bell.zig");
const body = @import("../protocol/body.zig");
const crossing = @import("../protocol/crossing.zig");
const limits = @import("../limits.zig");
const session = @import("../protocol/session.zig");
const socket = @import("../system/socket.zig");
const sys = @import("../system/sys.zig");

const Ref = body.Ref;
const Span = session.Span;

/// What goes over the socket beside the descriptor.
pub const Announcement = extern struct { ref: u32, reserved: u32 = 0, bytes: u64 };

const Segment = struct {
    /// Null: empty.
    pages: ?[*]align(4096) u8,
    bytes: u64,
    fd: i32,
    generation: u14,
    /// A message that has not left on all its links refers to it.
    in_message: bool,
    /// SG-2
    spoilt: bool,
    /// When it was filled last.
    stamp: u64,
    holders: bell.Bits,
    holders_count: u32,
    /// Links that were sent the descriptor.
    known: bell.Bits,
    /// Links in `known` are to be told that it is gone; `retired` names it.
    tell: bool,
    retired: Ref,

    fn isFree(self: *const Segment) bool {
        return self.pages != null and !self.in_message and self.holders_count == 0;
    }

    /// What is so between two calls, of one that is there.
    fn check(self: *const Segment) void {
        assert(self.pages != null);
        assert(std.math.isPowerOfTwo(self.bytes));
        assert(self.bytes >= limits.SEGMENT_BYTES_MIN);
        assert(self.bytes <= limits.SEGMENT_BYTES_MAX);
        assert(self.generation > 0); // so that no reference is 0
        var holders: u32 = 0;
        for (self.holders, self.known) |word, known| {
            holders += @popCount(word);
            assert(word & ~known == 0); // a receiver that holds it was sent its descriptor
        }
        assert(holders == self.holders_count);
    }
};

/// The segments of one process as a sender. All zero is a pool without any.
pub const Pool = struct {
    segments: [limits.SEGMENTS_MAX]Segment,
    /// Places from here on were never used.
    places: u32,
    /// Bytes of all segments.
    bytes: u64,
    clock: u64,
    /// Messages that do without a new segment, because the system has refused one.
    refusals: u32,
    /// Some segment has `tell`.
    telling: bool,
    /// Faults that a test has planned.
    arms: ?*arms.Arms,

    // ---- sending ----

    /// Have the large bodies of a message in segments, and `link` (its socket is `fd`) know them. True: they are, and
    /// `link` holds them; false: it gets the message in frames.
    pub fn load(self: *Pool, spans: []Span, link: u32, fd: i32) bool {
        assert(link < limits.LINKS_MAX);
        var any = false;
        for (spans) |*span| {
            if (span.size <= limits.FRAME_PAYLOAD_BYTES_MAX) continue;
            if (span.segment == Span.UNDECIDED) {
                const filled = self.fill(span.bytes.?[0..@intCast(span.size)]);
                span.segment = if (filled) |ref| ref.word() else Span.IN_FRAMES;
            }
            const one = self.find(span.ref() orelse continue) orelse return false;
            if (isSet(&one.holders, link) or !self.introduce(one, link, fd)) return false;
            any = true;
        }
        if (!any) return false;
        for (spans) |span| {
            const one = self.find(span.ref() orelse continue).?; // seen above
            assert(one.in_message);
            set(&one.holders, link);
            one.holders_count += 1;
            one.check();
        }
        return true;
    }

    /// Copy a body into a segment of its own. Null: there is none.
    fn fill(self: *Pool, bytes: []const u8) ?Ref {
        if (bytes.len > limits.SEGMENT_BYTES_MAX) return null;
        const size = @max(limits.SEGMENT_BYTES_MIN, std.math.ceilPowerOfTwoAssert(u64, bytes.len));
        const one = self.findFree(size) orelse self.make(size) orelse return null;
        assert(one.isFree()); // SG-1
        assert(!one.spoilt); // SG-2
        assert(one.bytes >= bytes.len);
        crossing.copy(one.pages.?[0..bytes.len], bytes);
        one.in_message = true;
        self.clock += 1;
        one.stamp = self.clock;
        return self.refOf(one);
    }

    /// The free segment of a size that was used last: its pages are the warmest.
    fn findFree(self: *Pool, size: u64) ?*Segment {
        assert(std.math.isPowerOfTwo(size));
        var best: ?*Segment = null;
        for (self.segments[0..self.places]) |*one| {
            if (one.bytes == size and one.isFree() and (best == null or one.stamp > best.?.stamp)) best = one;
        }
        return best;
    }

    fn make(self: *Pool, size: u64) ?*Segment {
        if (self.refusals > 0) {
            self.refusals -= 1;
            return null;
        }
        const one = self.roomFor(size) orelse return null;
        assert(one.pages == null);
        assert(self.bytes + size <= limits.SEGMENT_POOL_BYTES_MAX);
        const refused = if (self.arms) |armed| armed.refusesMemory() else 0;
        const fd = if (refused != 0) refused else sys.memfd("trimesh-segment", size); // SG-3
        if (fd >= 0) {
            if (sys.mapShared(fd, @intCast(size))) |pages| {
                one.* = .{
                    .pages = pages,
                    .bytes = size,
                    .fd = fd,
                    .generation = if (one.generation == std.math.maxInt(u14)) 1 else one.generation + 1,
                    .in_message = false,
                    .spoilt = false,
                    .stamp = 0,
                    .holders = @splat(0),
                    .holders_count = 0,
                    .known = @splat(0),
                    .tell = false,
                    .retired = undefined,
                };
                self.bytes += size;
                one.check();
                return one;
            }
            sys.close(fd);
        }
        self.refusals = limits.SEGMENT_REFUSAL_MESSAGES;
        return null;
    }

    /// An empty place, when the pool may grow by `size`; others that are free go for it.
    fn roomFor(self: *Pool, size: u64) ?*Segment {
        assert(size <= limits.SEGMENT_POOL_BYTES_MAX);
        assert(self.places <= self.segments.len);
        while (self.bytes + size > limits.SEGMENT_POOL_BYTES_MAX) { // bounded: one less each turn
            self.retire(self.oldestFree() orelse return null);
        }
        for (self.segments[0..self.places]) |*one| {
            if (one.pages == null and !one.tell) return one;
        }
        if (self.places < self.segments.len) {
            self.places += 1;
            return &self.segments[self.places - 1];
        }
        for (&self.segments) |*one| {
            if (one.pages == null) return one; // who is not told yet hears of it when the place is used again
        }
        const oldest = self.oldestFree() orelse return null;
        self.retire(oldest);
        return oldest;
    }

    fn oldestFree(self: *Pool) ?*Segment {
        var best: ?*Segment = null;
        for (self.segments[0..self.places]) |*one| {
            if (one.isFree() and (best == null or one.stamp < best.?.stamp)) best = one;
        }
        return best;
    }

    /// See to it that a link knows a segment.
    fn introduce(self: *Pool, one: *Segment, link: u32, fd: i32) bool {
        assert(one.fd >= 0);
        if (isSet(&one.known, link)) return true;
        const said = Announcement{ .ref = self.refOf(one).word(), .bytes = one.bytes };
        if (socket.sendDescriptor(fd, std.mem.asBytes(&said), one.fd) != @sizeOf(Announcement)) return false;
        set(&one.known, link);
        return true;
    }

    // ---- coming back ----

    /// A message has left on all its links.
    pub fn messageDone(self: *Pool, spans: []Span) void {
        for (spans) |*span| {
            const ref = span.ref() orelse continue;
            span.segment = Span.IN_FRAMES;
            const one = self.find(ref) orelse continue;
            assert(one.in_message);
            one.in_message = false;
            self.settle(one);
        }
    }

    /// A receiver is done with a segment. False: it holds none of that name.
    pub fn release(self: *Pool, ref: Ref, link: u32) bool {
        const one = self.find(ref) orelse return false;
        if (!isSet(&one.holders, link)) return false;
        assert(one.holders_count > 0);
        clear(&one.holders, link);
        one.holders_count -= 1;
        self.settle(one);
        return true;
    }

    /// A link has ended.
    pub fn forgetLink(self: *Pool, link: u32) void {
        assert(link < limits.LINKS_MAX);
        for (self.segments[0..self.places]) |*one| {
            const is_holder = one.pages != null and isSet(&one.holders, link);
            clear(&one.known, link);
            if (!is_holder) continue;
            assert(one.holders_count > 0);
            clear(&one.holders, link);
            one.holders_count -= 1;
            one.spoilt = true; // SG-2
            self.settle(one);
        }
    }

    fn settle(self: *Pool, one: *Segment) void {
        one.check();
        if (!one.isFree()) return;
        if (one.spoilt) return self.retire(one);
        var idle: u64 = 0;
        for (self.segments[0..self.places]) |*other| {
            if (other.isFree()) idle += other.bytes;
        }
        while (idle > limits.SEGMENT_IDLE_BYTES_MAX) {
            const oldest = self.oldestFree().?; // what is idle is free
            idle -= oldest.bytes;
            self.retire(oldest);
        }
    }

    fn retire(self: *Pool, one: *Segment) void {
        assert(one.isFree()); // SG-1
        one.retired = self.refOf(one);
        one.tell = true;
        self.telling = true;
        self.drop(one);
    }

    fn drop(self: *Pool, one: *Segment) void {
        assert(one.bytes <= self.bytes);
        sys.unmap(one.pages.?, @intCast(one.bytes));
        sys.closeAt(&one.fd);
        self.bytes -= one.bytes;
        one.pages = null;
    }

    /// The next segment whose end is still to be told, with the links that know it.
    pub fn nextRetired(self: *Pool) ?struct { ref: Ref, links: bell.Bits } {
        if (!self.telling) return null;
        for (self.segments[0..self.places]) |*one| {
            if (!one.tell) continue;
            assert(one.pages == null); // who is to be told of a new one hears of that by its descriptor
            assert(one.retired.generation > 0);
            one.tell = false;
            return .{ .ref = one.retired, .links = one.known };
        }
        self.telling = false;
        return null;
    }

    /// Give everything back. What receivers have mapped stays theirs.
    pub fn deinit(self: *Pool) void {
        for (self.segments[0..self.places]) |*one| {
            if (one.pages != null) self.drop(one);
        }
    }

    /// In a forked child: its mappings were not inherited.
    pub fn closeFds(self: *Pool) void {
        for (self.segments[0..self.places]) |*one| {
            if (one.pages != null) sys.closeAt(&one.fd);
        }
    }

    // ---- names ----

    fn refOf(self: *const Pool, one: *const Segment) Ref {
        const place = (@intFromPtr(one) - @intFromPtr(&self.segments)) / @sizeOf(Segment);
        assert(place < self.places);
        return .{ .place = @intCast(place), .generation = one.generation };
    }

    fn find(self: *Pool, ref: Ref) ?*Segment {
        const one = &self.segments[ref.place];
        return if (one.pages != null and one.generation == ref.generation) one else null;
    }
};

fn isSet(bits: *const bell.Bits, link: u32) bool {
    return bits[link / 64] & @as(u64, 1) << @intCast(link % 64) != 0;
}

fn set(bits: *bell.Bits, link: u32) void {
    assert(!isSet(bits, link));
    bits[link / 64] |= @as(u64, 1) << @intCast(link % 64);
}

fn clear(bits: *bell.Bits, link: u32) void {
    bits[link / 64] &= ~(@as(u64, 1) << @intCast(link % 64));
}

// ---- tests ----

const testing = std.testing;

const Rig = struct {
    pool: *Pool,
    pair: [2]i32,
    bytes: []u8,

    fn init(size: usize) !Rig {
        const pool = try testing.allocator.create(Pool);
        pool.* = std.mem.zeroes(Pool);
        const bytes = try testing.allocator.alloc(u8, size);
        @memset(bytes, 7);
        return .{ .pool = pool, .pair = socket.socketPair(), .bytes = bytes };
    }

    fn deinit(self: *Rig) void {
        self.pool.deinit();
        for (self.pair) |fd| sys.close(fd);
        testing.allocator.free(self.bytes);
        testing.allocator.destroy(self.pool);
    }

    fn span(self: *Rig) Span {
        return .{ .bytes = self.bytes.ptr, .size = self.bytes.len };
    }
};

test "a segment is used again when its message and all receivers are done with it" {
    var rig = try Rig.init(100_000);
    defer rig.deinit();
    var spans = [1]Span{rig.span()};
    try testing.expect(rig.pool.load(&spans, 3, rig.pair[0]));
    try testing.expect(rig.pool.load(&spans, 4, rig.pair[0]));
    const first = spans[0].ref().?;

    var second = [1]Span{rig.span()};
    try testing.expect(rig.pool.load(&second, 3, rig.pair[0]));
    try testing.expect(second[0].ref().?.place != first.place);
    rig.pool.messageDone(&second);

    try testing.expect(rig.pool.release(first, 3));
    try testing.expect(!rig.pool.release(first, 3));
    rig.pool.messageDone(&spans);
    var third = [1]Span{rig.span()};
    try testing.expect(rig.pool.load(&third, 5, rig.pair[0]));
    try testing.expect(third[0].ref().?.place != first.place); // link 4 holds it
    rig.pool.messageDone(&third);

    try testing.expect(rig.pool.release(first, 4));
    try testing.expect(rig.pool.segments[first.place].isFree());
    try testing.expectEqual(3 * limits.SEGMENT_BYTES_MIN, rig.pool.bytes);
}

test "a segment that a lost receiver held is never filled again" {
    var rig = try Rig.init(100_000);
    defer rig.deinit();
    var spans = [1]Span{rig.span()};
    try testing.expect(rig.pool.load(&spans, 3, rig.pair[0]));
    try testing.expect(rig.pool.load(&spans, 4, rig.pair[0]));
    const ref = spans[0].ref().?;
    rig.pool.messageDone(&spans);

    rig.pool.forgetLink(3);
    try testing.expect(rig.pool.release(ref, 4));

    try testing.expectEqual(0, rig.pool.bytes);
    const told = rig.pool.nextRetired().?;
    try testing.expectEqual(ref, told.ref);
    try testing.expect(isSet(&told.links, 4) and !isSet(&told.links, 3));
    try testing.expect(rig.pool.nextRetired() == null);
    try testing.expect(!rig.pool.release(ref, 4));
}

test "what is idle is bounded" {
    var rig = try Rig.init(limits.SEGMENT_BYTES_MAX / 2 + 1);
    defer rig.deinit();
    var spans: [4][1]Span = undefined;
    for (&spans) |*one| {
        one.* = .{rig.span()};
        try testing.expect(rig.pool.load(one, 3, rig.pair[0]));
    }
    for (&spans) |*one| {
        const ref = one[0].ref().?;
        rig.pool.messageDone(one);
        try testing.expect(rig.pool.release(ref, 3));
    }

    try testing.expectEqual(limits.SEGMENT_IDLE_BYTES_MAX, rig.pool.bytes);
}

test "a pool without places sends bodies in frames" {
    var rig = try Rig.init(100_000);
    defer rig.deinit();
    for (0..limits.SEGMENTS_MAX) |_| {
        var spans = [1]Span{rig.span()};
        // All on one link, over a socket that would be full soon: what cannot be told goes in frames, too.
        _ = rig.pool.load(&spans, 3, rig.pair[0]);
    }
    var spans = [1]Span{rig.span()};

    try testing.expect(!rig.pool.load(&spans, 3, rig.pair[0]));

    try testing.expectEqual(Span.IN_FRAMES, spans[0].segment);
    try testing.expectEqual(limits.SEGMENTS_MAX * limits.SEGMENT_BYTES_MIN, rig.pool.bytes);
}

test "a full pool gives up segments of other sizes, a busy one nothing" {
    var rig = try Rig.init(100_000);
    defer rig.deinit();
    var spans = [1]Span{rig.span()};
    try testing.expect(rig.pool.load(&spans, 3, rig.pair[0]));
    const ref = spans[0].ref().?;
    rig.pool.bytes += limits.SEGMENT_POOL_BYTES_MAX - limits.SEGMENT_BYTES_MIN; // as if there were many more
    defer rig.pool.bytes = limits.SEGMENT_BYTES_MIN;

    var other = [1]Span{rig.span()};
    try testing.expect(!rig.pool.load(&other, 3, rig.pair[0]));

    rig.pool.messageDone(&spans);
    try testing.expect(rig.pool.release(ref, 3));
    var third = [1]Span{rig.span()};
    third[0].size = 70_000;
    try testing.expect(rig.pool.load(&third, 3, rig.pair[0]));
}
