//! The root of libtrimesh: what it exports is in the room of the C surface.

comptime {
    _ = @import("abi/abi.zig");
}
