//! Test root: every file, so that no test is forgotten.

test {
    _ = @import("abi.zig");
    _ = @import("abi_mover.zig");
    _ = @import("arms.zig");
    _ = @import("bell.zig");
    _ = @import("block.zig");
    _ = @import("body.zig");
    _ = @import("bus.zig");
    _ = @import("bus_test.zig");
    _ = @import("carriage.zig");
    _ = @import("carrier.zig");
    _ = @import("carrier_cma.zig");
    _ = @import("carrier_local.zig");
    _ = @import("carrier_shm.zig");
    _ = @import("faults.zig");
    _ = @import("frame.zig");
    _ = @import("gate.zig");
    _ = @import("gate_test.zig");
    _ = @import("grants.zig");
    _ = @import("greeting.zig");
    _ = @import("ledger.zig");
    _ = @import("limits.zig");
    _ = @import("link.zig");
    _ = @import("mover.zig");
    _ = @import("mover_test.zig");
    _ = @import("mover_thread.zig");
    _ = @import("pagemap.zig");
    _ = @import("passage.zig");
    _ = @import("process.zig");
    _ = @import("pump.zig");
    _ = @import("pump_test.zig");
    _ = @import("reactor.zig");
    _ = @import("record.zig");
    _ = @import("ring.zig");
    _ = @import("segment.zig");
    _ = @import("session.zig");
    _ = @import("shelf.zig");
    _ = @import("socket.zig");
    _ = @import("stall.zig");
    _ = @import("status.zig");
    _ = @import("sys.zig");
    _ = @import("transfer.zig");
    _ = @import("view.zig");
    _ = @import("visit.zig");
}
