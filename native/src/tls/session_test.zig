//! Tests of the session itself: what it does with any engine, before a peer is admitted and after.

const std = @import("std");
const limits = @import("../limits.zig");
const session = @import("session.zig");
const stage = @import("stage.zig");
const status = @import("../status.zig");

const Session = session.Session(stage.OpenEngine);
const Pair = stage.Pair(Session);
const testing = std.testing;

const ROOMS = [_]usize{ 1, 7, 100, 1 << 17 };

const Ends = struct {
    client: Session = undefined,
    server: Session = undefined,
    half_open: session.HalfOpen = .{},

    const Options = struct {
        client_name: []const u8 = stage.CLIENT_NAME,
        server_name: []const u8 = stage.SERVER_NAME,
        client: u64 = 2,
        expected: u64 = 1,
        joins: bool = false,
        has_names: bool = true,
    };

    fn init(self: *Ends, options: Options) !Pair {
        var hello = stage.helloOf(options.client);
        if (options.joins) hello.kind = 2;
        try testing.expect(self.client.init(
            .{ .peer_is = .{ .is_certified = options.server_name.len > 0, .name = options.server_name } },
            .{ .role = .client, .hello = hello, .expected = options.expected, .has_names = options.has_names },
        ));
        try testing.expect(self.server.init(
            .{ .peer_is = .{ .is_certified = options.client_name.len > 0, .name = options.client_name } },
            .{
                .role = .server,
                .hello = stage.helloOf(1),
                .half_open = &self.half_open,
                .has_names = options.has_names,
            },
        ));
        return .{ .client = &self.client, .server = &self.server };
    }
};

test "two members meet, whatever the pieces that bytes come in" {
    for (ROOMS) |room| {
        var ends = Ends{};
        var pair = try ends.init(.{});
        defer pair.deinit();

        try pair.settle(room);
        try testing.expectEqual(.asking, ends.server.state);
        try testing.expectEqual(1, ends.half_open.count);
        try testing.expectEqual(2, ends.server.peer_hello.incarnation);
        try testing.expectEqual(status.OK, ends.server.answer(.admitted));
        try pair.settle(room);

        try testing.expectEqual(.open, ends.client.state);
        try testing.expectEqual(.open, ends.server.state);
        try testing.expectEqual(0, ends.half_open.count);
        try testing.expect(ends.server.isFrom(2) and !ends.server.isFrom(1) and !ends.server.isFrom(3));
        try testing.expect(ends.client.isFrom(1) and !ends.client.isFrom(2));
    }
}

test "nothing of a client is sent or read before it is admitted" {
    var ends = Ends{};
    var pair = try ends.init(.{});
    defer pair.deinit();
    try pair.settle(100);

    try testing.expectEqual(0, try pair.turnClient("early", 1000));
    try testing.expectEqual(0, try pair.turnServer("early", 1000));
    try testing.expectEqual(status.OK, ends.server.answer(.admitted));
    try pair.settle(100);
    try testing.expectEqual(4, try pair.turnClient("late", 1000));
    try pair.settle(100);

    try testing.expectEqualStrings("late", pair.at_server.items);
}

test "what was sent arrives before the end, and the end on both sides" {
    for (ROOMS) |room| {
        var ends = Ends{};
        var pair = try ends.init(.{});
        defer pair.deinit();
        try pair.settle(room);
        _ = ends.server.answer(.admitted);
        try pair.settle(room);
        _ = try pair.turnClient("last", 1000);
        try testing.expectEqual(status.OK, ends.client.close());
        try pair.settle(room);

        try testing.expectEqualStrings("last", pair.at_server.items);
        try testing.expectEqual(.closed, ends.client.state);
        try testing.expectEqual(.closed, ends.server.state);
        ends.client.end();
        try testing.expectEqual(status.OK, ends.client.status);
    }
}

test "a connection that ends without a word is cut" {
    var ends = Ends{};
    var pair = try ends.init(.{});
    defer pair.deinit();
    try pair.settle(100);
    ends.client.end();
    ends.server.end();

    try testing.expectEqual(status.ERR_TLS_CUT, ends.client.status);
    try testing.expectEqual(status.ERR_TLS_CUT, ends.server.status);
    try testing.expectEqual(0, ends.half_open.count);
}

