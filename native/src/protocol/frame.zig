//! The bytes of a frame, on rings and on streams alike. PURE. Little endian.
//!
//!     0  u32 length    header and payload, without the padding to 8 that follows
//!     4  u8  version
//!     5  u8  kind
//!     6  u8  lane
//!     7  u8  flags     1 = more fragments of this message follow; 2 = the message is a chunk of a larger one
//!     8  u64 epoch     incarnation of the sender
//!    16  u64 sequence  of its lane, from 0; CREDIT: bytes granted since the link began; BEAT: milliseconds
//!                      for which the sender's T0 has not turned, 0 = it does
//!    24  u16 head size
//!    26  u16 bodies
//!    28  u32 check     of all of the above: tells a frame from foreign bytes
//!
//! Payload of MESSAGE: head, and if there are bodies: padding to 8, their sizes (u64 each), body bytes. Of FRAGMENT:
//! body bytes. Of HELLO: `Hello`. Of RELEASE and RETIRE: segments (u32 each, `body.Ref`). The others have none.
//!
//! FR-1 Nothing of a header is used before `decode` has accepted it. FR-2 `decode` reads a private copy: a peer that
//! changes a header in shared memory meanwhile changes nothing.

const std = @import("std");
const limits = @import("../limits.zig");

pub const BYTES = limits.FRAME_HEADER_BYTES;

pub const Kind = enum(u8) {
    hello = 1,
    message = 2,
    fragment = 3,
    bye = 4,
    beat = 5,
    credit = 6,
    /// The receiver of bodies in segments is done with them.
    release = 7,
    /// The sender has given up segments: their mappings can go.
    retire = 8,
};

pub const Lane = enum(u8) { control = 0, data = 1 };

pub const Header = struct {
    kind: Kind,
    lane: Lane = .control,
    more: bool = false,
    /// What is in a chunk, those who send and take messages know.
    chunk: bool = false,
    /// Header and payload.
    length: u32 = BYTES,
    epoch: u64,
    sequence: u64 = 0,
    head_size: u16 = 0,
    n_bodies: u16 = 0,

    /// Bytes that the frame takes on a ring or stream.
    pub fn span(self: Header) u32 {
        return std.mem.alignForward(u32, self.length, limits.FRAME_ALIGN_BYTES);
    }

    /// Offset of the table of body sizes from the start of the frame.
    pub fn sizesOffset(self: Header) u32 {
        return BYTES + std.mem.alignForward(u32, self.head_size, 8);
    }

    /// Offset of the first body byte.
    pub fn bodyOffset(self: Header) u32 {
        return switch (self.kind) {
            .message => if (self.n_bodies == 0)
                BYTES + @as(u32, self.head_size)
            else
                self.sizesOffset() + 8 * @as(u32, self.n_bodies),
            else => BYTES,
        };
    }
};

/// What is wrong with a header.
pub const DecodeError = error{ Foreign, Version, Kind, Lane, Flags, Length };

/// The problem as text that completes "the peer sent".
pub fn explain(problem: DecodeError) []const u8 {
    return switch (problem) {
        error.Foreign => "bytes that are no frame",
        error.Version => "a frame of another protocol version",
        error.Kind => "a frame of an unknown kind",
        error.Lane => "a frame on an unknown lane",
        error.Flags => "a frame with unknown flags",
        error.Length => "a frame whose length does not fit its kind",
    };
}

/// A cheap mix of the first 28 bytes: no defence against intent, but text, other protocols and misplaced reads fail it.
fn checkOf(words: [4]u64) u32 {
    const odd = 0x9E37_79B9_7F4A_7C15;
    var mixed: u64 = 0x7472_696D_6573_6831; // "trimesh1"
    inline for (.{ words[0], words[1], words[2], words[3] & 0xFFFF_FFFF }) |word| {
        mixed = (mixed ^ word) *% odd;
        mixed ^= mixed >> 32;
    }
    return @truncate(mixed);
}

/// Write a header.
pub fn encode(header: Header, to: *[BYTES]u8) void {
    const flags: u64 = @as(u64, @intFromBool(header.more)) | @as(u64, @intFromBool(header.chunk)) << 1;
    var words = [4]u64{
        @as(u64, header.length) | @as(u64, limits.PROTOCOL_VERSION) << 32 | @as(u64, @intFromEnum(header.kind)) << 40 |
            @as(u64, @intFromEnum(header.lane)) << 48 | flags << 56,
        header.epoch,
        header.sequence,
        @as(u64, header.head_size) | @as(u64, header.n_bodies) << 16,
    };
    words[3] |= @as(u64, checkOf(words)) << 32;
    for (words, 0..) |word, i| std.mem.writeInt(u64, to[8 * i ..][0..8], word, .little);
}

