//! Sessions of two machines over connections that break wherever they can.

const std = @import("std");
const channels = @import("channels.zig");
const frames = @import("frame.zig");
const limits = @import("../limits.zig");
const stage = @import("stage.zig");

const Side = stage.Side;
const testing = std.testing;

fn pair() ![2]Side {
    return .{ try Side.init(true), try Side.init(false) };
}

fn connected(both: *[2]Side) !void {
    stage.connect(&both[0], &both[1]);
    try stage.settle(&both[0], &both[1]);
    try testing.expect(both[0].machine.is_resumed and both[1].machine.is_resumed);
}

fn deinit(both: *[2]Side) void {
    for (both) |*side| side.deinit();
}

test "bytes of channels cross, each on its own, both ways" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const index = both[0].machine.open(1, "why").?;
    try testing.expectEqual(3, both[0].write(index, "abc"));
    try testing.expectEqual(2, both[1].write(channels.CONTROL, "no"));
    try stage.settle(&both[0], &both[1]);

    try testing.expectEqualStrings("whyabc", both[1].received(1).bytes.items);
    try testing.expectEqualStrings("no", both[0].received(0).bytes.items);
    try testing.expectEqual(99, both[1].machine.session);
}

test "small pieces of several channels leave in one frame, and come each on its own" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const a = both[0].machine.open(1, "").?;
    const b = both[0].machine.open(3, "").?;
    const c = both[0].machine.open(5, "").?;
    try stage.settle(&both[0], &both[1]);
    const before = both[1].machine.frames_received;
    const long: [limits.HOST_FOLD_BYTES + 1]u8 = @splat('x');
    try testing.expectEqual(3, both[0].add(a, "one"));
    try testing.expectEqual(3, both[0].add(b, "two"));
    try testing.expectEqual(long.len, both[0].add(c, &long));
    try testing.expectEqual(4, both[0].add(a, "more"));
    both[0].machine.endFold();
    try stage.settle(&both[0], &both[1]);

    try testing.expectEqual(before + 1, both[1].machine.frames_received);
    try testing.expectEqualStrings("onemore", both[1].received(1).bytes.items);
    try testing.expectEqualStrings("two", both[1].received(3).bytes.items);
    try testing.expectEqualStrings(&long, both[1].received(5).bytes.items);
    try testing.expectEqual(7, both[0].machine.at(a).sent);

    try testing.expectEqual(long.len, both[0].add(c, &long)); // no first of a fold, as it would have to move
    try testing.expectEqual(3, both[0].add(a, "own"));
    both[0].machine.endFold();
    try stage.settle(&both[0], &both[1]);
    try testing.expectEqual(before + 3, both[1].machine.frames_received);
    try testing.expectEqualStrings("onemoreown", both[1].received(1).bytes.items);
}

test "what was folded comes once and in order over connections that break" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    var at: [4]channels.Index = undefined;
    for (&at, 0..) |*index, i| index.* = both[0].machine.open(@intCast(2 * i + 1), "").?;
    var random = std.Random.DefaultPrng.init(11);
    const drawn = random.random();
    var sent: [4]usize = @splat(0);
    for (0..2_000) |_| {
        for (&at, &sent) |index, *size| if (drawn.boolean()) {
            var bytes: [60]u8 = undefined;
            const n = drawn.intRangeAtMost(usize, 1, bytes.len);
            for (bytes[0..n], size.*..) |*byte, i| byte.* = @truncate(i);
            size.* += both[0].add(index, bytes[0..n]);
        };
        both[0].machine.endFold();
        _ = try both[0].send(&both[1], drawn.intRangeAtMost(usize, 0, 400));
        _ = try both[1].send(&both[0], drawn.intRangeAtMost(usize, 0, 400));
        for (&both) |*side| try side.read();
        if (drawn.uintLessThan(u8, 50) == 0) stage.connect(&both[0], &both[1]);
    }
    stage.connect(&both[0], &both[1]);
    try stage.settle(&both[0], &both[1]);
    for (&sent, 0..) |size, i| {
        const got = both[1].received(@intCast(2 * i + 1)).bytes.items;
        try testing.expectEqual(size, got.len);
        for (got, 0..) |byte, k| try testing.expectEqual(@as(u8, @truncate(k)), byte);
    }
}

