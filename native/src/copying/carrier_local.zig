//! The carrier `local`: memory of this very process, by the address that it was granted with.

const status = @import("../status.zig");
const streaming = @import("../system/streaming.zig");
const Copier = @import("copier.zig").Copier;
const Access = @import("../grants/access.zig").Access;

fn reach(access: *Access) bool {
    if (access.own == null) return false;
    access.here = @ptrFromInt(@as(usize, @intCast(access.address())));
    return true;
}

/// From mapped memory; both may be the same.
pub fn get(access: *const Access, offset: u64, ours: []u8) i32 {
    const theirs = access.here.? + @as(usize, @intCast(offset));
    move(access, ours, theirs[0..ours.len]);
    return status.OK;
}

/// Into mapped memory.
pub fn put(access: *const Access, offset: u64, ours: []u8) i32 {
    const theirs = access.here.? + @as(usize, @intCast(offset));
    move(access, theirs[0..ours.len], ours);
    return status.OK;
}

fn move(access: *const Access, into: []u8, from: []const u8) void {
    if (access.is_huge) streaming.copy(into, from) else @memmove(into, from);
}

pub const copier = Copier{ .reach = reach, .get = get, .put = put };
