//! Fuzz targets for transfers over TCP: whatever comes, in pieces of any size, nothing moves that was not allowed, and
//! nothing goes where it was not asked for. Run with the others, see fuzz.zig.

const std = @import("std");
const fuzz_input = @import("../fuzz_input.zig");
const asking = @import("asking.zig");
const limits = @import("../limits.zig");
const serving = @import("serving.zig");
const status = @import("../status.zig");
const wire = @import("wire.zig");

const Smith = fuzz_input.Smith;
const testing = std.testing;

const EPOCH = 7;

/// What one input may lead to is bounded.
const TURNS_MAX = 512;

const SECRET: wire.Secret = @splat(5);
const NONCE: wire.Nonce = @splat(6);
const GRANTED_BYTES = 300;

fn forgeRequest(smith: *Smith, counter: u64, bytes: *[wire.Request.BYTES]u8) void {
    const request = wire.Request{
        .kind = @enumFromInt(smith.valueRangeAtMost(u8, 1, 4)),
        .place = smith.value(u32),
        .generation = smith.value(u32),
        .counter = if (smith.boolWeighted(1, 15)) counter else smith.value(u64),
        .offset = switch (smith.valueRangeAtMost(u8, 0, 7)) {
            0 => smith.value(u64),
            1 => std.math.maxInt(u64) - smith.valueRangeAtMost(u64, 0, GRANTED_BYTES), // with its size, beyond the end
            else => smith.valueRangeAtMost(u64, 0, GRANTED_BYTES),
        },
        .size = if (smith.boolWeighted(1, 7)) smith.valueRangeAtMost(u64, 0, GRANTED_BYTES) else smith.value(u64),
    };
    request.encode(&NONCE, &SECRET, bytes);
    if (smith.boolWeighted(15, 1)) bytes[smith.index(bytes.len)] ^= smith.value(u8);
}

/// Whatever a client sends, in pieces of any size: only who knows the secret comes to a verdict in its favour, and
/// nothing outside of what was allowed is asked for.
fn fuzzServing(_: void, smith: *Smith) !void {
    var one = serving.Serving.init(EPOCH, NONCE);
    var bytes: [wire.Request.BYTES]u8 = @splat(0);
    (wire.ClientHello{ .epoch = EPOCH }).encode(bytes[0..wire.ClientHello.BYTES]);
    if (smith.boolWeighted(15, 1)) bytes[smith.index(wire.ClientHello.BYTES)] ^= smith.value(u8);
    var at: usize = 0;
    var spoiled = false;
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        switch (one.want()) {
            .receive => |into| {
                if (one.isIdle()) {
                    forgeRequest(smith, one.counter, &bytes);
                    at = 0;
                }
                const n = @min(into.len, smith.valueRangeAtMost(u32, 1, wire.Request.BYTES));
                @memcpy(into[0..n], bytes[at..][0..n]);
                at += n;
                one.received(n);
            },
            .verdict => {
                spoiled = false;
                const request = one.request;
                try testing.expect(request.size <= limits.TCP_BODY_BYTES_MAX);
                const inside = request.offset <= GRANTED_BYTES and request.size <= GRANTED_BYTES - request.offset;
                if (!one.isAuthentic(&SECRET) or !inside) {
                    one.conclude(status.ERR_DENIED, 0);
                } else if (request.kind == .read or request.kind == .write) one.admit() else one.conclude(status.OK, 1);
            },
            .send => |head| one.sent(smith.valueRangeAtMost(u32, 0, @intCast(head.bytes.len))),
            .body_in, .body_out => |span| {
                try testing.expect(!spoiled and span.offset + span.size <= GRANTED_BYTES);
                const n = smith.valueRangeAtMost(u64, 0, span.size);
                if (one.want() == .body_in) one.received(n) else one.sent(n);
                if (smith.boolWeighted(7, 1)) {
                    one.spoil(status.ERR_REVOKED);
                    spoiled = true;
                }
            },
            .discard => |size| one.received(smith.valueRangeAtMost(u64, 0, size)),
            .padding => |size| one.sent(smith.valueRangeAtMost(u64, 0, size)),
            .end => {
                try testing.expect(one.problem.len > 0 or one.mistaken);
                return;
            },
        }
    }
}

test "fuzz: serving" {
    try fuzz_input.feed(fuzzServing);
}

/// Whatever an owner answers, bytes belong only where they were asked for, and each request ends once.
fn fuzzAsking(_: void, smith: *Smith) !void {
    var one = asking.Asking.init(EPOCH);
    var ended: u64 = 0;
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        if (one.room() > 0 and smith.value(bool)) {
            const kind: wire.Kind = @enumFromInt(smith.valueRangeAtMost(u8, 1, 4));
            const size: u64 = if (kind == .read or kind == .write) smith.valueRangeAtMost(u64, 0, 200) else 8;
            const about: u32 = @intCast(size); // so that it is known how far the body goes
            one.ask(requestOf(kind, size), &SECRET, about, 1000);
        }
        switch (one.toSend()) {
            .nothing => {},
            .head => |head| one.sent(smith.valueRangeAtMost(u32, 1, @intCast(head.bytes.len))),
            .body => |span| one.sent(smith.valueRangeAtMost(u64, 1, span.size)),
        }
        const n: u64 = switch (one.toReceive()) {
            .head => |into| whole: {
                if (!one.greeted) {
                    var greeting: [wire.ServerHello.BYTES]u8 = undefined;
                    (wire.ServerHello{ .epoch = EPOCH, .nonce = NONCE }).encode(&greeting);
                    @memcpy(into, greeting[greeting.len - into.len ..]);
                } else if (into.len == wire.Answer.BYTES) forgeAnswer(smith, &one).encode(into[0..wire.Answer.BYTES]);
                break :whole into.len;
            },
            .body => |span| some: {
                try testing.expect(span.local >= 1000 and span.local + span.size == 1000 + span.about);
                break :some smith.valueRangeAtMost(u64, 1, span.size);
            },
        };
        const event = one.received(n) catch return;
        if (event == .ended) ended += 1;
        try testing.expectEqual(one.answered, ended);
        try testing.expect(one.answered <= one.left and one.left <= one.asked);
    }
}

fn requestOf(kind: wire.Kind, size: u64) wire.Request {
    return .{ .kind = kind, .place = 1, .generation = 1, .counter = 0, .offset = 0, .size = size };
}

fn forgeAnswer(smith: *Smith, one: *const asking.Asking) wire.Answer {
    const statuses = [_]i32{ status.OK, status.UNDER_WAY, status.ERR_REVOKED, status.ERR_DENIED, smith.value(i32) };
    const next = &one.pendings[one.answered % limits.TCP_WINDOW_REQUESTS].request;
    const known = one.answered < one.asked;
    return .{
        .counter = if (known and smith.boolWeighted(1, 15)) next.counter else smith.value(u64),
        .status = statuses[smith.index(statuses.len)],
        .size = if (known and smith.value(bool)) next.size else if (smith.boolWeighted(1, 7)) 0 else smith.value(u64),
        .value = smith.value(u64),
    };
}

test "fuzz: asking" {
    try fuzz_input.feed(fuzzAsking);
}
