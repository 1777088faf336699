//! What two hosts say first inside TLS: one hello of fixed size from each side. PURE. Little endian.
//!
//!      0  u64 magic, u16 version of the frame protocol, u8 kind, u8 verdict, u32 0
//!     16  u64 incarnation of the sender (the epoch of its frames), u64 its host
//!     32  16 bytes: the mesh
//!     48  16 bytes: which token, 32 bytes: proof that the sender knows it; of a join
//!     96  three texts of 32 bytes, ended by zeros: versions of trimesh, Python and torch ("" = not loaded)
//!    192  64 bytes for later versions, sent as zeros and not looked at
//!
//! HL-1 It is all that is read of a peer before it has been admitted. HL-2 Whatever stands in it, every field that
//! `decode` gives out is in its range, and its texts are printable.

const std = @import("std");
const limits = @import("../limits.zig");

pub const BYTES = limits.TLS_HELLO_BYTES;

/// "tmhello1".
const MAGIC: u64 = 0x316F_6C6C_6568_6D74;

pub const TEXT_BYTES = 32;

/// What a peer wants.
pub const Kind = enum(u8) {
    /// It has a certificate of this mesh.
    member = 1,
    /// It has a token, and asks for a certificate.
    join = 2,
};

/// What the side that was dialled has decided. Append only: older releases read it.
pub const Verdict = enum(u8) {
    none = 0,
    admitted = 1,
    token = 2,
    versions = 3,
    name = 4,
    full = 5,
    incarnation = 6,

    /// The verdict as text that completes "the other side refused: ".
    pub fn words(self: Verdict) []const u8 {
        return switch (self) {
            .none, .admitted => "it gave no reason",
            .token => "the token is not one of its own, was used before, or is older than 5 minutes",
            .versions => "its versions and the ones here do not work together",
            .name => "the name in the certificate is not one that it expects",
            .full => "it has as many hosts as it may have",
            .incarnation => "it knows this incarnation already, or knows that it has ended",
        };
    }
};

/// What is wrong with what came.
pub const Error = error{ Foreign, Kind, Verdict, Incarnation, Text };

/// The problem as text that completes "the peer sent".
pub fn explain(problem: Error) []const u8 {
    return switch (problem) {
        error.Foreign => "bytes that are no hello of trimesh",
        error.Kind => "a hello of an unknown kind",
        error.Verdict => "a hello with an unknown verdict",
        error.Incarnation => "a hello without an incarnation",
        error.Text => "a hello whose versions are no printable text",
    };
}

pub const Text = [TEXT_BYTES]u8;

/// As in `trimesh.h`.
pub const Hello = extern struct {
    incarnation: u64,
    host: u64 = 0,
    mesh: [16]u8 = @splat(0),
    token: [16]u8 = @splat(0),
    proof: [32]u8 = @splat(0),
    protocol: u32 = limits.PROTOCOL_VERSION,
    kind: u16 = @intFromEnum(Kind.member),
    verdict: u16 = 0,
    trimesh: Text = @splat(0),
    python: Text = @splat(0),
    torch: Text = @splat(0),

    /// Write it.
    pub fn encode(self: *const Hello, to: *[BYTES]u8) void {
        to.* = @splat(0);
        std.mem.writeInt(u64, to[0..8], MAGIC, .little);
        std.mem.writeInt(u16, to[8..10], @truncate(self.protocol), .little);
        to[10] = @truncate(self.kind);
        to[11] = @truncate(self.verdict);
        std.mem.writeInt(u64, to[16..24], self.incarnation, .little);
        std.mem.writeInt(u64, to[24..32], self.host, .little);
        to[32..48].* = self.mesh;
        to[48..64].* = self.token;
        to[64..96].* = self.proof;
        to[96..128].* = self.trimesh;
        to[128..160].* = self.python;
        to[160..192].* = self.torch;
    }

    /// Read one, or say what is wrong with it.
    pub fn decode(from: *const [BYTES]u8) Error!Hello {
        if (std.mem.readInt(u64, from[0..8], .little) != MAGIC) return error.Foreign;
        const self = Hello{
            .incarnation = std.mem.readInt(u64, from[16..24], .little),
            .host = std.mem.readInt(u64, from[24..32], .little),
            .mesh = from[32..48].*,
            .token = from[48..64].*,
            .proof = from[64..96].*,
            .protocol = std.mem.readInt(u16, from[8..10], .little),
            .kind = from[10],
            .verdict = from[11],
            .trimesh = from[96..128].*,
            .python = from[128..160].*,
            .torch = from[160..192].*,
        };
        try self.check();
        return self;
    }

    /// Whether every field is in its range.
    pub fn check(self: *const Hello) Error!void {
        if (std.enums.fromInt(Kind, self.kind) == null) return error.Kind;
        if (std.enums.fromInt(Verdict, self.verdict) == null) return error.Verdict;
        if (self.incarnation == 0 or self.incarnation > std.math.maxInt(i64)) return error.Incarnation;
        if (self.protocol > std.math.maxInt(u16)) return error.Foreign;
        for ([_]*const Text{ &self.trimesh, &self.python, &self.torch }) |text| try checkText(text);
    }
};

fn checkText(text: *const Text) Error!void {
    const end = std.mem.indexOfScalar(u8, text, 0) orelse return error.Text; // C reads it
    for (text[0..end]) |byte| if (byte < 0x20 or byte > 0x7E) return error.Text;
    for (text[end..]) |byte| if (byte != 0) return error.Text;
}

fn example() Hello {
    var one = Hello{ .incarnation = 7, .host = 9, .mesh = @splat(3), .token = @splat(4), .proof = @splat(5) };
    @memcpy(one.trimesh[0..5], "0.1.0");
    return one;
}

test "a hello comes back as it was" {
    var bytes: [BYTES]u8 = undefined;
    example().encode(&bytes);

    try std.testing.expectEqual(example(), try Hello.decode(&bytes));
}

test "each wrong field has its word" {
    const wrong = [_]struct { usize, u8, Error }{
        .{ 0, 0, error.Foreign },      .{ 10, 0, error.Kind },    .{ 10, 3, error.Kind },  .{ 11, 7, error.Verdict },
        .{ 16, 0, error.Incarnation }, .{ 97, 0x1B, error.Text }, .{ 127, 1, error.Text },
    };
    for (wrong) |one| {
        var bytes: [BYTES]u8 = undefined;
        example().encode(&bytes);
        bytes[one[0]] = one[1];
        try std.testing.expectError(one[2], Hello.decode(&bytes));
        try std.testing.expect(explain(one[2]).len > 0);
    }
}

test "what later versions add is not looked at" {
    var bytes: [BYTES]u8 = undefined;
    example().encode(&bytes);
    bytes[200] = 1;

    try std.testing.expectEqual(example(), try Hello.decode(&bytes));
}
