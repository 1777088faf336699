//! Tests of sessions with OpenSSL, as far as certificates that are kept here reach; tests/native has the others.

const std = @import("std");
const limits = @import("../limits.zig");
const session = @import("session.zig");
const stage = @import("stage.zig");
const status = @import("../status.zig");
const tls = @import("tls.zig");
const Options = @import("credentials.zig").Options;

const Pair = stage.Pair(tls.Session);
const testing = std.testing;

/// Two sessions; skipped where there is no OpenSSL.
const Ends = struct {
    server: *tls.Tls,
    client: *tls.Tls,
    dialled: *tls.Held,
    dialling: *tls.Held,

    fn init(server: Options, client: Options, client_hello: @import("hello.zig").Hello) !Ends {
        if (tls.library().method == null) return error.SkipZigTest;
        var why: []const u8 = "";
        var its: ?*tls.Tls = null;
        var others: ?*tls.Tls = null;
        var dialled: ?*tls.Held = null;
        var dialling: ?*tls.Held = null;
        try testing.expectEqual(status.OK, tls.Tls.create(server, &its, &why));
        try testing.expectEqual(status.OK, tls.Tls.create(client, &others, &why));
        try testing.expectEqual(status.OK, its.?.open(.{ .role = .server, .hello = stage.helloOf(1) }, &dialled));
        const options = session.Options{ .role = .client, .hello = client_hello, .expected = 1 };
        try testing.expectEqual(status.OK, others.?.open(options, &dialling));
        return .{ .server = its.?, .client = others.?, .dialled = dialled.?, .dialling = dialling.? };
    }

    fn deinit(self: *Ends) void {
        testing.expectEqual(status.ERR_STATE, self.server.destroy()) catch unreachable;
        self.dialled.free();
        self.dialling.free();
        testing.expectEqual(status.OK, self.server.destroy()) catch unreachable;
        testing.expectEqual(status.OK, self.client.destroy()) catch unreachable;
    }

    fn pair(self: *Ends) Pair {
        return .{ .client = &self.dialling.session, .server = &self.dialled.session };
    }
};

test "two members meet, and bulk data passes in both directions" {
    for ([_]usize{ 100, 5_000, 1 << 17 }) |room| {
        var ends = try Ends.init(stage.SERVER_OPTIONS, stage.CLIENT_OPTIONS, stage.helloOf(2));
        defer ends.deinit();
        var pair = ends.pair();
        defer pair.deinit();
        try pair.settle(room);
        try testing.expectEqual(.asking, ends.dialled.session.state);
        try testing.expectEqualStrings(stage.CLIENT_NAME, ends.dialled.session.peer.name);
        _ = ends.dialled.session.answer(.admitted);
        try pair.settle(room);
        try testing.expectEqual(.open, ends.dialling.session.state);

        var bytes: [100_000]u8 = undefined;
        for (&bytes, 0..) |*byte, i| byte.* = @truncate(i *% 31);
        var sent: usize = 0;
        var back: usize = 0;
        while (pair.at_server.items.len < bytes.len or pair.at_client.items.len < bytes.len) {
            sent += try pair.turnClient(bytes[sent..], 1 << 17);
            back += try pair.turnServer(bytes[back..], 1 << 17);
        }
        try testing.expectEqualSlices(u8, &bytes, pair.at_server.items);
        try testing.expectEqualSlices(u8, &bytes, pair.at_client.items);
        _ = ends.dialled.session.close();
        try pair.settle(room);
        try testing.expectEqual(.closed, ends.dialling.session.state);
        try testing.expectEqual(.closed, ends.dialled.session.state);
    }
}

test "a join knows the pin, and both ends the same exporter" {
    var hello = stage.helloOf(2);
    hello.kind = 2;
    var ends = try Ends.init(stage.SERVER_OPTIONS, stage.joining(), hello);
    defer ends.deinit();
    var pair = ends.pair();
    defer pair.deinit();
    try pair.settle(1 << 17);
    try testing.expectEqual(.proof, ends.dialling.session.state);
    var here: [32]u8 = @splat(1);
    var there: [32]u8 = @splat(2);
    try testing.expect(ends.dialling.session.engine.exporter(&here));
    try testing.expect(ends.dialled.session.engine.exporter(&there));
    try testing.expectEqual(here, there);
    _ = ends.dialling.session.prove(&@splat(3), &here);
    try pair.settle(1 << 17);
    _ = ends.dialled.session.answer(.admitted);
    try pair.settle(1 << 17);

    try testing.expectEqual(.open, ends.dialling.session.state);
}

test "a wrong pin ends it before anything is said" {
    var options = stage.joining();
    options.pin[0] ^= 1;
    var hello = stage.helloOf(2);
    hello.kind = 2;
    var ends = try Ends.init(stage.SERVER_OPTIONS, options, hello);
    defer ends.deinit();
    var pair = ends.pair();
    defer pair.deinit();
    try pair.settle(1 << 17);

    try testing.expectEqual(status.ERR_TLS_CERTIFICATE, ends.dialling.session.status);
    try testing.expectEqual(status.ERR_TLS_REFUSED, ends.dialled.session.status);
}

test "a record that was changed on the way ends it" {
    var ends = try Ends.init(stage.SERVER_OPTIONS, stage.CLIENT_OPTIONS, stage.helloOf(2));
    defer ends.deinit();
    var pair = ends.pair();
    defer pair.deinit();
    try pair.settle(1 << 17);
    _ = ends.dialled.session.answer(.admitted);
    try pair.settle(1 << 17);
    _ = try pair.turnClient("some bytes", 1 << 17);
    pair.up.items[pair.up.items.len - 1] ^= 1;
    try pair.settle(1 << 17);

    try testing.expectEqual(status.ERR_TLS, ends.dialled.session.status);
    try testing.expectEqual(0, pair.at_server.items.len);
}

test "what is no certificate makes no credentials, in words" {
    if (tls.library().method == null) return error.SkipZigTest;
    const wrong = [_]Options{
        .{ .authority = "no certificate" },
        .{ .authority = stage.CLIENT_OPTIONS.authority, .chain = "none", .key = stage.CLIENT_OPTIONS.key },
        .{ .authority = stage.CLIENT_OPTIONS.authority, .chain = stage.CLIENT_OPTIONS.chain, .key = "none" },
        .{
            .authority = stage.CLIENT_OPTIONS.authority,
            .chain = stage.CLIENT_OPTIONS.chain,
            .key = stage.SERVER_OPTIONS.key,
        },
    };
    for (wrong) |options| {
        var why: []const u8 = "";
        var made: ?*tls.Tls = null;
        try testing.expectEqual(status.ERR_ARGUMENT, tls.Tls.create(options, &made, &why));
        try testing.expect(why.len > 0);
    }
}

test "the limit of half-open sessions is of the sessions that were dialled" {
    var ends = try Ends.init(stage.SERVER_OPTIONS, stage.CLIENT_OPTIONS, stage.helloOf(2));
    defer ends.deinit();
    var held: [limits.TLS_HALF_OPEN_MAX]?*tls.Held = @splat(null);
    defer for (held) |one| if (one) |some| some.free();
    const options = session.Options{ .role = .server, .hello = stage.helloOf(1) };
    for (held[1..]) |*one| try testing.expectEqual(status.OK, ends.server.open(options, one));
    try testing.expectEqual(status.ERR_LIMIT, ends.server.open(options, &held[0]));
}
