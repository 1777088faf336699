//! The carrier tcp: what is moved, refused, revoked, given up, lost; hostile clients. See tcp/stage.zig.

const std = @import("std");
const client = @import("client.zig");
const limits = @import("../limits.zig");
const socket = @import("../system/socket.zig");
const stage_file = @import("stage.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const tcp_socket = @import("tcp_socket.zig");
const wire = @import("wire.zig");

const testing = std.testing;
const EPOCH = stage_file.EPOCH;
const MEMORY_BYTES = stage_file.MEMORY_BYTES;
const SECRET = stage_file.SECRET;
const Stage = stage_file.Stage;

test "small and large, there and back, over as many connections as it is worth" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    try testing.expectEqual(status.OK, try stage.run(.read, 5, 4000));
    try testing.expectEqualSlices(u8, stage.grants.memory[5..4005], stage.local[5..4005]);
    try testing.expectEqual(1, stage.connections());

    try testing.expectEqual(status.OK, try stage.run(.read, 1, MEMORY_BYTES - 1));
    try testing.expectEqualSlices(u8, stage.grants.memory[1..], stage.local[1..]);
    try testing.expectEqual(2, stage.connections());

    @memset(stage.local[0 .. 7 << 20], 0x77);
    try testing.expectEqual(status.OK, try stage.run(.write, 3, 6 << 20));
    try testing.expect(std.mem.allEqual(u8, stage.grants.memory[3..][0 .. 6 << 20], 0x77));
    try testing.expectEqualSlices(u8, stage.local[(6 << 20) + (1 << 20) ..], stage.grants.memory[7 << 20 ..]);
    try testing.expectEqual(status.OK, try stage.run(.read, 3, 0));
    try testing.expectEqual(status.OK, try stage.run(.write, 3, 0));
    try testing.expectEqual(0, stage.grants.at);
}

test "atomic operations give the old value" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    @memset(stage.grants.memory[0..16], 0);
    for (0..3) |i| {
        stage.begin(.add, 8, 8);
        try testing.expectEqual(client.Done{ .id = stage.ids, .status = status.OK, .value = 3 * i }, try stage.wait());
    }
    try testing.expectEqual(status.OK, try stage.run(.swap, 0, 8));
    try testing.expectEqual(3, stage.grants.memory[0]);
}

test "an atomic operation waits for the lock, for a bounded time" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    stage.grants.locked = true;
    stage.begin(.add, 8, 8);
    for (0..100) |_| stage.turn();
    try testing.expect(stage.owner.server.needsTries() and stage.grants.at == 0);
    stage.grants.locked = false;
    try testing.expectEqual(status.OK, (try stage.wait()).status);
    stage.grants.locked = true;
    stage.begin(.add, 8, 8);
    for (0..100) |_| stage.turn();
    for (0..limits.TCP_SILENCE_TICKS + 2) |_| {
        stage.now += limits.TCP_TICK_MS * 1_000_000;
        stage.owner.turn(stage.now); // the reader would find it silent as soon
    }
    try testing.expectEqual(status.ERR_SILENT, (try stage.wait()).status);
    stage.grants.locked = false;
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8)); // the connection is whole
}

test "what is not allowed is denied, and nothing moves" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    stage.grants.writable = false;
    const before = try testing.allocator.dupe(u8, stage.grants.memory);
    defer testing.allocator.free(before);
    try testing.expectEqual(status.ERR_DENIED, try stage.run(.write, 0, 9 << 20));
    try testing.expectEqual(status.ERR_DENIED, try stage.run(.add, 0, 8));
    try testing.expectEqual(status.ERR_DENIED, try stage.run(.read, MEMORY_BYTES - 3, 4));
    for ([_]u64{ 2, 4, 9 << 20 }) |size| {
        const top = std.math.maxInt(u64) - 3;
        try testing.expectEqual(status.ERR_DENIED, try stage.run(.read, top, size));
        stage.grants.writable = true;
        try testing.expectEqual(status.ERR_DENIED, try stage.run(.write, top, size));
        stage.grants.writable = false;
    }
    stage.grants.writable = true;
    var order = stage.orderOf(.write, 0, 9 << 20);
    order.secret[3] ^= 1;
    const forged = order;
    order.secret = SECRET;
    order.generation = 3;
    const old = order;
    order.place = std.math.maxInt(u32);
    for ([_]client.Order{ forged, old, order }) |one| {
        try testing.expect(stage.reader.client.begin(one));
        try testing.expectEqual(status.ERR_DENIED, (try stage.wait()).status);
    }
    try testing.expectEqualSlices(u8, before, stage.grants.memory);
    try testing.expectEqual(0, stage.grants.at);
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 1));
}