test "a name that does not fit ends it" {
    const wrong = [_]Ends.Options{
        .{ .client = 3 }, // says another incarnation than its certificate
        .{ .client_name = "trimesh://" ++ "cd" ** 16 ++ "/0000000000000002" }, // of another mesh
        .{ .client_name = "n2.example" },
        .{ .expected = 9 },
        .{ .server_name = stage.CLIENT_NAME, .expected = 0 }, // the answer is of another incarnation
    };
    for (wrong, 0..) |options, i| {
        var ends = Ends{};
        var pair = try ends.init(options);
        defer pair.deinit();
        try pair.settle(100);
        _ = ends.server.answer(.admitted);
        try pair.settle(100);

        const blamed = if (i < 3) &ends.server else &ends.client;
        try testing.expectEqual(status.ERR_TLS_NAME, blamed.status);
        try testing.expect(!blamed.isFrom(2) and !blamed.isFrom(1));
        try testing.expect(blamed.detail[0] != 0);
    }
}

test "without a certificate only a join comes as far as its owner" {
    var ends = Ends{};
    var pair = try ends.init(.{ .client_name = "" });
    defer pair.deinit();
    try pair.settle(100);
    try testing.expectEqual(status.ERR_TLS_CERTIFICATE, ends.server.status);

    var joins = Ends{};
    var joining = try joins.init(.{ .client_name = "", .joins = true });
    defer joining.deinit();
    try joining.settle(100);
    try testing.expectEqual(.proof, joins.client.state);
    try testing.expectEqual(status.OK, joins.client.prove(&@splat(4), &@splat(5)));
    try joining.settle(100);
    try testing.expectEqual(.asking, joins.server.state);
    try testing.expectEqual(@as([32]u8, @splat(5)), joins.server.peer_hello.proof);
}

test "with a certificate there is no join, and a server always has one" {
    var ends = Ends{};
    var pair = try ends.init(.{ .joins = true });
    defer pair.deinit();
    try pair.settle(100);
    _ = ends.client.prove(&@splat(4), &@splat(5));
    try pair.settle(100);
    try testing.expectEqual(status.ERR_TLS_CERTIFICATE, ends.server.status);

    var bare = Ends{};
    var baring = try bare.init(.{ .server_name = "" });
    defer baring.deinit();
    try baring.settle(100);
    try testing.expectEqual(status.ERR_TLS_CERTIFICATE, bare.client.status);
}

test "with certificates of another authority a join shows one, too" {
    var ends = Ends{};
    var pair = try ends.init(.{ .client_name = "n2", .server_name = "n1", .joins = true, .has_names = false });
    defer pair.deinit();
    try pair.settle(100);
    try testing.expectEqual(.proof, ends.client.state);
    _ = ends.client.prove(&@splat(4), &@splat(5));
    try pair.settle(100);
    try testing.expectEqual(.asking, ends.server.state);
    try testing.expectEqual(@as([16]u8, @splat(4)), ends.server.peer_hello.token);
    try testing.expectEqual(status.OK, ends.server.answer(.admitted));
    try pair.settle(100);
    try testing.expectEqual(.open, ends.client.state);

    var bare = Ends{};
    var baring = try bare.init(.{ .client_name = "", .server_name = "n1", .joins = true, .has_names = false });
    defer baring.deinit();
    try baring.settle(100);
    _ = bare.client.prove(&@splat(4), &@splat(5));
    try baring.settle(100);
    try testing.expectEqual(status.ERR_TLS_CERTIFICATE, bare.server.status);
}

test "a server cannot pass by the check of its name with an answer that asks to join" {
    var one: Session = undefined;
    const peer = session.Peer{ .is_certified = true, .name = stage.SERVER_NAME };
    try testing.expect(one.init(.{ .peer_is = peer }, .{ .role = .client, .hello = stage.helloOf(2) }));
    var said = stage.helloOf(9); // another incarnation than its certificate
    said.kind = 2;
    said.verdict = 1;
    var wire_in: [257]u8 = undefined;
    wire_in[0] = 0x16;
    said.encode(wire_in[1..]);
    var wire_out: [300]u8 = undefined;
    var io = session.Io{ .wire_in = &wire_in, .wire_in_size = wire_in.len, .wire_out = &wire_out };
    io.wire_out_size = wire_out.len;
    one.step(&io);

    try testing.expectEqual(status.ERR_PEER, one.status);
    try testing.expect(!one.isFrom(9));
}

test "a server whose answer cannot be sent has failed, and does not open" {
    var ends = Ends{};
    var pair = try ends.init(.{});
    defer pair.deinit();
    try pair.settle(1 << 17);
    ends.server.engine.is_broken = true;

    try testing.expectEqual(status.OK, ends.server.answer(.admitted));

    try testing.expectEqual(.failed, ends.server.state);
    try testing.expectEqual(status.ERR_TLS, ends.server.status);
    try testing.expectEqual(0, ends.half_open.count);
}

