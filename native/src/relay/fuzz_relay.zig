//! Fuzz targets for sessions between two hosts: forged frames of a peer, and two honest sides whose connections break
//! anywhere. Run with the others, see fuzz.zig.

const std = @import("std");
const fuzz_input = @import("../fuzz_input.zig");
const channels = @import("channels.zig");
const frames = @import("frame.zig");
const limits = @import("../limits.zig");
const machines = @import("machine.zig");
const resends = @import("resend.zig");
const stage = @import("stage.zig");

const Smith = fuzz_input.Smith;
const testing = std.testing;

const TURNS_MAX = 64;

fn fuzzHeader(_: void, smith: *Smith) !void {
    var bytes: [frames.BYTES]u8 = undefined;
    if (smith.value(bool)) smith.bytes(&bytes) else forge(smith, &bytes, 0);
    const header = frames.decode(&bytes) catch |problem| {
        try testing.expect(frames.explain(problem).len > 0);
        return;
    };
    try testing.expect(header.span() <= frames.BYTES_MAX);
    var again: [frames.BYTES]u8 = undefined;
    frames.encode(header, &again);
    try testing.expectEqualSlices(u8, &bytes, &again);
}

test "fuzz: headers between hosts" {
    try fuzz_input.feed(fuzzHeader);
}

fn forge(smith: *Smith, to: *[frames.BYTES]u8, number: u64) void {
    const kind: frames.Kind = @enumFromInt(smith.valueRangeAtMost(u8, 1, 9));
    const fitting: u32 = switch (kind) {
        .resumption => frames.RESUME_BYTES,
        .window => frames.WINDOW_BYTES,
        .open => smith.valueRangeAtMost(u32, 0, 40),
        .data => smith.valueRangeAtMost(u32, 1, 400),
        .many => smith.valueRangeAtMost(u32, 17, 40),
        else => 0,
    };
    frames.encode(.{
        .kind = kind,
        .size = if (smith.boolWeighted(1, 15)) fitting else smith.value(u32),
        .channel = if (smith.boolWeighted(1, 15)) smith.valueRangeAtMost(u32, 0, 9) else smith.value(u32),
        .number = if (smith.boolWeighted(1, 7)) number else smith.value(u64),
        .ack = if (smith.boolWeighted(1, 7)) smith.valueRangeAtMost(u64, 0, 4) else smith.value(u64),
    }, to);
}

/// Pieces of two channels, the second of which has all that is left.
fn forgePieces(smith: *Smith, bytes: *[frames.BYTES + 400]u8) void {
    const size = frames.spanAt(bytes) - frames.BYTES;
    if (size < 18 or size > 400) return;
    const payload = bytes[frames.BYTES..];
    frames.encodePiece(smith.valueRangeAtMost(u32, 0, 9), 1, payload[0..8]);
    frames.encodePiece(smith.valueRangeAtMost(u32, 0, 9), size - 17, payload[9..17]);
}

/// Whatever a peer sends, a machine answers with words or with something whose every byte was sent and allowed.
fn fuzzMachine(_: void, smith: *Smith) !void {
    var side = try stage.Side.init(smith.value(bool));
    defer side.deinit();
    const one = &side.machine;
    one.connect();
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        var bytes: [frames.BYTES + 400]u8 = @splat(0);
        if (!one.is_resumed and smith.boolWeighted(1, 7)) {
            frames.encode(.{ .kind = .resumption, .size = frames.RESUME_BYTES }, bytes[0..frames.BYTES]);
            bytes[frames.BYTES] = 99;
            bytes[frames.BYTES + 16] = @intFromBool(one.expected == 0);
        } else {
            forge(smith, bytes[0..frames.BYTES], one.expected);
            std.mem.writeInt(u64, bytes[frames.BYTES..][0..8], smith.value(u64), .little);
            if (smith.value(bool)) forgePieces(smith, &bytes);
        }
        try side.wire.appendSlice(testing.allocator, bytes[0..@min(bytes.len, frames.spanAt(&bytes))]);
        side.read() catch |problem| {
            try testing.expectEqual(error.Protocol, problem);
            try testing.expect(one.problem.len > 0);
            break;
        };
        if (side.wire.items.len > 0) side.wire.clearRetainingCapacity(); // the rest of a long one never comes
        side.chores();
        try turn(smith, &side);
        for (one.table.all[0..one.table.used]) |*channel| if (channel.is_used) {
            try testing.expect(channel.received <= channel.allowed and channel.sent <= channel.granted);
        };
        try testing.expect(one.kept.kept <= resends.KEPT_BYTES_MAX);
    }
}

/// The owner does something, and bytes leave.
fn turn(smith: *Smith, side: *stage.Side) !void {
    const one = &side.machine;
    const number = smith.valueRangeAtMost(u32, 0, 9);
    const found = one.table.find(number);
    switch (smith.valueRangeAtMost(u8, 0, 7)) {
        0 => if (one.next_own <= 9) {
            _ = one.open(one.next_own, "x");
        },
        1 => if (found) |index| if (index != 0 and !one.at(index).is_reset) one.reset(index),
        2 => if (found) |index| if (!one.at(index).is_reset) one.finish(index),
        3 => if (found) |index| {
            const most = one.at(index).received - one.at(index).consumed;
            if (!one.at(index).is_reset) one.consumed(index, @intCast(smith.valueRangeAtMost(u64, 0, most)));
        },
        4 => if (found) |index| {
            _ = side.add(index, "bytes of it");
            if (smith.value(bool)) _ = side.add(0, "more");
            if (found != one.table.find(2)) _ = side.add(one.table.find(2) orelse index, "of another");
            one.endFold();
        },
        5 => _ = one.tick(),
        6 => if (smith.boolWeighted(7, 1)) one.connect(),
        else => {},
    }
    one.sent(smith.valueRangeAtMost(u32, 0, @intCast(one.outgoing(1 << 16).len)));
}

test "fuzz: a session between hosts" {
    try fuzz_input.feed(fuzzMachine);
}

/// Two honest sides lose nothing, whatever becomes of their connections.
fn fuzzPair(_: void, smith: *Smith) !void {
    var both = [2]stage.Side{ try stage.Side.init(true), try stage.Side.init(false) };
    defer for (&both) |*side| side.deinit();
    stage.connect(&both[0], &both[1]);
    var sent: [2]u64 = @splat(0);
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        const i = smith.index(2);
        switch (smith.valueRangeAtMost(u8, 0, 5)) {
            0 => stage.connect(&both[0], &both[1]),
            1, 2 => {
                var bytes: [300]u8 = undefined;
                const n = smith.valueRangeAtMost(u32, 1, bytes.len);
                for (bytes[0..n], sent[i]..) |*byte, at| byte.* = @truncate(at);
                sent[i] += both[i].write(channels.CONTROL, bytes[0..n]);
            },
            else => _ = try both[i].send(&both[1 - i], smith.valueRangeAtMost(u32, 0, 600)),
        }
        for (&both) |*side| try side.read();
        for (&both) |*side| side.chores();
    }
    stage.connect(&both[0], &both[1]);
    try stage.settle(&both[0], &both[1]);
    for (0..2) |i| {
        const got = both[1 - i].received(0).bytes.items;
        try testing.expectEqual(sent[i], got.len);
        for (got, 0..) |byte, at| try testing.expectEqual(@as(u8, @truncate(at)), byte);
    }
}

test "fuzz: two sides of a session" {
    try fuzz_input.feed(fuzzPair);
}

comptime {
    std.debug.assert(limits.HOST_WINDOW_BYTES > TURNS_MAX * 400); // no honest channel of these is full
}
