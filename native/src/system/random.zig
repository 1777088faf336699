//! Random bytes of the kernel.

const std = @import("std");
const linux = std.os.linux;
const sys = @import("sys.zig");

/// Fill memory, at most 256 bytes: up to there it is never interrupted. 0, or a number of the system below.
pub fn fill(into: []u8) i32 {
    std.debug.assert(into.len <= 256);
    const n = sys.res(linux.syscall3(.getrandom, @intFromPtr(into.ptr), into.len, 0));
    return if (n < 0) n else 0;
}

test "two fills differ" {
    var one: [32]u8 = @splat(0);
    var other: [32]u8 = @splat(0);
    try std.testing.expectEqual(0, fill(&one));
    try std.testing.expectEqual(0, fill(&other));
    try std.testing.expect(!std.mem.eql(u8, &one, &other));
}