test "a refusal is said to the other side" {
    var ends = Ends{};
    var pair = try ends.init(.{});
    defer pair.deinit();
    try pair.settle(100);
    try testing.expectEqual(status.OK, ends.server.answer(.versions));
    try pair.settle(100);

    try testing.expectEqual(status.ERR_DENIED, ends.server.status);
    try testing.expectEqual(status.ERR_TLS_REFUSED, ends.client.status);
    try testing.expect(std.mem.indexOf(u8, &ends.client.detail, "versions") != null);
    try testing.expectEqual(status.ERR_STATE, ends.server.answer(.admitted));
}

test "a half-open session ends by its time" {
    var ends = Ends{};
    var pair = try ends.init(.{});
    defer pair.deinit();
    try pair.settle(100);
    ends.server.tick(limits.TLS_HALF_OPEN_MS - 1);
    try testing.expectEqual(.asking, ends.server.state);
    ends.server.tick(1);
    try testing.expectEqual(status.ERR_TLS_LATE, ends.server.status);
    try testing.expectEqual(0, ends.half_open.count);

    var admitted = Ends{};
    var open = try admitted.init(.{});
    defer open.deinit();
    try open.settle(100);
    _ = admitted.server.answer(.admitted);
    admitted.server.tick(limits.TLS_HALF_OPEN_MS);
    try testing.expectEqual(.open, admitted.server.state);
}

/// An engine whose handshake never ends, whatever comes.
const Endless = struct {
    /// Take everything.
    pub fn handshake(_: *Endless, wire: *@import("wire.zig").Wire) session.Outcome {
        var into: [512]u8 = undefined;
        while (wire.pull(&into) > 0) {}
        return .starved;
    }
    /// Never asked.
    pub fn read(_: *Endless, _: anytype, _: []u8) session.Outcome {
        unreachable;
    }
    /// Never asked.
    pub fn write(_: *Endless, _: anytype, _: []const u8) session.Outcome {
        unreachable;
    }
    /// Never asked.
    pub fn shut(_: *Endless, _: anytype) void {}
    /// Never asked.
    pub fn peer(_: *Endless) session.Peer {
        return .{};
    }
    /// Nothing is held.
    pub fn deinit(_: *Endless) void {}
};

test "a half-open session ends by its bytes" {
    var one: session.Session(Endless) = undefined;
    try testing.expect(one.init(.{}, .{ .role = .server, .hello = stage.helloOf(1) }));
    const much: [limits.TLS_HALF_OPEN_BYTES + 1]u8 = @splat(0x16);
    var io = session.Io{ .wire_in = &much, .wire_in_size = limits.TLS_HALF_OPEN_BYTES };
    one.step(&io);
    try testing.expectEqual(status.OK, one.status);
    try testing.expectEqual(limits.TLS_HALF_OPEN_BYTES, io.wire_taken);
    io.wire_in_size = 1;
    one.step(&io);

    try testing.expectEqual(status.ERR_TOO_LARGE, one.status);
    try testing.expectEqual(0, io.wire_taken);
}

test "so many are half-open, and no more" {
    var half_open = session.HalfOpen{};
    var many: [limits.TLS_HALF_OPEN_MAX]Session = undefined;
    const options = session.Options{ .role = .server, .hello = stage.helloOf(1), .half_open = &half_open };
    for (&many) |*one| try testing.expect(one.init(.{}, options));
    var another: Session = undefined;
    try testing.expect(!another.init(.{}, options));
    many[3].deinit();
    try testing.expect(another.init(.{}, options));
    another.tick(limits.TLS_HALF_OPEN_MS); // it has failed, and counts no more
    another.deinit();

    try testing.expectEqual(limits.TLS_HALF_OPEN_MAX - 1, half_open.count);
}

test "bytes that are no TLS are called that" {
    for ([_][]const u8{ "GET / HTTP/1.1\r\n", "trimesh", "\x00" }) |bytes| {
        var ends = Ends{};
        var pair = try ends.init(.{});
        defer pair.deinit();
        try pair.up.appendSlice(testing.allocator, bytes);
        _ = try pair.turnServer("", 1000);
        try testing.expectEqual(status.ERR_TLS_PLAINTEXT, ends.server.status);
    }
}
