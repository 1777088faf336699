//! One session without TLS, where its owner has insisted on that: what `session.zig` asks of an engine. PURE.
//!
//!      0  u64 magic "tmplain1"
//!      8  32 random bytes of the sender
//!
//! Each side sends that at once; then bytes are as they are.
//!
//! NT-1 Both random parts make the exporter, so a proof of a token that was listened to is worth nothing on another
//! connection. NT-2 Nothing else is kept from whoever is in the network: they read all, and who sits in between changes
//! it. NT-3 Nothing tells the end of a session but that of its connection.

const std = @import("std");
const limits = @import("../limits.zig");
const session = @import("session.zig");
const status = @import("../status.zig");
const Wire = @import("wire.zig").Wire;

const Outcome = session.Outcome;
const Sha256 = std.crypto.hash.sha2.Sha256;

/// "tmplain1", as it is sent.
const MAGIC = "tmplain1";
pub const RANDOM_BYTES = 32;
const BYTES = MAGIC.len + RANDOM_BYTES;
const LABEL = "trimesh plain 1";

pub const Plain = struct {
    role: session.Role,
    said: [BYTES]u8,
    heard: [BYTES]u8 = undefined,
    said_bytes: usize = 0,
    heard_bytes: usize = 0,

    /// Begin a session with random bytes of this side.
    pub fn init(role: session.Role, random: *const [RANDOM_BYTES]u8) Plain {
        return .{ .role = role, .said = MAGIC.* ++ random.* };
    }

    /// There are no keys.
    pub fn deinit(_: *Plain) void {}

    /// Send and read what comes first.
    pub fn handshake(self: *Plain, wire: *Wire) Outcome {
        self.said_bytes += wire.push(self.said[self.said_bytes..]);
        if (self.said_bytes < BYTES) return .full;
        self.heard_bytes += wire.pull(self.heard[self.heard_bytes..]);
        const head = @min(self.heard_bytes, MAGIC.len);
        if (!std.mem.eql(u8, self.heard[0..head], MAGIC[0..head])) {
            return .{ .failed = .{ .status = status.ERR_PEER, .words = "what came is no plain session of trimesh" } };
        }
        return if (self.heard_bytes == BYTES) .{ .moved = 0 } else .starved;
    }

    /// As it comes.
    pub fn read(_: *Plain, wire: *Wire, into: []u8) Outcome {
        const n = wire.pull(into);
        return if (n == 0) .starved else .{ .moved = n };
    }

    /// As it is.
    pub fn write(_: *Plain, wire: *Wire, from: []const u8) Outcome {
        const n = wire.push(from);
        return if (n == 0) .full else .{ .moved = n };
    }

    /// NT-3.
    pub fn shut(_: *Plain, _: *Wire) void {}

    /// There are no certificates: whoever comes is as good as certified, by no name.
    pub fn peer(_: *Plain) session.Peer {
        return .{ .is_certified = true };
    }

    /// What both sides of this connection have said, of those who were there (NT-1).
    pub fn exporter(self: *Plain, into: *[RANDOM_BYTES]u8) bool {
        if (self.heard_bytes < BYTES) return false;
        const own, const others = .{ self.said[MAGIC.len..], self.heard[MAGIC.len..] };
        var hash = Sha256.init(.{});
        hash.update(LABEL);
        hash.update(if (self.role == .client) own else others);
        hash.update(if (self.role == .client) others else own);
        hash.final(into);
        return true;
    }
};

const stage = @import("stage.zig");
const Session = session.Session(Plain);
const testing = std.testing;

const Ends = struct {
    client: Session = undefined,
    server: Session = undefined,

    fn init(self: *Ends, is_join: bool) !stage.Pair(Session) {
        var hello = stage.helloOf(2);
        if (is_join) hello.kind = 2;
        const both = session.Options{ .role = .client, .hello = hello, .has_names = false, .is_plain = true };
        try testing.expect(self.client.init(Plain.init(.client, &@splat(1)), both));
        var dialled = both;
        dialled.role = .server;
        dialled.hello = stage.helloOf(1);
        try testing.expect(self.server.init(Plain.init(.server, &@splat(2)), dialled));
        return .{ .client = &self.client, .server = &self.server };
    }
};

test "a host joins and bytes pass as they are, whatever the pieces that they come in" {
    for ([_]usize{ 1, 7, 1 << 17 }) |room| {
        var ends = Ends{};
        var pair = try ends.init(true);
        defer pair.deinit();
        try pair.settle(room);
        try testing.expectEqual(.proof, ends.client.state);
        var own: [RANDOM_BYTES]u8 = undefined;
        var others: [RANDOM_BYTES]u8 = undefined;
        try testing.expect(ends.client.engine.exporter(&own) and ends.server.engine.exporter(&others));
        try testing.expectEqual(own, others);

        _ = ends.client.prove(&@splat(4), &@splat(5));
        try pair.settle(room);
        try testing.expectEqual(@as([32]u8, @splat(5)), ends.server.peer_hello.proof);
        try testing.expectEqual(status.OK, ends.server.answer(.admitted));
        try pair.settle(room);
        try testing.expectEqual(.open, ends.client.state);
        if (room < 100) continue; // a scrap of room takes nothing
        try testing.expectEqual(5, try pair.turnClient("hello", room));
        _ = try pair.turnServer("", room);
        try testing.expectEqualStrings("hello", pair.at_server.items);
    }
}

test "another connection has another exporter" {
    var one = Plain.init(.client, &@splat(1));
    var other = Plain.init(.client, &@splat(1));
    for ([_]*Plain{ &one, &other }, 2..) |its, random| {
        its.heard_bytes = BYTES;
        its.heard = MAGIC.* ++ @as([RANDOM_BYTES]u8, @splat(@intCast(random)));
    }
    var first: [RANDOM_BYTES]u8 = undefined;
    var second: [RANDOM_BYTES]u8 = undefined;
    try testing.expect(one.exporter(&first) and other.exporter(&second));
    try testing.expect(!std.mem.eql(u8, &first, &second));
}

test "a refusal is said" {
    var ends = Ends{};
    var pair = try ends.init(false);
    defer pair.deinit();
    try pair.settle(100);
    _ = ends.server.answer(.token);
    try pair.settle(100);
    try testing.expectEqual(status.ERR_TLS_REFUSED, ends.client.status);
}

test "TLS and foreign bytes are told apart" {
    for ([_]struct { []const u8, i32 }{
        .{ "\x16\x03\x01\x02\x00", status.ERR_TLS_PLAINTEXT },
        .{ "GET / HTTP/1.1\r\n", status.ERR_PEER },
        .{ "tmplain2", status.ERR_PEER },
    }) |case| {
        var ends = Ends{};
        var pair = try ends.init(false);
        defer pair.deinit();
        var out: [100]u8 = undefined;
        var io = session.Io{ .wire_in = case[0].ptr, .wire_in_size = case[0].len, .wire_out = &out };
        io.wire_out_size = out.len;
        ends.server.step(&io);
        try testing.expectEqual(case[1], ends.server.status);
    }
}
