//! Frames of a session between two hosts, inside TLS. PURE. Little endian:
//!
//!      0  u32 payload length, u8 kind, u8 0, u16 0, u32 channel, u32 0
//!     16  u64 number, u64 ack: the number that its sender expects next
//!
//! HF-1 Whatever stands in one, every field that `decode` gives out is in its range.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");

pub const BYTES = limits.HOST_FRAME_HEADER_BYTES;

/// The largest frame.
pub const BYTES_MAX = BYTES + limits.HOST_FRAME_PAYLOAD_BYTES_MAX;

/// Payload of a resumption: number of the session, number that is expected next, flags.
pub const RESUME_BYTES = 24;

/// Payload of a window: bytes that were granted since the channel began.
pub const WINDOW_BYTES = 8;

/// Before the bytes of a channel in `many`: its number, and how many they are.
pub const PIECE_BYTES = 8;

/// The sender has got nothing yet.
pub const FLAG_NEW: u64 = 1;

pub const Kind = enum(u8) {
    /// The first one of each connection; like a beat it has no number of its own.
    resumption = 1,
    open = 2,
    data = 3,
    window = 4,
    close = 5,
    reset = 6,
    beat = 7,
    bye = 8,
    /// Stands for a `data` of each of several channels: for each, u32 channel, u32 bytes, the bytes.
    many = 9,

    /// Whether it is kept and sent again.
    pub fn isNumbered(self: Kind) bool {
        return self != .resumption and self != .beat;
    }
};

pub const Header = struct {
    kind: Kind,
    /// Of the payload.
    size: u32 = 0,
    channel: u32 = 0,
    number: u64 = 0,
    ack: u64 = 0,

    /// Header and payload.
    pub fn span(self: Header) usize {
        return BYTES + @as(usize, self.size);
    }
};

pub const Error = error{ Kind, Zeros, Size, Channel };

/// The problem as text that completes "the peer sent".
pub fn explain(problem: Error) []const u8 {
    return switch (problem) {
        error.Kind => "a frame between hosts of an unknown kind",
        error.Zeros => "a frame between hosts with something where zeros are",
        error.Size => "a frame between hosts of a size that its kind does not have",
        error.Channel => "a frame between hosts for a channel that its kind does not go to",
    };
}

/// One of several channels in the payload of `many`.
pub const Piece = struct { channel: u32, bytes: []const u8 };

/// Write what stands before the bytes of a channel.
pub fn encodePiece(channel: u32, bytes: usize, to: *[PIECE_BYTES]u8) void {
    assert(bytes > 0);
    assert(bytes <= limits.HOST_FRAME_PAYLOAD_BYTES_MAX);
    std.mem.writeInt(u32, to[0..4], channel, .little);
    std.mem.writeInt(u32, to[4..8], @intCast(bytes), .little);
}

/// Take the next one away. Null: there is none, or none that fits.
pub fn nextPiece(rest: *[]const u8) ?Piece {
    assert(rest.len <= limits.HOST_FRAME_PAYLOAD_BYTES_MAX); // `decode` has looked
    if (rest.len <= PIECE_BYTES) return null;
    const size = std.mem.readInt(u32, rest.*[4..8], .little);
    if (size == 0 or size > rest.len - PIECE_BYTES) return null;
    const piece = Piece{
        .channel = std.mem.readInt(u32, rest.*[0..4], .little),
        .bytes = rest.*[PIECE_BYTES..][0..size],
    };
    rest.* = rest.*[PIECE_BYTES + size ..];
    return piece;
}

/// Whether a payload is pieces of several channels, and nothing else.
pub fn isMany(payload: []const u8) bool {
    var rest = payload;
    var count: usize = 0;
    while (nextPiece(&rest)) |_| count += 1;
    return rest.len == 0 and count > 1;
}

/// Write a header.
pub fn encode(header: Header, to: *[BYTES]u8) void {
    to.* = @splat(0);
    std.mem.writeInt(u32, to[0..4], header.size, .little);
    to[4] = @intFromEnum(header.kind);
    std.mem.writeInt(u32, to[8..12], header.channel, .little);
    std.mem.writeInt(u64, to[16..24], header.number, .little);
    std.mem.writeInt(u64, to[24..32], header.ack, .little);
}

/// Put another acknowledgement into a header.
pub fn acknowledge(to: []u8, ack: u64) void {
    assert(to.len >= BYTES);
    std.mem.writeInt(u64, to[24..32], ack, .little);
}

/// Header and payload of a frame that was made here.
pub fn spanAt(from: []const u8) usize {
    assert(from.len >= BYTES);
    return BYTES + @as(usize, std.mem.readInt(u32, from[0..4], .little));
}

/// Read a header, or say what is wrong with it.
pub fn decode(from: *const [BYTES]u8) Error!Header {
    const self = Header{
        .size = std.mem.readInt(u32, from[0..4], .little),
        .kind = std.enums.fromInt(Kind, from[4]) orelse return error.Kind,
        .channel = std.mem.readInt(u32, from[8..12], .little),
        .number = std.mem.readInt(u64, from[16..24], .little),
        .ack = std.mem.readInt(u64, from[24..32], .little),
    };
    for ([_]u8{ 5, 6, 7, 12, 13, 14, 15 }) |at| if (from[at] != 0) return error.Zeros;
    const fits = switch (self.kind) {
        .resumption => self.size == RESUME_BYTES,
        .open => self.size <= limits.HOST_PURPOSE_BYTES_MAX,
        .data => self.size > 0 and self.size <= limits.HOST_FRAME_PAYLOAD_BYTES_MAX,
        .window => self.size == WINDOW_BYTES,
        .close, .reset, .beat, .bye => self.size == 0,
        .many => self.size > 2 * PIECE_BYTES and self.size <= limits.HOST_FRAME_PAYLOAD_BYTES_MAX,
    };
    if (!fits) return error.Size;
    assert(self.span() <= BYTES_MAX); // HF-1
    const belongs = switch (self.kind) {
        .resumption, .beat, .bye, .many => self.channel == 0,
        .open, .close, .reset => self.channel != 0,
        .data, .window => true,
    };
    return if (belongs) self else error.Channel;
}

test "a header comes back as it was" {
    const one = Header{ .kind = .data, .size = 3, .channel = 7, .number = 1 << 40, .ack = 9 };
    var bytes: [BYTES]u8 = undefined;
    encode(one, &bytes);

    try std.testing.expectEqual(one, try decode(&bytes));
    acknowledge(&bytes, 10);
    try std.testing.expectEqual(10, (try decode(&bytes)).ack);
}

test "each wrong field has its word" {
    const wrong = [_]struct { usize, u8, Error }{
        .{ 4, 0, error.Kind }, .{ 4, 10, error.Kind }, .{ 5, 1, error.Zeros }, .{ 15, 1, error.Zeros },
        .{ 0, 0, error.Size }, .{ 2, 2, error.Size },  .{ 4, 5, error.Size },  .{ 4, 4, error.Size },
    };
    for (wrong) |one| {
        var bytes: [BYTES]u8 = undefined;
        encode(.{ .kind = .data, .size = 3, .channel = 7 }, &bytes);
        bytes[one[0]] = one[1];
        try std.testing.expectError(one[2], decode(&bytes));
        try std.testing.expect(explain(one[2]).len > 0);
    }
    var bytes: [BYTES]u8 = undefined;
    encode(.{ .kind = .reset, .channel = 0 }, &bytes);
    try std.testing.expectError(error.Channel, decode(&bytes));
    encode(.{ .kind = .beat, .channel = 3 }, &bytes);
    try std.testing.expectError(error.Channel, decode(&bytes));
}
