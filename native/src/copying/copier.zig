//! What a carrier that copies can do, on whatever thread asks.

const Access = @import("../grants/access.zig").Access;

pub const Copier = struct {
    /// Whether it goes to the range of an access. It may set `here` and `mapped`.
    reach: *const fn (access: *Access) bool,
    /// Copy a piece of the range, which begins at `offset` in it, into `ours`; or from there, for `put`. A status.
    get: *const fn (access: *const Access, offset: u64, ours: []u8) i32,
    put: *const fn (access: *const Access, offset: u64, ours: []u8) i32,
};