test "both ends of a channel end it, and it is forgotten" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const index = both[0].machine.open(1, "").?;
    both[0].machine.finish(index);
    try stage.settle(&both[0], &both[1]);
    try testing.expect(both[1].received(1).has_ended);
    both[1].machine.finish(both[1].machine.table.find(1).?);
    try stage.settle(&both[0], &both[1]);

    for (&both) |*side| try testing.expectEqual(1, side.machine.table.count);
}

test "a channel that is reset is gone, and what crosses that is dropped" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const index = both[0].machine.open(1, "").?;
    try stage.settle(&both[0], &both[1]);
    both[1].machine.reset(both[1].machine.table.find(1).?);
    _ = both[0].write(index, "late");
    try stage.settle(&both[0], &both[1]);

    try testing.expect(both[0].received(1).was_reset);
    for (&both) |*side| try testing.expectEqual(1, side.machine.table.count);
}

test "a window that is used up holds one channel, not the others" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const a = both[0].machine.open(1, "").?;
    const b = both[0].machine.open(3, "").?;
    const much: [limits.HOST_WINDOW_BYTES]u8 = @splat(1);
    var sent: usize = 0;
    while (true) {
        const n = both[0].write(a, &much);
        if (n == 0) break;
        sent += n;
    }
    try testing.expectEqual(limits.HOST_WINDOW_BYTES, sent);
    try testing.expectEqual(1, both[0].write(b, "x"));
    try stage.settle(&both[0], &both[1]);
    try testing.expectEqual(0, both[0].write(a, "x"));

    both[1].machine.consumed(both[1].machine.table.find(1).?, limits.HOST_WINDOW_BYTES / 2);
    try stage.settle(&both[0], &both[1]);
    try testing.expectEqual(1, both[0].write(a, "x"));
}

test "the resend buffer bounds what is kept; windows and ends still pass" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    const much: [limits.HOST_QUANTUM_BYTES]u8 = @splat(1);
    var number: u32 = 1;
    var full: u32 = 0;
    while (full < 3) : (number += 2) {
        const index = both[0].machine.open(number, "").?;
        while (both[0].write(index, &much) > 0) {}
        full = if (both[0].machine.at(index).sent == 0) full + 1 else 0;
    }
    const kept = both[0].machine.kept.kept;
    try testing.expect(kept <= limits.HOST_RESEND_BYTES + 100 * frames.BYTES);
    both[0].machine.finish(both[0].machine.table.find(1).?);
    both[0].chores();
    try testing.expect(both[0].machine.kept.kept > kept);
    try stage.settle(&both[0], &both[1]);
    try testing.expect(both[0].machine.kept.kept < limits.HOST_ACK_BYTES);
}

test "a session ends in order when all has come" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    _ = both[0].write(channels.CONTROL, "last");
    try testing.expect(both[0].machine.bye());
    try stage.settle(&both[0], &both[1]);

    try testing.expect(both[1].has_bye and both[1].machine.hasAnsweredBye());
    try testing.expectEqualStrings("last", both[1].received(0).bytes.items);
    try testing.expect(both[0].machine.isParted());
    try testing.expectEqual(.closed, both[0].machine.tick().?);
}

test "silence ends it, beats do not let it come to that" {
    var both = try pair();
    defer deinit(&both);
    try connected(&both);
    for (0..100) |_| {
        for (&both) |*side| try testing.expectEqual(null, side.machine.tick());
        try stage.settle(&both[0], &both[1]);
    }
    both[0].machine.disconnect();
    for (0..29) |_| try testing.expectEqual(null, both[0].machine.tick());
    try testing.expectEqual(.lease, both[0].machine.tick().?);
}

