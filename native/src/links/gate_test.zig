//! An armed link, over rings and over streams, under every planned fault: what passes, in which order, how it ends.

const std = @import("std");
const arms = @import("../rings/arms.zig");
const bus_file = @import("bus.zig");
const faults = @import("../protocol/faults.zig");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const records = @import("../protocol/record.zig");
const session = @import("../protocol/session.zig");
const socket = @import("../system/socket.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

const Bus = bus_file.Bus;
const testing = std.testing;

const SECRET = 99;
const EPOCHS = [2]u64{ 11, 22 };

/// Two buses with a link between them; the second takes what the first sends.
const Rig = struct {
    buses: [2]*Bus,
    ids: [2]u32,
    epoll: i32,
    table_fd: i32,
    sent: [2]u8 = .{ 0, 0 },
    arrived: [2]u8 = .{ 0, 0 },
    /// Of the lanes, as they came; a message of another content counts as damaged.
    order: [64]frame.Lane = undefined,
    count: usize = 0,
    damaged: u32 = 0,
    down: u32 = 0,
    detail: [limits.DETAIL_BYTES]u8 = undefined,

    fn init(self: *Rig, kind: records.Kind) !void {
        const table_fd = arms.newTable(SECRET);
        self.* = .{ .buses = undefined, .ids = undefined, .epoll = sys.epollCreate(), .table_fd = table_fd };
        const pair = socket.socketPair();
        for (&self.buses, &self.ids, EPOCHS, pair) |*place, *id, epoch, fd| {
            var bus: ?*Bus = null;
            try testing.expectEqual(status.OK, Bus.create(.{
                .epoch = epoch,
                .host = 0,
                .links_max = 4,
                .ring_bytes = limits.RING_BYTES,
                .beat_ms = 5,
                .lease_ms = 200,
                .stall_ms = 0,
            }, &bus));
            place.* = bus.?;
            const watched = bus_file.Watched{ .lease = true, .hello_ms = 60_000 };
            try testing.expectEqual(status.OK, place.*.openLink(fd, kind, watched, 0, id));
        }
        _ = sys.epollAdd(self.epoll, self.buses[1].common.bell.fd, sys.IN, 0);
        try testing.expectEqual(status.OK, self.buses[1].armFaults(self.table_fd, SECRET)); // with a link that is there
        while (self.buses[0].find(self.ids[0]).?.state != .up or self.receiver().state != .up) try self.turn();
    }

    fn deinit(self: *Rig) void {
        for (self.buses) |bus| bus.destroy();
        sys.close(self.epoll);
        sys.close(self.table_fd);
    }

    fn receiver(self: *Rig) *@import("link.zig").Link {
        return self.buses[1].find(self.ids[1]).?;
    }

    fn plan(self: *Rig, kind: faults.Kind, amount: f64, seed: u64) u32 {
        const table = self.buses[1].common.arms.?.table;
        return table.add(.{
            .source = EPOCHS[0],
            .target = EPOCHS[1],
            .kind = @intFromEnum(kind),
            .code = 0,
            .amount = amount,
            .nth = 0,
            .times = 0,
            .random = seed,
        }).?;
    }

    fn send(self: *Rig, lane: frame.Lane) !void {
        const i = @intFromEnum(lane);
        const head = [2]u8{ i, self.sent[i] };
        var cursor = session.Cursor{};
        const one = self.buses[0].find(self.ids[0]).?;
        try testing.expectEqual(status.OK, self.buses[0].send(one, lane, .{ .head = &head }, &cursor));
        self.sent[i] += 1;
    }

    /// Let both T0s turn once; the second one sleeps as long as its bell says.
    fn turn(self: *Rig) !void {
        var batch: [8]records.Record = undefined;
        self.buses[0].flush();
        _ = self.buses[0].poll(&batch);
        self.buses[0].pollDone();
        const n: usize = @intCast(self.buses[1].poll(&batch));
        for (batch[0..n]) |record| self.take(record);
        self.buses[1].pollDone();
        self.buses[1].flush();
        var events: [1]sys.Event = undefined;
        if (!self.buses[1].arm()) _ = sys.epollWait(self.epoll, &events, 2);
    }

    fn take(self: *Rig, record: records.Record) void {
        if (record.kind == @intFromEnum(records.RecordKind.down)) {
            self.down = record.flags;
            self.detail = self.receiver().detail;
        }
        if (record.kind != @intFromEnum(records.RecordKind.message)) return;
        const head = self.receiver().rx.map.base[record.head_offset..][0..2];
        const lane: frame.Lane = if (record.flags & records.FLAG_CONTROL != 0) .control else .data;
        const i = @intFromEnum(lane);
        if (!std.mem.eql(u8, head, &.{ i, self.arrived[i] })) {
            self.damaged += 1;
            return;
        }
        self.arrived[i] += 1; // GA-1
        self.order[self.count] = lane;
        self.count += 1;
    }

    fn hits(self: *Rig, index: u32) u64 {
        return self.buses[1].common.arms.?.table.rows[index].hits;
    }

    fn turnUntilDown(self: *Rig) !void {
        while (self.down == 0) try self.turn();
    }
};

const KINDS = [_]records.Kind{ .local, .stream };

test "what is late comes in the order of its lane, and the lanes overtake each other" {
    for (KINDS) |kind| {
        var overtaken = false;
        for (0..8) |seed| {
            var rig: Rig = undefined;
            try rig.init(kind);
            defer rig.deinit();
            const index = rig.plan(.reorder, 0.01, seed);
            for (0..20) |i| try rig.send(if (i % 2 == 0) .control else .data);
            while (rig.count < 20) try rig.turn();
            for (rig.order[0..20], 0..) |lane, i| {
                if (lane != @as(frame.Lane, if (i % 2 == 0) .control else .data)) overtaken = true;
            }
            try testing.expectEqual(20, rig.hits(index));
            try testing.expectEqual(0, rig.damaged);
        }
        try testing.expect(overtaken);
    }
}

test "a slow line takes its time" {
    for (KINDS) |kind| {
        var rig: Rig = undefined;
        try rig.init(kind);
        defer rig.deinit();
        _ = rig.plan(.bandwidth, 40 * 100, 0); // a hundred of our frames a second
        const start = sys.monotonicNs();
        for (0..5) |_| try rig.send(.data);
        while (rig.count < 5) try rig.turn();
        try testing.expect(sys.monotonicNs() - start >= 49 * std.time.ns_per_ms);
    }
}

test "a frame that is lost ends the link, after what came before it" {
    for (KINDS) |kind| {
        var rig: Rig = undefined;
        try rig.init(kind);
        defer rig.deinit();
        const index = rig.plan(.reset, 3 * 40, 0);
        _ = rig.plan(.delay, 0.005, 0);
        for (0..6) |_| try rig.send(.data);
        try rig.turnUntilDown();
        try testing.expectEqual(3, rig.count);
        try testing.expectEqual(@intFromEnum(records.Down.eof), rig.down);
        try testing.expectEqualStrings("lost by a planned fault", std.mem.sliceTo(&rig.detail, 0));
        try testing.expect(rig.hits(index) >= 1);
    }
}

test "a frame that comes twice is taken once" {
    for (KINDS) |kind| {
        var rig: Rig = undefined;
        try rig.init(kind);
        defer rig.deinit();
        const index = rig.plan(.duplicate, 1, 0);
        for (0..6) |i| try rig.send(if (i % 2 == 0) .control else .data);
        while (rig.receiver().inbound.frames_dropped < 6) try rig.turn();
        try testing.expectEqual(6, rig.count);
        try testing.expectEqual(6, rig.hits(index));
        try testing.expectEqual(0, rig.down);
    }
}

test "a damaged frame is refused here, or its head is one that is never sent" {
    var refused: u32 = 0;
    var damaged: u32 = 0;
    for (KINDS) |kind| {
        for (0..24) |seed| {
            var rig: Rig = undefined;
            try rig.init(kind);
            defer rig.deinit();
            _ = rig.plan(.corrupt, 1, seed);
            try rig.send(.data);
            while (rig.down == 0 and rig.damaged == 0) try rig.turn();
            try testing.expectEqual(0, rig.count);
            refused += @intFromBool(rig.down == @intFromEnum(records.Down.protocol));
            damaged += rig.damaged;
        }
    }
    try testing.expectEqual(48, refused + damaged);
    try testing.expect(refused > 8 and damaged > 8);
}

test "what is held comes when it is healed" {
    for (KINDS) |kind| {
        var rig: Rig = undefined;
        try rig.init(kind);
        defer rig.deinit();
        const index = rig.plan(.hold, 0, 0);
        for (0..5) |_| try rig.send(.data);
        for (0..20) |_| try rig.turn();
        try testing.expectEqual(0, rig.count);
        rig.buses[1].common.arms.?.table.heal(index);
        while (rig.count < 5) try rig.turn();
        try testing.expectEqual(0, rig.down);
    }
}

test "a link that is held for longer than its lease ends, though the peer beats" {
    for (KINDS) |kind| {
        var rig: Rig = undefined;
        try rig.init(kind);
        defer rig.deinit();
        _ = rig.plan(.hold, 0, 0);
        try rig.send(.data);
        try rig.turnUntilDown();
        try testing.expectEqual(@intFromEnum(records.Down.lease), rig.down);
        try testing.expectEqual(0, rig.count);
    }
}

test "a goodbye, and the end of a peer, come after what is late" {
    for (KINDS) |kind| {
        for ([_]bool{ true, false }) |says_bye| {
            var rig: Rig = undefined;
            try rig.init(kind);
            defer rig.deinit();
            _ = rig.plan(.reorder, 0.05, 3);
            for (0..10) |_| try rig.send(.data);
            if (kind == .stream) { // what is said must have left our process
                while (rig.buses[0].find(rig.ids[0]).?.tx.outstanding() catch unreachable != 0) try rig.turn();
            }
            const one = rig.buses[0].find(rig.ids[0]).?;
            if (says_bye) {
                try testing.expectEqual(status.OK, rig.buses[0].closeLink(one));
            } else {
                rig.buses[0].freeLink(one);
            }
            while (rig.down == 0) {
                var batch: [8]records.Record = undefined;
                if (says_bye) try rig.turn() else {
                    const n: usize = @intCast(rig.buses[1].poll(&batch));
                    for (batch[0..n]) |record| rig.take(record);
                    rig.buses[1].pollDone();
                    var events: [1]sys.Event = undefined;
                    if (!rig.buses[1].arm()) _ = sys.epollWait(rig.epoll, &events, 2);
                }
            }
            try testing.expectEqual(10, rig.count);
        }
    }
}

test "more frames than the gate looks ahead come all the same" {
    var rig: Rig = undefined;
    try rig.init(.local);
    defer rig.deinit();
    const index = rig.plan(.hold, 0, 0);
    const one = rig.buses[0].find(rig.ids[0]).?;
    var sent: u32 = 0;
    while (true) : (sent += 1) {
        var cursor = session.Cursor{};
        if (rig.buses[0].send(one, .data, .{ .head = "x" }, &cursor) != status.OK) break;
    }
    try testing.expect(sent > 2 * limits.FAULT_FRAMES_MAX);
    for (0..5) |_| try rig.turn();
    rig.buses[1].common.arms.?.table.heal(index);
    while (rig.damaged < sent) try rig.turn(); // our rig expects numbers
    try testing.expectEqual(0, rig.down);
}

test "a ring is refused its memory as planned" {
    var rig: Rig = undefined;
    try rig.init(.local);
    defer rig.deinit();
    _ = rig.buses[1].common.arms.?.table.add(.{
        .source = 0,
        .target = EPOCHS[1],
        .kind = @intFromEnum(faults.Kind.refuse),
        .code = arms.ENOSPC,
        .amount = 0,
        .nth = 1,
        .times = 1,
        .random = 0,
    });
    for (KINDS, 0..) |kind, i| {
        const pair = socket.socketPair();
        var id: u32 = 0;
        const rc = rig.buses[1].openLink(pair[0], kind, .{ .lease = false, .hello_ms = 0 }, 0, &id);
        try testing.expectEqual(if (i == 0) status.ofErrno(-arms.ENOSPC) else status.OK, rc);
        if (rc != status.OK) sys.close(pair[0]); // stays the caller's
        sys.close(pair[1]);
    }
}

test "arms are taken up once, by the right table with the right secret" {
    var rig: Rig = undefined;
    try rig.init(.local);
    defer rig.deinit();
    try testing.expectEqual(status.ERR_STATE, rig.buses[1].armFaults(rig.table_fd, SECRET));
    try testing.expectEqual(status.ERR_ARGUMENT, rig.buses[0].armFaults(rig.table_fd, SECRET + 1));
    try testing.expectEqual(status.ERR_ARGUMENT, rig.buses[0].armFaults(rig.epoll, SECRET));
    const other = sys.memfd("no-table", faults.Table.BYTES);
    defer sys.close(other);
    try testing.expectEqual(status.ERR_ARGUMENT, rig.buses[0].armFaults(other, 0));
    try testing.expectEqual(null, rig.buses[0].common.arms);
}