test "a revocation in the middle ends a transfer, and lets go of the memory at once" {
    for ([_]wire.Kind{ .read, .write }) |kind| {
        var stage: Stage = undefined;
        try stage.init();
        defer stage.deinit();
        stage.grants.revoke_after = 9;
        try testing.expectEqual(status.ERR_REVOKED, try stage.run(kind, 0, MEMORY_BYTES));
        try testing.expectEqual(status.ERR_REVOKED, try stage.run(kind, 0, 1));
        try testing.expectEqual(0, stage.grants.at);
    }
}

test "a client that stands still does not hinder a revocation" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    stage.begin(.read, 0, MEMORY_BYTES);
    try stage.reach(2);
    // The reader does not turn any more: the buffers fill up in the middle of its requests.
    for (0..1000) |_| stage.owner.turn(stage.now);
    try testing.expect(stage.grants.at > 0);
    stage.grants.revoked = true;
    stage.owner.server.onRevoked();
    try testing.expectEqual(0, stage.grants.at);
    try testing.expectEqual(status.ERR_REVOKED, (try stage.wait()).status);
}

test "who does not answer is silent after a bounded time, whatever it was asked" {
    for ([_]u64{ 8, MEMORY_BYTES }) |size| {
        for ([_]wire.Kind{ .read, .write }) |kind| {
            var stage: Stage = undefined;
            try stage.init();
            defer stage.deinit();
            stage.begin(kind, 0, size);
            if (size > 8) try stage.reach(1);
            stage.owner_sleeps = true;
            for (0..1000) |_| stage.turn(); // buffers fill up
            stage.pass(limits.TCP_SILENCE_TICKS + 1);
            try testing.expectEqual(status.ERR_SILENT, (try stage.wait()).status);
            try testing.expectEqual(0, stage.reader.client.stream_count);
        }
    }
}

test "what was given up as silent is not written when its owner wakes up" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8)); // a connection is there
    const before = std.hash.Wyhash.hash(0, stage.grants.memory);
    stage.owner_sleeps = true;
    stage.begin(.write, 0, MEMORY_BYTES);
    stage.begin(.add, 0, 8);
    for (0..100) |_| stage.turn(); // it lies in the owner's buffers
    stage.pass(limits.TCP_SILENCE_TICKS + 1);
    for (0..2) |_| try testing.expectEqual(status.ERR_SILENT, (try stage.wait()).status);

    stage.owner_sleeps = false;
    for (0..100) |_| stage.turn();

    try testing.expectEqual(before, std.hash.Wyhash.hash(0, stage.grants.memory));
    try testing.expectEqual(status.OK, try stage.run(.write, 0, 8));
}

test "the end of an owner is told as such where it is known" {
    const cases = [_]struct { ended: ?bool, expected: i32 }{
        .{ .ended = true, .expected = status.ERR_GONE },
        .{ .ended = false, .expected = status.ofErrno(-sys.ECONNRESET) },
        .{ .ended = null, .expected = status.ofErrno(-sys.ECONNRESET) },
    };
    for (cases) |case| {
        var stage: Stage = undefined;
        try stage.init();
        defer stage.deinit();
        stage.begin(.read, 0, MEMORY_BYTES);
        try stage.reach(1);
        stage.owner.closeFds();
        stage.owner_sleeps = true;
        for (0..20) |_| stage.turn(); // the sockets end before the process does
        stage.owners.ended = case.ended;
        try testing.expectEqual(case.expected, (try stage.wait()).status);
        // There is no listener now.
        const refused = if (case.ended orelse false) case.expected else status.ofErrno(-tcp_socket.ECONNREFUSED);
        try testing.expectEqual(refused, try stage.run(.read, 0, 8));
    }
}

test "another process at the same address is not the one that was attached to" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    var order = stage.orderOf(.read, 0, 8);
    order.target.epoch += 1;
    try testing.expect(stage.reader.client.begin(order));
    try testing.expectEqual(status.ERR_GONE, (try stage.wait()).status);
}

