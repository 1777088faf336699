//! Copying into memory that another core has read last: that of rings and segments. Libc's copy knows the processor at
//! hand, where Zig's own is 16 bytes a step, as the oldest can: 64 KiB take 0.6 us with the one, 2.2 with the other
//! (measured; in memory that no other core has read, 0.5 and 1.1). PURE but for memory.

const std = @import("std");

const Copy = *const fn (into: [*]u8, from: [*]const u8, size: usize) callconv(.c) [*]u8;

/// Null until it is known, and where libc has none.
var of_libc: std.atomic.Value(?*anyopaque) = .init(null);

/// Use libc's `memcpy` from now on. It has to be looked up: a call by that name is one of the copy of Zig.
pub fn use(libc_copy: ?*anyopaque) void {
    of_libc.store(libc_copy, .monotonic);
}

/// Copy `from` into `into`, of the same size. They do not overlap.
pub fn copy(into: []u8, from: []const u8) void {
    std.debug.assert(into.len == from.len);
    const found = of_libc.load(.monotonic) orelse return @memcpy(into, from);
    _ = @as(Copy, @ptrCast(@alignCast(found)))(into.ptr, from.ptr, from.len);
}

fn plain(into: [*]u8, from: [*]const u8, size: usize) callconv(.c) [*]u8 {
    for (into[0..size], from[0..size]) |*to, byte| to.* = byte;
    return into;
}

test "every byte comes, and no other is touched" {
    defer use(null);
    var from: [300]u8 = undefined;
    for (&from, 0..) |*byte, i| byte.* = @truncate(i *% 7 +% 1);
    for ([_]?*anyopaque{ null, @ptrCast(@constCast(&plain)) }) |libc_copy| {
        use(libc_copy);
        for ([_]usize{ 0, 1, 63, 64, 65, 300 }) |size| {
            var into: [302]u8 = @splat(0);
            copy(into[1..][0..size], from[0..size]);
            try std.testing.expectEqualSlices(u8, from[0..size], into[1..][0..size]);
            try std.testing.expectEqual(0, into[0]);
            try std.testing.expectEqual(0, into[1 + size]);
        }
    }
}
