//! The carrier `local`: memory of this very process, by the address that it was granted with.

const status = @import("../status.zig");
const streaming = @import("../system/streaming.zig");
const Copier = @import("copier.zig").Copier;
const Passage = @import("../grants/passage.zig").Passage;

fn reach(passage: *Passage) bool {
    if (passage.own == null) return false;
    passage.here = @ptrFromInt(@as(usize, @intCast(passage.address())));
    return true;
}

/// From mapped memory; both may be the same.
pub fn get(passage: *const Passage, offset: u64, ours: []u8) i32 {
    const theirs = passage.here.? + @as(usize, @intCast(offset));
    move(passage, ours, theirs[0..ours.len]);
    return status.OK;
}

/// Into mapped memory.
pub fn put(passage: *const Passage, offset: u64, ours: []u8) i32 {
    const theirs = passage.here.? + @as(usize, @intCast(offset));
    move(passage, theirs[0..ours.len], ours);
    return status.OK;
}

fn move(passage: *const Passage, into: []u8, from: []const u8) void {
    if (passage.is_huge) streaming.copy(into, from) else @memmove(into, from);
}

pub const copier = Copier{ .reach = reach, .get = get, .put = put };
