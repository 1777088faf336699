//! The carrier `shm`: ranges that lie in a block of a process of this host, which is mapped once and then copied from
//! like any memory.

const local = @import("carrier_local.zig");
const visit = @import("../grants/visit.zig");
const Copier = @import("copier.zig").Copier;
const Passage = @import("../grants/passage.zig").Passage;

fn reach(passage: *Passage) bool {
    const terms = &passage.terms;
    if (passage.own != null or terms.block == 0) return false;
    const mapped = passage.visit.hold(terms.block) orelse return false;
    // The size is the mapping's own: what the ledger says of the range is not believed.
    if (terms.block_offset > mapped.bytes or terms.size > mapped.bytes - terms.block_offset) {
        visit.Visit.letGo(mapped);
        return false;
    }
    passage.mapped = mapped;
    passage.here = mapped.pages.? + @as(usize, @intCast(terms.block_offset + passage.offset));
    return true;
}

pub const copier = Copier{ .reach = reach, .get = local.get, .put = local.put };
