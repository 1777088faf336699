//! Fuzz targets for sessions between hosts: before a peer is admitted, with OpenSSL where it is found, and after, where
//! the engine is one that passes bytes on. Run with the others, see fuzz.zig.

const std = @import("std");
const fuzz_input = @import("../fuzz_input.zig");
const hellos = @import("hello.zig");
const limits = @import("../limits.zig");
const session = @import("session.zig");
const stage = @import("stage.zig");
const status = @import("../status.zig");
const tls = @import("tls.zig");
const Wire = @import("wire.zig").Wire;

const Smith = fuzz_input.Smith;
const testing = std.testing;

const Session = session.Session(stage.OpenEngine);

/// What one input may lead to is bounded.
const TURNS_MAX = 256;

fn fuzzHello(_: void, smith: *Smith) !void {
    var bytes: [hellos.BYTES]u8 = undefined;
    if (smith.value(bool)) smith.bytes(&bytes) else forge(smith, &bytes);
    const hello = hellos.Hello.decode(&bytes) catch |problem| {
        try testing.expect(hellos.explain(problem).len > 0);
        return;
    };
    try hello.check();
    var again: [hellos.BYTES]u8 = undefined;
    hello.encode(&again);
    try testing.expectEqual(hello, try hellos.Hello.decode(&again));
}

fn forge(smith: *Smith, bytes: *[hellos.BYTES]u8) void {
    var hello = stage.helloOf(if (smith.boolWeighted(1, 7)) 2 else smith.value(u64));
    hello.kind = smith.valueRangeAtMost(u16, 0, 3);
    hello.verdict = smith.valueRangeAtMost(u16, 0, 8);
    if (smith.boolWeighted(7, 1)) smith.bytes(&hello.mesh);
    if (smith.boolWeighted(7, 1)) smith.bytes(&hello.torch);
    hello.encode(bytes);
    if (smith.boolWeighted(15, 1)) bytes[smith.index(bytes.len)] ^= smith.value(u8);
}

test "fuzz: hello" {
    try fuzz_input.feed(fuzzHello);
}

/// Whatever comes, in pieces of any size, and whatever its owner does meanwhile: nothing is given out before the peer
/// was admitted, its name stays what it was, and a session that has failed gives out nothing.
fn fuzzSession(_: void, smith: *Smith) !void {
    var half_open = session.HalfOpen{};
    var one: Session = undefined;
    const is_server = smith.boolWeighted(1, 3);
    const is_certified = smith.boolWeighted(1, 3);
    const peer = session.Peer{ .is_certified = is_certified, .name = if (is_certified) stage.CLIENT_NAME else "" };
    _ = one.init(.{ .peer_is = peer }, .{
        .role = if (is_server) .server else .client,
        .hello = stage.helloOf(1),
        .half_open = if (is_server) &half_open else null,
    });
    var source: [2 * hellos.BYTES]u8 = undefined;
    source[0] = 0x16;
    forge(smith, source[1..][0..hellos.BYTES]);
    smith.bytes(source[1 + hellos.BYTES ..]);
    var at: usize = 0;
    var was_admitted = !is_server;
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        switch (smith.valueRangeAtMost(u8, 0, 9)) {
            0 => one.tick(smith.valueRangeAtMost(u64, 0, limits.TLS_HALF_OPEN_MS)),
            1 => if (one.answer(@enumFromInt(smith.valueRangeAtMost(u8, 0, 6))) == status.OK) {
                was_admitted = was_admitted or one.state == .open;
            },
            2 => _ = one.prove(&@splat(1), &@splat(2)),
            3 => if (smith.boolWeighted(7, 1)) {
                _ = one.close();
            },
            4 => if (smith.boolWeighted(7, 1)) one.end(),
            else => at += try turn(smith, &one, source[at..], was_admitted),
        }
        try testing.expectEqual(@intFromBool(one.is_counted), half_open.count);
        try testing.expectEqual(one.state == .failed, one.status != status.OK);
        if (one.status != status.OK) try testing.expect(one.detail[0] != 0);
        if (one.hasOpened()) try testing.expect(one.isFrom(one.peer_hello.incarnation));
        if (one.hasOpened() and is_certified) try testing.expectEqual(2, one.peer_hello.incarnation); // HS-3
    }
    one.deinit();
    try testing.expectEqual(0, half_open.count);
}

