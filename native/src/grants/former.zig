//! The names of grants that were dropped last. Who shows the secret of one is told that it was revoked; without it
//! no process is told of a place. The carrier tcp needs it: others see the ledger, where a generation that is over
//! speaks for itself.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

const Name = struct { place: u32, generation: u32, secret: [16]u8 };

/// All zero is none: no generation is 0.
pub const Former = struct {
    lock: sys.Mutex,
    names: [limits.FORMER_GRANTS_MAX]Name,
    next: u32,

    /// T0: remember one, in place of the oldest.
    pub fn add(self: *Former, place: u32, generation: u32, secret: [16]u8) void {
        assert(place < limits.GRANTS_MAX);
        assert(generation != 0);
        self.lock.lock();
        defer self.lock.unlock();
        assert(self.next < limits.FORMER_GRANTS_MAX);
        self.names[self.next] = .{ .place = place, .generation = generation, .secret = secret };
        self.next = (self.next + 1) % limits.FORMER_GRANTS_MAX;
    }

    /// T2: the secret of one that is remembered.
    pub fn secretOf(self: *Former, place: u32, generation: u32) ?[16]u8 {
        assert(place < limits.GRANTS_MAX);
        assert(generation != 0);
        self.lock.lock();
        defer self.lock.unlock();
        for (&self.names) |*one| {
            if (one.place == place and one.generation == generation) return one.secret;
        }
        return null;
    }
};

test "the last names are remembered" {
    const former = try std.testing.allocator.create(Former);
    defer std.testing.allocator.destroy(former);
    @memset(std.mem.asBytes(former), 0);
    try std.testing.expectEqual(null, former.secretOf(0, 1));
    former.add(0, 1, @splat(9));
    try std.testing.expectEqual(@as(?[16]u8, @splat(9)), former.secretOf(0, 1));
    try std.testing.expectEqual(null, former.secretOf(0, 2));
    try std.testing.expectEqual(null, former.secretOf(1, 1));
    for (1..limits.FORMER_GRANTS_MAX + 1) |generation| former.add(5, @intCast(generation), @splat(7));
    try std.testing.expectEqual(null, former.secretOf(0, 1));
    try std.testing.expectEqual(@as(?[16]u8, @splat(7)), former.secretOf(5, 1));
}