test "each violation has its words" {
    const Case = struct { header: frames.Header, payload: []const u8 = "", says: []const u8 };
    const cases = [_]Case{
        .{ .header = .{ .kind = .close, .channel = 7 }, .says = "not opened" },
        .{ .header = .{ .kind = .close, .channel = 1 }, .says = "not opened" },
        .{ .header = .{ .kind = .beat, .ack = 1 }, .says = "acknowledgement" },
        .{ .header = .{ .kind = .bye, .number = 1 }, .says = "not the next" },
        .{ .header = .{ .kind = .open, .channel = 1 }, .says = "one of its own" },
        .{ .header = .{ .kind = .open, .channel = 4_294_967_294 }, .says = "last number" },
        .{ .header = .{ .kind = .window, .size = 8 }, .payload = &@as([8]u8, @splat(0)), .says = "shrinks" },
        .{
            .header = .{ .kind = .resumption, .size = 24 },
            .payload = &@as([24]u8, @splat(0)),
            .says = "one resumption",
        },
    };
    for (cases) |case| {
        var both = try pair();
        defer deinit(&both);
        try connected(&both);
        var bytes: [frames.BYTES + 24]u8 = undefined;
        frames.encode(case.header, bytes[0..frames.BYTES]);
        @memcpy(bytes[frames.BYTES..][0..case.payload.len], case.payload);
        try testing.expectError(error.Protocol, both[0].machine.receive(bytes[0..case.header.span()]));
        try testing.expect(std.mem.indexOf(u8, both[0].machine.problem, case.says) != null);
    }
}

fn byteAt(channel: usize, at: usize) u8 {
    return @truncate((at *% 31 +% channel *% 7) / 5);
}

test "nothing is lost, doubled or out of order over a thousand broken connections" {
    var both = try pair();
    defer deinit(&both);
    var random = std.Random.DefaultPrng.init(11);
    const r = random.random();
    try connected(&both);
    const CHANNELS = 3;
    var indices: [CHANNELS]channels.Index = undefined;
    for (&indices, 0..) |*index, i| index.* = both[0].machine.open(@intCast(1 + 2 * i), "").?;
    var sent: [CHANNELS]usize = @splat(0);
    var bytes: [20_000]u8 = undefined;
    for (0..40_000) |_| {
        if (r.uintLessThan(u8, 40) == 0) stage.connect(&both[0], &both[1]);
        const i = r.uintLessThan(usize, CHANNELS);
        const wanted = r.uintAtMost(usize, if (r.boolean()) 40 else bytes.len);
        for (bytes[0..wanted], sent[i]..) |*byte, at| byte.* = byteAt(i, at);
        sent[i] += both[0].write(indices[i], bytes[0..wanted]);
        for (&both) |*side| side.chores();
        _ = try both[0].send(&both[1], r.uintAtMost(usize, 70_000));
        _ = try both[1].send(&both[0], r.uintAtMost(usize, 300));
        for (&both) |*side| if (r.uintLessThan(u8, 4) == 0) try side.read();
        for (0..CHANNELS) |k| {
            const index = both[1].machine.table.find(@intCast(1 + 2 * k)) orelse continue;
            const got = both[1].received(@intCast(1 + 2 * k));
            const left = got.bytes.items.len - got.taken;
            const n = if (k == 0) left else r.uintAtMost(usize, left);
            for (got.bytes.items[got.taken..][0..n], got.taken..) |byte, at| {
                if (byte != byteAt(k, at)) return error.Wrong;
            }
            got.taken += n;
            if (n > 0) both[1].machine.consumed(index, n);
        }
    }
    stage.connect(&both[0], &both[1]);
    try stage.settle(&both[0], &both[1]);
    for (0..CHANNELS) |k| try testing.expectEqual(sent[k], both[1].received(@intCast(1 + 2 * k)).bytes.items.len);
    try testing.expect(both[1].resumptions > 500 and both[0].machine.resent > 500);
    try testing.expectEqual(both[0].machine.kept.next, both[1].machine.frames_received);
}