test "what is given up moves no byte after its record" {
    for ([_]wire.Kind{ .read, .write }) |kind| {
        var stage: Stage = undefined;
        try stage.init();
        defer stage.deinit();
        stage.begin(kind, 0, MEMORY_BYTES);
        try stage.reach(1);
        stage.reader.client.giveUp(stage.ids);
        try testing.expectEqual(status.ERR_CANCELLED, (try stage.wait()).status);
        const ours = std.hash.Wyhash.hash(0, stage.local);
        const theirs = std.hash.Wyhash.hash(0, stage.grants.memory);
        for (0..100) |_| stage.turn();
        try testing.expectEqual(ours, std.hash.Wyhash.hash(0, stage.local));
        try testing.expectEqual(theirs, std.hash.Wyhash.hash(0, stage.grants.memory));
        try testing.expectEqual(status.OK, try stage.run(.read, 0, 10)); // the connection is whole
    }
}

test "connections that are not used are closed by the client, forgotten ones by the owner" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8));
    stage.pass(limits.TCP_IDLE_TICKS + 1);
    try stage.settle(0);
    try testing.expectEqual(-1, stage.reader.wait(stage.now));
    try testing.expectEqual(-1, stage.owner.wait(stage.now));

    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8));
    for (0..limits.TCP_FORGOTTEN_TICKS + 1) |_| {
        stage.now += limits.TCP_TICK_MS * 1_000_000;
        stage.owner.turn(stage.now);
    }
    try testing.expectEqual(0, stage.connections());
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8)); // over a new one
}

test "many transfers share the connections in turn" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    stage.begin(.read, 0, MEMORY_BYTES);
    for (0..200) |i| stage.begin(.read, i * 8, 8);
    var position: u32 = 0;
    for (0..201) |i| {
        const done = try stage.wait();
        try testing.expectEqual(status.OK, done.status);
        if (done.id == 1) position = @intCast(i);
    }
    try testing.expect(position > 20); // the large one did not keep the others waiting
}

// ---- hostile clients ----

fn connectTo(stage: *Stage) i32 {
    const fd = tcp_socket.connect(stage.address);
    std.debug.assert(fd >= 0);
    return fd;
}

fn sendAll(stage: *Stage, fd: i32, bytes: []const u8) void {
    var at: usize = 0;
    for (0..100_000) |_| {
        if (at == bytes.len) return;
        const n = socket.send(fd, bytes[at..]);
        if (n > 0) at += @intCast(n);
        if (n == -sys.EPIPE or n == -sys.ECONNRESET) return;
        stage.turn();
    }
}

test "garbage ends a connection and harms no other" {
    var prng = std.Random.DefaultPrng.init(3);
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    var bytes: [4096]u8 = undefined;
    for (0..50) |i| {
        const fd = connectTo(&stage);
        defer sys.close(fd);
        prng.random().bytes(&bytes);
        if (i % 2 == 0) (wire.ClientHello{ .epoch = EPOCH }).encode(bytes[0..wire.ClientHello.BYTES]);
        sendAll(&stage, fd, &bytes);
        try stage.settle(0);
    }
    try testing.expectEqual(status.OK, try stage.run(.read, 0, MEMORY_BYTES));
}

test "a flood of connections that say nothing, or half of something, keeps no client out" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    try testing.expectEqual(status.OK, try stage.run(.read, 0, 8)); // this one is known
    var fds: [limits.TCP_CONNECTIONS_MAX + 100]i32 = undefined;
    var bytes: [wire.ClientHello.BYTES]u8 = undefined;
    (wire.ClientHello{ .epoch = EPOCH }).encode(&bytes);
    for (&fds, 0..) |*fd, i| {
        fd.* = connectTo(&stage);
        stage.turn();
        sendAll(&stage, fd.*, bytes[0 .. i % bytes.len]);
    }
    // Those that have shown no secret have a share of the descriptors, and the one that has is still there.
    const strangers_max = @TypeOf(stage.owner.server).strangersMax();
    try testing.expectEqual(@min(strangers_max + 1, limits.TCP_CONNECTIONS_MAX), stage.connections());
    try testing.expectEqual(status.OK, try stage.run(.read, 0, MEMORY_BYTES)); // and makes a second one
    stage.pass(limits.TCP_SILENCE_TICKS + 1);
    try testing.expect(stage.connections() <= 2);
    for (fds) |fd| sys.close(fd);
}

test "a process out of descriptors takes connections again when it has some" {
    var stage: Stage = undefined;
    try stage.init();
    defer stage.deinit();
    stage.turn();
    stage.owner.server.pause();
    stage.begin(.read, 0, 8);
    for (0..100) |_| stage.turn();
    try testing.expectEqual(0, stage.connections());
    stage.pass(1);
    try testing.expectEqual(status.OK, (try stage.wait()).status);
}
