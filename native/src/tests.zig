//! Test root: every file, so that no test is forgotten.

test {
    _ = @import("abi.zig");
    _ = @import("arms.zig");
    _ = @import("bell.zig");
    _ = @import("body.zig");
    _ = @import("bus.zig");
    _ = @import("bus_test.zig");
    _ = @import("carriage.zig");
    _ = @import("faults.zig");
    _ = @import("frame.zig");
    _ = @import("gate.zig");
    _ = @import("gate_test.zig");
    _ = @import("greeting.zig");
    _ = @import("limits.zig");
    _ = @import("link.zig");
    _ = @import("pagemap.zig");
    _ = @import("pump.zig");
    _ = @import("pump_test.zig");
    _ = @import("reactor.zig");
    _ = @import("record.zig");
    _ = @import("ring.zig");
    _ = @import("session.zig");
    _ = @import("segment.zig");
    _ = @import("shelf.zig");
    _ = @import("socket.zig");
    _ = @import("stall.zig");
    _ = @import("status.zig");
    _ = @import("sys.zig");
    _ = @import("tcp.zig");
    _ = @import("tcp_asking.zig");
    _ = @import("tcp_client.zig");
    _ = @import("tcp_server.zig");
    _ = @import("tcp_serving.zig");
    _ = @import("tcp_socket.zig");
    _ = @import("tcp_test.zig");
    _ = @import("tcp_wire.zig");
    _ = @import("tcp_wire_test.zig");
}
