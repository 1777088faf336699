//! The carrier `shm`: ranges that lie in a block of a process of this host, which is mapped once and then copied from
//! like any memory.

const local = @import("carrier_local.zig");
const Copier = @import("copier.zig").Copier;
const Access = @import("../grants/access.zig").Access;

pub const copier = Copier{ .reach = Access.hold, .get = local.get, .put = local.put };
