//! One word of the table of body sizes: a size whose bytes follow in frames, or a segment that holds them. PURE.
//!
//!     bit 63 = 0: bytes in frames
//!     bit 63 = 1: bits 40-61 the segment, bits 0-39 bytes

const std = @import("std");
const limits = @import("../limits.zig");

/// A segment as both sides name it: its place in the pool of the sender, and which of those that were there.
pub const Ref = packed struct(u32) {
    place: u8,
    /// From 1, so that no reference is 0.
    generation: u14,
    unused: u10 = 0,

    /// The number.
    pub fn word(self: Ref) u32 {
        return @bitCast(self);
    }

    /// A number that a peer sent, if it can be one.
    pub fn parse(number: u32) ?Ref {
        const self: Ref = @bitCast(number);
        if (self.place >= limits.SEGMENTS_MAX or self.generation == 0 or self.unused != 0) return null;
        return self;
    }
};

pub const Entry = struct {
    size: u64,
    /// Null: the bytes are in frames.
    segment: ?Ref = null,

    const MARK: u64 = 1 << 63;
    const SIZE_BITS = 40;
    const SIZE_MASK: u64 = (1 << SIZE_BITS) - 1;

    /// The word of the table.
    pub fn encode(self: Entry) u64 {
        const ref = self.segment orelse return self.size;
        return MARK | @as(u64, ref.word()) << SIZE_BITS | self.size;
    }

    /// What a word of the table says, if anything.
    pub fn decode(word: u64) ?Entry {
        if (word & MARK == 0) return .{ .size = word };
        const ref = Ref.parse(@truncate((word & ~MARK) >> SIZE_BITS)) orelse return null;
        const size = word & SIZE_MASK;
        // What fits one fragment never travels so.
        if (size <= limits.FRAME_PAYLOAD_BYTES_MAX or size > limits.SEGMENT_BYTES_MAX) return null;
        return .{ .size = size, .segment = ref };
    }
};

comptime {
    std.debug.assert(limits.MESSAGE_BYTES_MAX < 1 << Entry.SIZE_BITS);
}

test "entries survive encoding" {
    const entries = [_]Entry{
        .{ .size = 0 },
        .{ .size = limits.MESSAGE_BYTES_MAX },
        .{ .size = limits.SEGMENT_BYTES_MAX, .segment = .{ .place = limits.SEGMENTS_MAX - 1, .generation = 16_383 } },
        .{ .size = limits.FRAME_PAYLOAD_BYTES_MAX + 1, .segment = .{ .place = 0, .generation = 1 } },
    };
    for (entries) |entry| try std.testing.expectEqual(entry, Entry.decode(entry.encode()).?);
}

test "words that name no segment are refused" {
    const good = (Entry{ .size = 100_000, .segment = .{ .place = 3, .generation = 1 } }).encode();
    try std.testing.expect(Entry.decode(good) != null);
    try std.testing.expect(Entry.decode(good | 1 << 62) == null); // bits that mean nothing
    try std.testing.expect(Entry.decode(good & ~(@as(u64, 1) << 48)) == null); // no generation
    try std.testing.expect(Entry.decode(good | 0xFF << 40) == null); // a place out of range
    try std.testing.expect(Entry.decode(good & ~Entry.SIZE_MASK) == null); // too small
    try std.testing.expect(Entry.decode(good | Entry.SIZE_MASK) == null); // too large
}