/// Read and check a header.
pub fn decode(from: *const [BYTES]u8) DecodeError!Header {
    const copy: [BYTES]u8 = from.*; // FR-2
    var words: [4]u64 = undefined;
    for (&words, 0..) |*word, i| word.* = std.mem.readInt(u64, copy[8 * i ..][0..8], .little);
    if (checkOf(words) != words[3] >> 32) return error.Foreign;
    if (copy[4] != limits.PROTOCOL_VERSION) return error.Version;
    if (copy[7] > 3) return error.Flags;
    const header = Header{
        .kind = std.enums.fromInt(Kind, copy[5]) orelse return error.Kind,
        .lane = std.enums.fromInt(Lane, copy[6]) orelse return error.Lane,
        .more = copy[7] & 1 != 0,
        .chunk = copy[7] & 2 != 0,
        .length = @truncate(words[0]),
        .epoch = words[1],
        .sequence = words[2],
        .head_size = @truncate(words[3]),
        .n_bodies = @truncate(words[3] >> 16),
    };
    try checkShape(header);
    return header;
}

/// Lengths and flags that do not go together with the kind.
fn checkShape(header: Header) DecodeError!void {
    if (header.length < BYTES or header.length > limits.FRAME_BYTES_MAX) return error.Length;
    const payload = header.length - BYTES;
    if (header.chunk and (header.kind != .message or header.n_bodies == 0)) return error.Flags;
    switch (header.kind) {
        .message => {
            if (header.head_size > limits.HEAD_BYTES_MAX or header.n_bodies > limits.BODIES_MAX) return error.Length;
            if (header.length < header.bodyOffset()) return error.Length;
            if (header.n_bodies == 0 and header.length != header.bodyOffset()) return error.Length;
            if (header.lane == .control and (header.n_bodies != 0 or header.more)) return error.Flags;
            if (header.more and header.n_bodies == 0) return error.Flags;
        },
        .fragment => {
            if (header.lane == .control) return error.Lane;
            if (header.head_size != 0 or header.n_bodies != 0) return error.Length;
            if (payload == 0 or payload > limits.FRAME_PAYLOAD_BYTES_MAX) return error.Length;
        },
        .release, .retire => {
            if (header.more) return error.Flags;
            if (header.lane == .data) return error.Lane;
            if (header.head_size != 0 or header.n_bodies != 0) return error.Length;
            if (payload == 0 or payload % 4 != 0 or payload > 4 * limits.SEGMENTS_MAX) return error.Length;
        },
        .hello, .bye, .beat, .credit => {
            if (header.more) return error.Flags;
            if (header.lane == .data) return error.Lane;
            if (header.head_size != 0 or header.n_bodies != 0) return error.Length;
            const expected: u32 = if (header.kind == .hello) Hello.PAYLOAD_BYTES else 0;
            if (payload != expected) return error.Length;
        },
    }
}

/// The first frame of each side.
pub const Hello = struct {
    abi: u32 = limits.ABI_VERSION,
    /// Bit of the link in the sender's bell.
    slot: u32,
    pid: u32,
    /// Capacity of the sender's inbound ring; on a stream the first credit follows from it.
    ring_bytes: u32,
    host: u64,
    beat_ms: u32,
    lease_ms: u32,

    pub const PAYLOAD_BYTES = 32;
    pub const FRAME_BYTES = BYTES + PAYLOAD_BYTES;

    /// Write a whole hello.
    pub fn encodeFrame(self: Hello, epoch: u64, to: *[FRAME_BYTES]u8) void {
        encode(.{ .kind = .hello, .length = FRAME_BYTES, .epoch = epoch }, to[0..BYTES]);
        const payload = to[BYTES..];
        const words = [_]u32{ self.abi, self.slot, self.pid, self.ring_bytes };
        for (words, 0..) |word, i| std.mem.writeInt(u32, payload[4 * i ..][0..4], word, .little);
        std.mem.writeInt(u64, payload[16..24], self.host, .little);
        std.mem.writeInt(u32, payload[24..28], self.beat_ms, .little);
        std.mem.writeInt(u32, payload[28..32], self.lease_ms, .little);
    }

    /// Read a payload; what it says is still to be checked by the session.
    pub fn decodePayload(payload: *const [PAYLOAD_BYTES]u8) Hello {
        const copy: [PAYLOAD_BYTES]u8 = payload.*;
        return .{
            .abi = std.mem.readInt(u32, copy[0..4], .little),
            .slot = std.mem.readInt(u32, copy[4..8], .little),
            .pid = std.mem.readInt(u32, copy[8..12], .little),
            .ring_bytes = std.mem.readInt(u32, copy[12..16], .little),
            .host = std.mem.readInt(u64, copy[16..24], .little),
            .beat_ms = std.mem.readInt(u32, copy[24..28], .little),
            .lease_ms = std.mem.readInt(u32, copy[28..32], .little),
        };
    }
};

