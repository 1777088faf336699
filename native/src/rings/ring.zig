//! A byte ring between one producer and one consumer, usually in two processes, in shared memory that is mapped twice
//! back to back: every frame is contiguous. `head` and `tail` only grow; their low bits are the place.
//!
//!     page 0: head | beat, behind | tail | writer_waiting        then: capacity bytes, twice
//!
//! RN-1 Each side trusts only its own counter (kept private) and checks the other's against it.
//! RN-2 Places are masked, so no counter leads outside of the mapping.
//! RN-3 A producer that waits for room is woken when the ring is at most half full, not at every byte.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

/// Shared: fixed layout, one cache line for each writer.
pub const Header = extern struct {
    head: u64 align(64),
    /// Bumped by the producer's T1; the consumer's T1 looks at it if it holds a lease.
    beat: u64 align(64),
    /// Written by the producer's T1 (on a stream by the consumer's, from beats): for how many milliseconds the
    /// producer's T0 has not turned; 0 = it does.
    behind: u32,
    tail: u64 align(64),
    writer_waiting: u32 align(64),
};

comptime {
    assert(@sizeOf(Header) <= limits.RING_HEADER_BYTES);
    assert(@offsetOf(Header, "tail") == 128);
    assert(@offsetOf(Header, "writer_waiting") == 192);
}

pub const CorruptError = error{Corrupt};

/// Bytes that a frame takes with the padding behind it.
pub fn alignFrame(bytes: u64) u64 {
    return std.mem.alignForward(u64, bytes, limits.FRAME_ALIGN_BYTES);
}

/// The memory of a ring in this process.
pub const Map = struct {
    base: [*]align(4096) u8,
    capacity: u32,

    /// Size of the file behind a ring.
    pub fn fileBytes(capacity: u32) u64 {
        assert(capacity % 4096 == 0); // whole pages: the data is mapped twice, back to back
        return limits.RING_HEADER_BYTES + @as(u64, capacity);
    }

    /// Size of the mapping: the data is there twice.
    pub fn viewBytes(self: Map) u32 {
        assert(self.capacity <= limits.RING_BYTES_MAX); // so that offsets into the view have 32 bits
        return limits.RING_HEADER_BYTES + 2 * self.capacity;
    }

    /// Map the ring behind `fd`. The descriptor stays the caller's.
    pub fn init(fd: i32, capacity: u32) ?Map {
        assert(fd >= 0);
        assert(std.math.isPowerOfTwo(capacity)); // RN-2
        assert(capacity >= 4096);
        assert(capacity <= limits.RING_BYTES_MAX);
        const base = sys.mapSharedTwice(fd, limits.RING_HEADER_BYTES, capacity) orelse return null;
        return .{ .base = base, .capacity = capacity };
    }

    /// A ring of this process alone.
    pub fn ofOwn(capacity: u32) ?Map {
        const fd = sys.memfd("trimesh-stream", fileBytes(capacity));
        if (fd < 0) return null;
        defer sys.close(fd);
        return init(fd, capacity);
    }

    /// Unmap.
    pub fn deinit(self: *Map) void {
        sys.unmap(self.base, self.viewBytes());
        self.* = undefined;
    }

    /// The shared counters.
    pub fn header(self: Map) *Header {
        return @ptrCast(self.base);
    }

    /// Offset of a counter's place from the start of the view.
    pub fn offset(self: Map, counter: u64) u32 {
        return limits.RING_HEADER_BYTES + @as(u32, @intCast(counter & (self.capacity - 1)));
    }

    /// The place of a counter; `capacity` bytes from there on are one piece.
    pub fn at(self: Map, counter: u64) [*]u8 {
        return self.base + self.offset(counter);
    }
};

pub const Producer = struct {
    map: Map,
    head: u64 = 0,
    /// Last seen tail; the true one may be further.
    tail: u64 = 0,

    /// Bytes that can be written now without the last `reserve` bytes.
    pub fn room(self: *Producer, wanted: u64, reserve: u64) CorruptError!u64 {
        const capacity: u64 = self.map.capacity;
        assert(reserve < capacity);
        assert(self.tail <= self.head);
        assert(self.head - self.tail <= capacity);
        if (capacity - (self.head - self.tail) < wanted + reserve) try self.refresh();
        return (capacity - (self.head - self.tail)) -| reserve;
    }

    fn refresh(self: *Producer) CorruptError!void {
        const tail = @atomicLoad(u64, &self.map.header().tail, .seq_cst);
        // The consumer's counter lies between what we last saw and what we have written.
        if (tail -% self.tail > self.head - self.tail) return error.Corrupt;
        assert(self.tail <= tail); // counters only grow
        assert(tail <= self.head);
        self.tail = tail;
    }

    /// Where the next bytes go. Write at most `room` bytes there, then `commit`.
    pub fn place(self: *const Producer) [*]u8 {
        assert(self.head % limits.FRAME_ALIGN_BYTES == 0);
        return self.map.at(self.head);
    }

    /// Publish `bytes` bytes (a multiple of the frame alignment).
    pub fn commit(self: *Producer, bytes: u64) void {
        assert(bytes % limits.FRAME_ALIGN_BYTES == 0);
        assert(self.head - self.tail + bytes <= self.map.capacity);
        self.head += bytes;
        @atomicStore(u64, &self.map.header().head, self.head, .release);
    }

    /// Ask to be woken when there is room. The caller must look at `room` once more afterwards.
    pub fn askForRoom(self: *Producer) void {
        @atomicStore(u32, &self.map.header().writer_waiting, 1, .seq_cst);
    }

    /// Bytes that the consumer has not released yet.
    pub fn outstanding(self: *Producer) CorruptError!u64 {
        try self.refresh();
        return self.head - self.tail;
    }
};

