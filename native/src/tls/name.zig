//! The name in a certificate of a mesh: `trimesh://<mesh>/<incarnation>`, both in hexadecimal digits. PURE.
//!
//! NM-1 A name has one spelling: another number of digits, or capital ones, are no name.

const std = @import("std");

const SCHEME = "trimesh://";
const MESH_DIGITS = 32;
const INCARNATION_DIGITS = 16;

pub const BYTES = SCHEME.len + MESH_DIGITS + 1 + INCARNATION_DIGITS;

pub const Name = struct {
    mesh: [16]u8,
    incarnation: u64,

    /// Read one; null: it is no name of a mesh.
    pub fn parse(text: []const u8) ?Name {
        if (text.len != BYTES or !std.mem.startsWith(u8, text, SCHEME)) return null;
        const rest = text[SCHEME.len..];
        if (rest[MESH_DIGITS] != '/') return null;
        var mesh: [16]u8 = undefined;
        var incarnation: [8]u8 = undefined;
        for (rest) |digit| if (std.ascii.isUpper(digit)) return null;
        _ = std.fmt.hexToBytes(&mesh, rest[0..MESH_DIGITS]) catch return null;
        _ = std.fmt.hexToBytes(&incarnation, rest[MESH_DIGITS + 1 ..]) catch return null;
        return .{ .mesh = mesh, .incarnation = std.mem.readInt(u64, &incarnation, .big) };
    }
};

test "names" {
    const one = Name.parse("trimesh://000102030405060708090a0b0c0d0e0f/00000000000000ff").?;
    try std.testing.expectEqual(255, one.incarnation);
    try std.testing.expectEqual(15, one.mesh[15]);
    for ([_][]const u8{
        "",
        "trimesh://000102030405060708090a0b0c0d0e0f/ff",
        "trimesh://000102030405060708090A0B0C0D0E0F/00000000000000ff",
        "trimesh://000102030405060708090a0b0c0d0e0f-00000000000000ff",
        "trimesh://000102030405060708090a0b0c0d0e0g/00000000000000ff",
        "trimesh://000102030405060708090a0b0c0d0e0f/00000000000000ff/",
    }) |text| try std.testing.expectEqual(null, Name.parse(text));
}
