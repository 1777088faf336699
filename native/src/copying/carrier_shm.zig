//! The carrier `shm`: ranges that lie in a block of a process of this host, which is mapped once and then copied from
//! like any memory.

const local = @import("carrier_local.zig");
const attachment = @import("../grants/attachment.zig");
const Copier = @import("copier.zig").Copier;
const Access = @import("../grants/access.zig").Access;

fn reach(access: *Access) bool {
    const terms = &access.terms;
    if (access.own != null or terms.block == 0) return false;
    const mapped = access.attachment.hold(terms.block) orelse return false;
    // The size is the mapping's own: what the ledger says of the range is not believed.
    if (terms.block_offset > mapped.bytes or terms.size > mapped.bytes - terms.block_offset) {
        attachment.Attachment.letGo(mapped);
        return false;
    }
    access.mapped = mapped;
    access.here = mapped.pages.? + @as(usize, @intCast(terms.block_offset + access.offset));
    return true;
}

pub const copier = Copier{ .reach = reach, .get = local.get, .put = local.put };
