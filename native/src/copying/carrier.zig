//! The table of carriers: what moves bytes between this process and a granted range. Two kinds: those that *copy* do it
//! themselves, a piece at a time, on whatever thread; those that *pend* hand the transfer to a driver of T2
//! (copying/mover_thread.zig), which says when it has ended.

const cma = @import("carrier_cma.zig");
const local = @import("carrier_local.zig");
const shm = @import("carrier_shm.zig");
const attachment = @import("../grants/attachment.zig");
const Copier = @import("copier.zig").Copier;
const Access = @import("../grants/access.zig").Access;

pub const Carrier = struct {
    bit: u32,
    how: union(enum) { copies: Copier, pends },
};

/// All of them, best first.
pub const table = [_]Carrier{
    .{ .bit = attachment.LOCAL, .how = .{ .copies = local.copier } },
    .{ .bit = attachment.SHM, .how = .{ .copies = shm.copier } },
    .{ .bit = attachment.CMA, .how = .{ .copies = cma.copier } },
    .{ .bit = attachment.UCX, .how = .pends },
    .{ .bit = attachment.TCP, .how = .pends },
};

/// The best of those in `allowed` that copies to the range of an access, which is made ready for it.
pub fn pick(access: *Access, allowed: u32) ?*const Carrier {
    for (&table) |*one| {
        if (one.bit & allowed == 0) continue;
        switch (one.how) {
            .copies => |copier| if (copier.reach(access)) return one,
            .pends => {},
        }
    }
    return null;
}

/// The best of those in `allowed` that pends.
pub fn pickPending(allowed: u32) ?*const Carrier {
    for (&table) |*one| {
        if (one.bit & allowed != 0 and one.how == .pends) return one;
    }
    return null;
}