pub const Consumer = struct {
    map: Map,
    /// Read up to here.
    cursor: u64 = 0,
    /// Given back up to here.
    tail: u64 = 0,

    /// Bytes that can be read from the cursor on.
    pub fn available(self: *const Consumer) CorruptError!u64 {
        assert(self.tail <= self.cursor);
        const head = @atomicLoad(u64, &self.map.header().head, .acquire);
        const used = head -% self.tail;
        if (used > self.map.capacity or used < self.cursor - self.tail) return error.Corrupt;
        if (head % limits.FRAME_ALIGN_BYTES != 0) return error.Corrupt;
        assert(self.cursor <= head);
        assert(head - self.cursor <= self.map.capacity);
        return head - self.cursor;
    }

    /// For how many milliseconds the other side's T0 has not turned, as it says itself.
    pub fn behind(self: *const Consumer) u32 {
        return @atomicLoad(u32, &self.map.header().behind, .monotonic);
    }

    /// Where the next bytes are.
    pub fn place(self: *const Consumer) [*]u8 {
        assert(self.tail <= self.cursor); // what was given back is the producer's
        return self.map.at(self.cursor);
    }

    /// Go on behind the next `bytes`.
    pub fn advance(self: *Consumer, bytes: u64) void {
        self.cursor += bytes;
        assert(self.cursor - self.tail <= self.map.capacity);
    }

    /// Give back everything up to the cursor. True: the producer waits for room and is to be woken.
    pub fn release(self: *Consumer) bool {
        assert(self.tail <= self.cursor);
        if (self.tail == self.cursor) return false;
        self.tail = self.cursor;
        const header = self.map.header();
        @atomicStore(u64, &header.tail, self.tail, .seq_cst);
        if (@atomicLoad(u32, &header.writer_waiting, .seq_cst) == 0) return false;
        const used = @atomicLoad(u64, &header.head, .monotonic) -% self.tail;
        if (used > self.map.capacity / 2) return false; // more comes to be read, and asks again then (RN-3)
        return @atomicRmw(u32, &header.writer_waiting, .Xchg, 0, .seq_cst) != 0;
    }
};

fn testMap(capacity: u32) !Map {
    const fd = sys.memfd("test-ring", Map.fileBytes(capacity));
    defer sys.close(fd);
    try std.testing.expect(fd >= 0);
    return Map.init(fd, capacity).?;
}

test "what is written is read, across the seam too" {
    var map = try testMap(4096);
    defer map.deinit();
    var producer = Producer{ .map = map };
    var consumer = Consumer{ .map = map };

    for (0..1000) |i| {
        const size = alignFrame(1 + i % 500);
        try std.testing.expect(try producer.room(size, 0) >= size);
        @memset(producer.place()[0..size], @truncate(i));
        producer.commit(size);
        try std.testing.expectEqual(size, try consumer.available());
        for (consumer.place()[0..size]) |byte| try std.testing.expectEqual(@as(u8, @truncate(i)), byte);
        consumer.advance(size);
        _ = consumer.release();
    }
}

test "a producer that waits is woken at half, once" {
    var map = try testMap(4096);
    defer map.deinit();
    var producer = Producer{ .map = map };
    var consumer = Consumer{ .map = map };
    producer.commit(4096);
    producer.askForRoom();

    consumer.advance(1024);
    try std.testing.expect(!consumer.release());
    consumer.advance(1024);
    try std.testing.expect(consumer.release());
    consumer.advance(2048);
    try std.testing.expect(!consumer.release());
    try std.testing.expectEqual(4096 - 512, try producer.room(4096, 512));
}

test "counters of a broken peer are refused on both sides" {
    var map = try testMap(4096);
    defer map.deinit();
    var producer = Producer{ .map = map };
    var consumer = Consumer{ .map = map };
    producer.commit(64);

    for ([_]u64{ 5000, 63, std.math.maxInt(u64), 1 << 63 }) |head| {
        map.header().head = head;
        try std.testing.expectError(error.Corrupt, consumer.available());
    }
    for ([_]u64{ 65, std.math.maxInt(u64), 1 << 63 }) |tail| {
        map.header().tail = tail;
        try std.testing.expectError(error.Corrupt, producer.room(5000, 0));
    }
}