comptime {
    std.debug.assert(Hello.FRAME_BYTES % limits.FRAME_ALIGN_BYTES == 0);
    std.debug.assert(BYTES == 32);
}

test "a header survives encoding" {
    const headers = [_]Header{
        .{
            .kind = .message,
            .lane = .data,
            .more = true,
            .length = 32 + 8 + 16 + 5,
            .epoch = 7,
            .sequence = 1 << 60,
            .head_size = 3,
            .n_bodies = 2,
        },
        .{ .kind = .message, .length = 32 + 5, .epoch = std.math.maxInt(u64), .head_size = 5 },
        .{ .kind = .message, .lane = .data, .chunk = true, .length = 32 + 8, .epoch = 1, .n_bodies = 1 },
        .{ .kind = .fragment, .lane = .data, .length = 33, .epoch = 1 },
        .{ .kind = .credit, .epoch = 1, .sequence = 99 },
        .{ .kind = .bye, .epoch = 1 },
    };
    for (headers) |header| {
        var bytes: [BYTES]u8 = undefined;
        encode(header, &bytes);
        try std.testing.expectEqual(header, try decode(&bytes));
    }
}

test "one flipped bit anywhere is refused" {
    var good: [BYTES]u8 = undefined;
    encode(.{ .kind = .message, .lane = .data, .length = 40, .epoch = 5, .sequence = 9, .head_size = 8 }, &good);
    for (0..BYTES * 8) |bit| {
        var bad = good;
        bad[bit / 8] ^= @as(u8, 1) << @intCast(bit % 8);
        try std.testing.expectError(error.Foreign, decode(&bad));
    }
}

test "lengths that do not fit the kind are refused" {
    const bad = [_]Header{
        .{ .kind = .message, .length = 31, .epoch = 1 },
        .{ .kind = .message, .length = 33, .epoch = 1 },
        .{ .kind = .message, .length = limits.FRAME_BYTES_MAX + 8, .epoch = 1, .n_bodies = 1 },
        .{ .kind = .message, .lane = .data, .length = 39, .epoch = 1, .n_bodies = 1 },
        .{ .kind = .message, .lane = .data, .length = 32 + 8 * 4097, .epoch = 1, .n_bodies = 4097 },
        .{ .kind = .fragment, .lane = .data, .length = 32, .epoch = 1 },
        .{ .kind = .fragment, .lane = .data, .length = 33 + limits.FRAME_PAYLOAD_BYTES_MAX, .epoch = 1 },
        .{ .kind = .beat, .length = 40, .epoch = 1 },
        .{ .kind = .release, .length = 32, .epoch = 1 },
        .{ .kind = .release, .length = 35, .epoch = 1 },
        .{ .kind = .retire, .length = 32 + 4 * limits.SEGMENTS_MAX + 4, .epoch = 1 },
        .{ .kind = .hello, .length = 32, .epoch = 1 },
    };
    for (bad) |header| {
        var bytes: [BYTES]u8 = undefined;
        encode(header, &bytes);
        try std.testing.expectError(error.Length, decode(&bytes));
    }
}

test "control carries no bodies" {
    var bytes: [BYTES]u8 = undefined;
    encode(.{ .kind = .message, .lane = .control, .length = 40, .epoch = 1, .n_bodies = 1 }, &bytes);
    try std.testing.expectError(error.Flags, decode(&bytes));
    encode(.{ .kind = .fragment, .lane = .control, .length = 40, .epoch = 1 }, &bytes);
    try std.testing.expectError(error.Lane, decode(&bytes));
}

test "only a message with bodies is a chunk" {
    var bytes: [BYTES]u8 = undefined;
    for ([_]Header{
        .{ .kind = .message, .lane = .data, .chunk = true, .length = 32, .epoch = 1 },
        .{ .kind = .fragment, .lane = .data, .chunk = true, .length = 40, .epoch = 1 },
        .{ .kind = .bye, .chunk = true, .epoch = 1 },
    }) |header| {
        encode(header, &bytes);
        try std.testing.expectError(error.Flags, decode(&bytes));
    }
}

test "hello survives encoding" {
    const hello = Hello{
        .slot = 3,
        .pid = 77,
        .ring_bytes = 1 << 18,
        .host = 1 << 50,
        .beat_ms = 500,
        .lease_ms = 3000,
    };
    var bytes: [Hello.FRAME_BYTES]u8 = undefined;
    hello.encodeFrame(9, &bytes);
    const header = try decode(bytes[0..BYTES]);
    try std.testing.expectEqual(Kind.hello, header.kind);
    try std.testing.expectEqual(hello, Hello.decodePayload(bytes[BYTES..]));
}
