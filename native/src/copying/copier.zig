//! What a carrier that copies can do, on whatever thread asks.

const Passage = @import("../grants/passage.zig").Passage;

pub const Copier = struct {
    /// Whether it goes to the range of a passage. It may set `here` and `mapped`.
    reach: *const fn (passage: *Passage) bool,
    /// Copy a piece of the range, which begins at `offset` in it, into `ours`; or from there, for `put`. A status.
    get: *const fn (passage: *const Passage, offset: u64, ours: []u8) i32,
    put: *const fn (passage: *const Passage, offset: u64, ours: []u8) i32,
};
