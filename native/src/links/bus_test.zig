//! Two buses of one process, each with its T1, joined by rings or by a stream; run by two T0s at once, so that
//! ThreadSanitizer (`zig build test -Dsanitize-thread`) sees every pair of threads that shares memory.

const std = @import("std");
const bus_file = @import("bus.zig");
const limits = @import("../limits.zig");
const records = @import("../protocol/record.zig");
const session = @import("../protocol/session.zig");
const socket = @import("../system/socket.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

const Bus = bus_file.Bus;
const testing = std.testing;

fn newBus(epoch: u64, beat_ms: u32) !*Bus {
    return newWatchedBus(epoch, beat_ms, 0);
}

fn newWatchedBus(epoch: u64, beat_ms: u32, stall_ms: u32) !*Bus {
    return newBusOf(.{
        .epoch = epoch,
        .host = 0,
        .links_max = 8,
        .ring_bytes = limits.RING_BYTES,
        .beat_ms = beat_ms,
        .lease_ms = 60_000, // no test of it: threads may wait for a core
        .stall_ms = stall_ms,
    });
}

fn newBusOf(options: bus_file.Options) !*Bus {
    var bus: ?*Bus = null;
    try testing.expectEqual(status.OK, Bus.create(options, &bus));
    return bus.?;
}

/// What one T0 does: send `count` messages, receive as many, say goodbye, and see the end.
const Talker = struct {
    bus: *Bus,
    id: u32,
    count: u64,
    sent: u64 = 0,
    arrived: u64 = 0,
    bytes: u64 = 0,
    down: u32 = 0,
    left: bool = false,

    fn run(self: *Talker) !void {
        var epoll_events: [1]sys.Event = undefined;
        const epoll = sys.epollCreate();
        defer sys.close(epoll);
        _ = sys.epollAdd(epoll, self.bus.common.bell.fd, sys.IN, 0);
        while (self.down == 0) {
            try self.sendSome();
            self.bus.flush();
            var batch: [64]records.Record = undefined;
            const n: usize = @intCast(self.bus.poll(&batch));
            for (batch[0..n]) |record| try self.take(record);
            self.bus.pollDone();
            if (!self.bus.arm()) _ = sys.epollWait(epoll, &epoll_events, 5);
        }
        self.bus.freeLink(self.bus.find(self.id).?);
    }

    fn sendSome(self: *Talker) !void {
        const one = self.bus.find(self.id).?;
        var body: [3000]u8 = undefined;
        while (self.sent < self.count) {
            @memset(&body, @truncate(self.sent));
            var spans = [_]session.Span{.{ .bytes = &body, .size = self.sent % body.len }};
            const message = session.Message{ .head = "head", .bodies = &spans, .total = spans[0].size };
            var cursor = session.Cursor{};
            switch (self.bus.send(one, .data, message, &cursor)) {
                status.OK => self.sent += 1,
                status.FULL => return,
                else => return error.TestUnexpectedResult,
            }
        }
        if (self.arrived < self.count or self.left) return;
        one.leaving = true;
        self.left = self.bus.closeLink(one) == status.OK;
    }

    fn take(self: *Talker, record: records.Record) !void {
        try testing.expectEqual(self.id, record.link);
        switch (@as(records.RecordKind, @enumFromInt(record.kind))) {
            .message => {
                const view = self.bus.find(self.id).?.rx.map.base;
                const body = view[record.body_offset..][0..record.body_size];
                try testing.expect(std.mem.allEqual(u8, body, @truncate(self.arrived)));
                try testing.expectEqual(self.arrived % 3000, record.body_size);
                self.arrived += 1;
                self.bytes += record.body_size;
            },
            .fragment => return error.TestUnexpectedResult,
            .up, .space, .stalled => {},
            .down => self.down = record.flags,
        }
    }
};

fn talk(talker: *Talker) void {
    talker.run() catch |problem| std.debug.panic("a talker failed: {}", .{problem});
}

fn converse(kind: records.Kind, count: u64) !void {
    const pair = socket.socketPair();
    const buses = [2]*Bus{ try newBus(1, 1), try newBus(2, 1) };
    defer for (buses) |bus| bus.destroy();
    var talkers: [2]Talker = undefined;
    for (&talkers, buses, pair) |*talker, bus, fd| {
        var id: u32 = 0;
        try testing.expectEqual(status.OK, bus.openLink(fd, kind, .{ .lease = true, .hello_ms = 60_000 }, 0, &id));
        talker.* = .{ .bus = bus, .id = id, .count = count };
    }
    const other = try std.Thread.spawn(.{}, talk, .{&talkers[1]});
    talk(&talkers[0]);
    other.join();
    for (talkers) |talker| {
        try testing.expectEqual(count, talker.arrived);
        try testing.expectEqual(@intFromEnum(records.Down.closed), talker.down);
    }
}

test "two buses talk over rings" {
    try converse(.local, 20_000);
}

test "two buses talk over a stream" {
    try converse(.stream, 20_000);
}

/// One side of a message that goes to and fro, `rounds` times, between two that look before they sleep.
const Player = struct {
    bus: *Bus,
    id: u32,
    serves: bool,
    rounds: u32,
    arrived: u32 = 0,
    seen: [4]u32 = @splat(0),
    lost: bool = false,

    fn play(self: *Player) void {
        const epoll = sys.epollCreate();
        defer sys.close(epoll);
        _ = sys.epollAdd(epoll, self.bus.common.bell.fd, sys.IN | sys.ET, 0);
        var is_up = false;
        while (self.arrived < self.rounds and !self.lost) {
            var batch: [8]records.Record = undefined;
            const n: usize = @intCast(self.bus.afterWait(&batch));
            for (batch[0..n]) |record| {
                const is_message = record.kind == @intFromEnum(records.RecordKind.message);
                self.arrived += @intFromBool(is_message);
                if (is_message or (self.serves and !is_up)) self.answer();
                is_up = true;
            }
            self.bus.pollDone();
            if (self.arrived < self.rounds) self.wait(epoll) else self.bus.flush();
        }
    }

    fn answer(self: *Player) void {
        var cursor = session.Cursor{};
        const rc = self.bus.send(self.bus.find(self.id).?, .data, .{ .head = "to and fro" }, &cursor);
        std.debug.assert(rc == status.OK);
    }

    fn wait(self: *Player, epoll: i32) void {
        self.bus.wait.busy_poll.trust = 3; // look every time, whatever else this machine does
        self.bus.wait.busy_poll.counted_ns = sys.monotonicNs();
        self.bus.wait.busy_poll.spare = true;
        self.seen[@intCast(@intFromEnum(self.bus.beforeWait(epoll)))] += 1;
        var events: [1]sys.Event = undefined;
        self.lost = sys.epollWait(epoll, &events, 30_000) == 0;
    }
};

test "no message is lost between looking and sleeping" {
    const pair = socket.socketPair();
    var players: [2]Player = undefined;
    for (&players, pair, 0..) |*player, fd, i| {
        const bus = try newBusOf(.{
            .epoch = i + 1,
            .host = 0,
            .links_max = 8,
            .ring_bytes = limits.RING_BYTES,
            .beat_ms = 60_000, // nothing but messages wakes a process
            .lease_ms = 120_000,
            .stall_ms = 0,
            .spin_us = 20, // about what an answer takes: looks end in all ways
        });
        var id: u32 = 0;
        try testing.expectEqual(status.OK, bus.openLink(fd, .local, .{ .lease = false, .hello_ms = 60_000 }, 0, &id));
        player.* = .{ .bus = bus, .id = id, .serves = i == 0, .rounds = 10_000 };
    }
    defer for (players) |player| player.bus.destroy();

    const other = try std.Thread.spawn(.{}, Player.play, .{&players[1]});
    players[0].play();
    other.join();

    for (players) |player| {
        try testing.expectEqual(false, player.lost);
        try testing.expectEqual(player.rounds, player.arrived);
        if (@import("../system/cores.zig").allowed() >= 2) try testing.expect(player.seen[1] + player.seen[2] > 0);
    }
}

test "who must not look, or has no traffic, does not" {
    const epoll = sys.epollCreate();
    defer sys.close(epoll);
    for ([_]u32{ 0, 10 }, [_]bool{ true, false }) |spin_us, traffic| {
        const bus = try newBusOf(.{
            .epoch = 1,
            .host = 0,
            .links_max = 8,
            .ring_bytes = limits.RING_BYTES,
            .beat_ms = 60_000,
            .lease_ms = 120_000,
            .stall_ms = 0,
            .spin_us = spin_us,
        });
        defer bus.destroy();
        bus.wait.busy_poll.traffic = traffic;
        try testing.expectEqual(.none, bus.beforeWait(epoll));
    }
}

test "handles of links that were freed are refused" {
    const pair = socket.socketPair();
    defer sys.close(pair[1]);
    const bus = try newBus(1, 500);
    defer bus.destroy();
    var id: u32 = 0;
    try testing.expectEqual(status.OK, bus.openLink(pair[0], .local, .{ .lease = false, .hello_ms = 0 }, 0, &id));

    bus.freeLink(bus.find(id).?);

    try testing.expectEqual(null, bus.find(id));
    try testing.expectEqual(null, bus.find(0xFFFF_FFFF));
}

test "a full table of links is a status" {
    const bus = try newBus(1, 500);
    defer bus.destroy();
    var others: [9]i32 = undefined;
    var id: u32 = 0;
    for (&others, 0..) |*other, i| {
        const pair = socket.socketPair();
        other.* = pair[1];
        const rc = bus.openLink(pair[0], .local, .{ .lease = false, .hello_ms = 0 }, 0, &id);
        try testing.expectEqual(if (i < 8) status.OK else status.ERR_LIMIT, rc);
        if (rc != status.OK) sys.close(pair[0]); // stays the caller's
    }
    for (others) |fd| sys.close(fd);
}

test "views of a link that is freed inside a batch stay until the batch is released" {
    const pair = socket.socketPair();
    const buses = [2]*Bus{ try newBus(1, 500), try newBus(2, 500) };
    defer for (buses) |bus| bus.destroy();
    var ids: [2]u32 = undefined;
    for (buses, pair, &ids) |bus, fd, *id| {
        try testing.expectEqual(status.OK, bus.openLink(fd, .local, .{ .lease = false, .hello_ms = 0 }, 0, id));
    }
    var batch: [8]records.Record = undefined;
    try testing.expectEqual(1, buses[0].poll(&batch)); // up: the other's hello was there
    buses[0].pollDone();
    var cursor = session.Cursor{};
    const sender = buses[0].find(ids[0]).?;
    try testing.expectEqual(status.OK, buses[0].send(sender, .data, .{ .head = "borrowed" }, &cursor));
    buses[0].flush();

    const n: usize = @intCast(buses[1].poll(&batch));
    const record = batch[n - 1];
    const view = buses[1].find(ids[1]).?.rx.map.base;
    buses[1].freeLink(buses[1].find(ids[1]).?);

    try testing.expectEqual(null, buses[1].find(ids[1]));
    try testing.expectEqualStrings("borrowed", view[record.head_offset..][0..record.head_size]);
    buses[1].pollDone();
}

/// Two buses with one link that is up, and nothing left to say.
fn quietPair(ids: *[2]u32) ![2]*Bus {
    const pair = socket.socketPair();
    const buses = [2]*Bus{ try newBus(1, 60_000), try newBus(2, 60_000) };
    var batch: [8]records.Record = undefined;
    for (buses, pair, ids) |bus, fd, *id| {
        try testing.expectEqual(status.OK, bus.openLink(fd, .local, .{ .lease = false, .hello_ms = 0 }, 0, id));
    }
    for (0..2) |_| {
        for (buses) |bus| {
            bus.flush();
            _ = bus.poll(&batch);
            bus.pollDone();
        }
    }
    return buses;
}

fn say(bus: *Bus, id: u32, head: []const u8) !void {
    var cursor = session.Cursor{};
    try testing.expectEqual(status.OK, bus.send(bus.find(id).?, .data, .{ .head = head }, &cursor));
    bus.flush();
}

test "after a wait there is what was rung for meanwhile, and nothing otherwise" {
    var ids: [2]u32 = undefined;
    const buses = try quietPair(&ids);
    defer for (buses) |bus| bus.destroy();
    var batch: [8]records.Record = undefined;

    _ = buses[1].beforeWait(-1);
    try testing.expectEqual(0, buses[1].afterWait(&batch));
    try say(buses[0], ids[0], "meanwhile");
    try testing.expect(sys.isReadableWithin(buses[1].common.bell.fd, 0));
    try testing.expectEqual(1, buses[1].afterWait(&batch));
    buses[1].pollDone();

    // Not armed until it is about to wait again: it needs no waking.
    buses[1].common.bell.disarm();
    try say(buses[0], ids[0], "awake");
    try testing.expect(!sys.isReadableWithin(buses[1].common.bell.fd, 0));
    try testing.expectEqual(1, buses[1].afterWait(&batch));
    buses[1].pollDone();
}

test "a wait ends at once for what came before it" {
    var ids: [2]u32 = undefined;
    const buses = try quietPair(&ids);
    defer for (buses) |bus| bus.destroy();
    var batch: [1]records.Record = undefined;
    _ = buses[1].beforeWait(-1);
    for (0..2) |_| try say(buses[0], ids[0], "one of two");
    try testing.expectEqual(1, buses[1].afterWait(&batch)); // there is no room for the other one
    buses[1].pollDone();
    buses[1].common.bell.disarm();

    _ = buses[1].beforeWait(-1);

    try testing.expect(sys.isReadableWithin(buses[1].common.bell.fd, 0));
    try testing.expectEqual(1, buses[1].afterWait(&batch));
    buses[1].pollDone();
}

test "a poll after waits leaves no bell that is readable for nothing" {
    var ids: [2]u32 = undefined;
    const buses = try quietPair(&ids);
    defer for (buses) |bus| bus.destroy();
    var batch: [8]records.Record = undefined;
    _ = buses[1].beforeWait(-1);
    try say(buses[0], ids[0], "taken");
    try testing.expectEqual(1, buses[1].afterWait(&batch));
    buses[1].pollDone();

    try testing.expectEqual(0, buses[1].poll(&batch));

    try testing.expect(!buses[1].arm());
    try testing.expect(!sys.isReadableWithin(buses[1].common.bell.fd, 0));
}

/// Poll until a stalled record has come (or many other looks were in vain); return what it says.
fn awaitStalled(bus: *Bus, other: ?*Bus) !u32 {
    for (0..10_000) |_| {
        var batch: [8]records.Record = undefined;
        if (other) |one| _ = one.poll(&batch);
        if (other) |one| one.pollDone();
        const n: usize = @intCast(bus.poll(&batch));
        bus.pollDone();
        for (batch[0..n]) |record| {
            if (record.kind == @intFromEnum(records.RecordKind.stalled)) return record.flags;
        }
        var none: [1]sys.Event = undefined;
        const epoll = sys.epollCreate();
        defer sys.close(epoll);
        _ = sys.epollWait(epoll, &none, 1);
    }
    return error.TestUnexpectedResult;
}

fn stallAndGoOn(kind: records.Kind) !void {
    const pair = socket.socketPair();
    const buses = [2]*Bus{ try newBus(1, 1), try newWatchedBus(2, 1, 20) };
    defer for (buses) |bus| bus.destroy();
    for (buses, pair) |bus, fd| {
        var id: u32 = 0;
        try testing.expectEqual(status.OK, bus.openLink(fd, kind, .{ .lease = true, .hello_ms = 60_000 }, 0, &id));
    }
    for (0..2) |_| { // each finds the hello of the other, and both come up
        for (buses) |bus| {
            bus.flush();
            var batch: [8]records.Record = undefined;
            _ = bus.poll(&batch);
            bus.pollDone();
        }
    }

    const behind = try awaitStalled(buses[0], null); // the other one does not poll any more
    try testing.expect(behind >= 20);

    var last = behind;
    while (last != 0) last = try awaitStalled(buses[0], buses[1]);
}

test "a caller that does not poll is told to a local peer, and that it goes on" {
    try stallAndGoOn(.local);
}

test "a caller that does not poll is told to the peer of a stream, and that it goes on" {
    try stallAndGoOn(.stream);
}