/// One step with memory of any size; how much was taken.
fn turn(smith: *Smith, one: *Session, from: []const u8, was_admitted: bool) !usize {
    var wire_out: [512]u8 = undefined;
    var plain_out: [64]u8 = undefined;
    const plain_in: [64]u8 = @splat(7);
    const had_failed = one.state == .failed;
    var io = session.Io{
        .wire_in = from.ptr,
        .wire_in_size = @min(from.len, smith.valueRangeAtMost(u32, 0, 400)),
        .wire_out = &wire_out,
        .wire_out_size = smith.valueRangeAtMost(u64, 0, wire_out.len),
        .plain_in = &plain_in,
        .plain_in_size = smith.valueRangeAtMost(u64, 0, plain_in.len),
        .plain_out = &plain_out,
        .plain_out_size = smith.valueRangeAtMost(u64, 0, plain_out.len),
    };
    one.step(&io);
    try testing.expect(io.wire_taken <= io.wire_in_size and io.wire_made <= io.wire_out_size);
    try testing.expect(io.plain_taken <= io.plain_in_size and io.plain_made <= io.plain_out_size);
    if (!was_admitted or had_failed) try testing.expectEqual(0, io.plain_made + io.plain_taken); // HS-1, HS-5
    return @intCast(io.wire_taken);
}

test "fuzz: session of hosts" {
    try fuzz_input.feed(fuzzSession);
}

/// A server with OpenSSL, and what a client's first flight was once; shared by all inputs, as making them takes longer.
const Dialled = struct {
    server: *tls.Tls,
    flight: [2048]u8,
    size: usize,

    var one: ?Dialled = null;

    fn get() ?*Dialled {
        if (one == null) one = make();
        return &(one orelse return null);
    }

    fn make() ?Dialled {
        var why: []const u8 = "";
        var server: ?*tls.Tls = null;
        if (tls.Tls.create(stage.SERVER_OPTIONS, &server, &why) < 0) return null; // no OpenSSL on this machine
        var self = Dialled{ .server = server.?, .flight = undefined, .size = 0 };
        var client: ?*tls.Held = null;
        if (self.server.open(.{ .role = .client, .hello = stage.helloOf(2) }, &client) < 0) return null;
        defer client.?.free();
        var io = session.Io{ .wire_out = &self.flight, .wire_out_size = self.flight.len };
        client.?.session.step(&io);
        self.size = @intCast(io.wire_made);
        return self;
    }
};

/// A client's first flight with some of its bytes changed, in pieces, then anything: OpenSSL and what is around it take
/// it, say why not, or wait for more.
fn fuzzDialled(_: void, smith: *Smith) !void {
    const dialled = Dialled.get() orelse return;
    var bytes: [4096]u8 = undefined;
    @memcpy(bytes[0..dialled.size], dialled.flight[0..dialled.size]);
    smith.bytes(bytes[dialled.size..][0..256]);
    for (0..smith.valueRangeAtMost(u8, 0, 8)) |_| bytes[smith.index(dialled.size)] ^= smith.value(u8);
    const size = dialled.size + smith.valueRangeAtMost(u32, 0, 256);
    var held: ?*tls.Held = null;
    if (dialled.server.open(.{ .role = .server, .hello = stage.helloOf(1) }, &held) < 0) return error.NotOpened;
    defer held.?.free();
    const one = &held.?.session;
    var at: usize = 0;
    var plain_out: [64]u8 = undefined;
    var wire_out: [1 << 14]u8 = undefined;
    for (0..TURNS_MAX) |_| {
        if (at == size or one.state == .failed) break;
        const n = @min(size - at, smith.valueRangeAtMost(u32, 1, 1000));
        var io = session.Io{
            .wire_in = bytes[at..].ptr,
            .wire_in_size = n,
            .wire_out = &wire_out,
            .wire_out_size = smith.valueRangeAtMost(u64, 0, wire_out.len),
            .plain_out = &plain_out,
            .plain_out_size = plain_out.len,
        };
        one.step(&io);
        at += @intCast(io.wire_taken);
        try testing.expectEqual(0, io.plain_made);
        try testing.expect(!one.hasOpened() and one.state != .asking); // it has neither a certificate nor a token
        if (io.wire_taken == 0) break;
    }
    if (one.state == .failed) try testing.expect(one.detail[0] != 0 and one.status < 0);
}

test "fuzz: first flight" {
    try fuzz_input.feed(fuzzDialled);
}

/// Bytes wait, leave and are counted in their order, whatever the room.
fn fuzzWire(_: void, smith: *Smith) !void {
    var wire = Wire{};
    var next_in: u8 = 0;
    var next_out: u8 = 0;
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        var out: [300]u8 = undefined;
        wire.begin("", out[0..smith.valueRangeAtMost(u32, 0, out.len)]);
        for (0..smith.valueRangeAtMost(u8, 0, 3)) |_| {
            var bytes: [200]u8 = undefined;
            const n = smith.valueRangeAtMost(u32, 0, bytes.len);
            for (bytes[0..n], 0..) |*byte, i| byte.* = next_in +% @as(u8, @truncate(i));
            next_in +%= @truncate(wire.push(bytes[0..n]));
        }
        for (out[0..wire.made]) |byte| {
            try testing.expectEqual(next_out, byte);
            next_out +%= 1;
        }
        wire.end();
    }
}

test "fuzz: wire of a session" {
    try fuzz_input.feed(fuzzWire);
}
