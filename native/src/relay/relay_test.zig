//! Two relays of one process, joined by socket pairs: bytes pass as they are.

const std = @import("std");
const limits = @import("../limits.zig");
const peers = @import("peer.zig");
const socket = @import("../system/socket.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const Relay = @import("relay.zig").Relay;

const testing = std.testing;

/// One end: a relay with one session, and the near end of its channel 0.
const End = struct {
    relay: *Relay,
    session: u32,
    control: i32,

    fn init(number: u64) !End {
        var made: ?*Relay = null;
        try testing.expectEqual(status.OK, Relay.create(&made));
        const pair = socket.socketPair();
        var session: u32 = 0;
        const rc = made.?.begin(.{
            .is_dialler = number != 0,
            .session = number,
            .lease_ticks = 50,
        }, pair[1], &session);
        try testing.expectEqual(status.OK, rc);
        return .{ .relay = made.?, .session = session, .control = pair[0] };
    }

    fn deinit(self: *End) void {
        self.relay.destroy();
        sys.close(self.control);
    }

    /// The next event of a kind.
    fn event(self: *End, kind: peers.EventKind) !Relay.Polled {
        for (0..5_000) |_| {
            while (self.relay.poll()) |one| if (one.event.kind == kind) return one;
            sys.sleepMs(1);
        }
        return error.NoEvent;
    }
};

fn connect(a: *End, b: *End) !void {
    const pair = socket.socketPair();
    try testing.expectEqual(status.OK, a.relay.attach(a.session, pair[0], null, "", ""));
    try testing.expectEqual(status.OK, b.relay.attach(b.session, pair[1], null, "", ""));
    _ = try a.event(.resumed);
    _ = try b.event(.resumed);
}

fn receiveAll(fd: i32, into: []u8) !void {
    var got: usize = 0;
    for (0..5_000) |_| {
        const n = socket.receive(fd, into[got..]);
        if (n > 0) got += @intCast(n) else sys.sleepMs(1);
        if (got == into.len) return;
    }
    return error.TooFew;
}

test "bytes cross by two relays, over a connection that is dropped, to the end of a channel" {
    var a = try End.init(7);
    defer a.deinit();
    var b = try End.init(0);
    defer b.deinit();
    try connect(&a, &b);
    const near = socket.socketPair();
    defer sys.close(near[0]);
    var channel: u32 = 0;
    try testing.expectEqual(status.OK, a.relay.openChannel(a.session, near[1], "what for", &channel));
    const opened = try b.event(.opened);
    try testing.expectEqual(1, opened.event.channel);
    try testing.expectEqualStrings("what for", opened.bytes);
    const far = socket.socketPair();
    defer sys.close(far[0]);
    try testing.expectEqual(status.OK, b.relay.answer(b.session, 1, far[1]));

    try testing.expectEqual(5, socket.send(near[0], "hello"));
    var bytes: [5]u8 = undefined;
    try receiveAll(far[0], &bytes);
    try testing.expectEqualStrings("hello", &bytes);
    try testing.expectEqual(status.OK, a.relay.end(a.session, .drop));
    try testing.expect((try b.event(.interrupted)).bytes.len > 0);
    try testing.expectEqual(5, socket.send(near[0], "again"));
    try connect(&a, &b);
    try receiveAll(far[0], &bytes);
    try testing.expectEqualStrings("again", &bytes);

    socket.shutdownWrite(near[0]);
    socket.shutdownWrite(far[0]);
    try testing.expectEqual(1, (try a.event(.ended)).event.channel);
    try testing.expectEqual(1, (try b.event(.ended)).event.channel);
    try testing.expectEqual(status.OK, a.relay.end(a.session, .close));
    try testing.expectEqual(3, (try a.event(.down)).event.number);
    try testing.expectEqual(2, (try b.event(.down)).event.number);
    try testing.expectEqual(status.OK, a.relay.end(a.session, .abort));
    try testing.expectEqual(status.ERR_LINK, a.relay.end(a.session, .abort));
}

test "foreign bytes end a session in words" {
    var a = try End.init(7);
    defer a.deinit();
    const pair = socket.socketPair();
    defer sys.close(pair[1]);
    try testing.expectEqual(status.OK, a.relay.attach(a.session, pair[0], null, "", ""));
    _ = socket.send(pair[1], "GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n");

    const down = try a.event(.down);
    try testing.expectEqual(4, down.event.number);
    try testing.expect(std.mem.startsWith(u8, down.bytes, "the peer sent "));
}

test "a relay that is destroyed closes what it was given, obeyed or not" {
    var a = try End.init(7);
    var kept: [20][2]i32 = undefined;
    for (&kept) |*pair| {
        pair.* = socket.socketPair();
        var channel: u32 = 0;
        try testing.expectEqual(status.OK, a.relay.openChannel(a.session, pair[1], "", &channel));
    }
    a.deinit();
    for (kept) |pair| {
        var byte: [1]u8 = undefined;
        try testing.expectEqual(0, socket.receive(pair[0], &byte));
        sys.close(pair[0]);
    }
}

comptime {
    std.debug.assert(limits.HOST_SESSIONS_MAX <= 1 << 16); // a session's number has its place in 16 bits
}
