//! Two pumps back to back over streams that are slow, torn and full, driven by a seed. Each side's T0 is played by the
//! session; what arrives must be what was sent, in order, and neither side may ever wait for the other for good.

const std = @import("std");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const pump = @import("pump.zig");
const ring = @import("../rings/ring.zig");
const session = @import("../protocol/session.zig");
const sys = @import("../system/sys.zig");

const testing = std.testing;

/// One direction of a stream: a bounded buffer that moves as many bytes at a time as the seed says.
const Pipe = struct {
    bytes: [48_000]u8 = undefined,
    start: usize = 0,
    len: usize = 0,
    ended: bool = false,
    /// Most bytes that one call moves, and how often of 100 a call moves none.
    step_max: usize,
    refusals: u32,

    fn steps(self: *Pipe, random: std.Random, wanted: usize) usize {
        if (random.uintLessThan(u32, 100) < self.refusals) return 0;
        return @min(wanted, 1 + random.uintLessThan(usize, self.step_max));
    }

    fn write(self: *Pipe, random: std.Random, from: []const u8) i64 {
        const n = @min(self.steps(random, from.len), self.bytes.len - self.len);
        if (n == 0) return pump.WOULD_BLOCK;
        for (from[0..n]) |byte| {
            self.bytes[(self.start + self.len) % self.bytes.len] = byte;
            self.len += 1;
        }
        return @intCast(n);
    }

    fn read(self: *Pipe, random: std.Random, to: []u8) i64 {
        if (self.len == 0 and self.ended) return 0;
        const n = @min(self.steps(random, to.len), self.len);
        if (n == 0) return pump.WOULD_BLOCK;
        for (to[0..n]) |*byte| {
            byte.* = self.bytes[self.start];
            self.start = (self.start + 1) % self.bytes.len;
            self.len -= 1;
        }
        return @intCast(n);
    }
};

const Faulty = struct {
    in: *Pipe,
    out: *Pipe,
    random: std.Random,

    /// As a socket that does not block.
    pub fn read(self: Faulty, to: []u8) i64 {
        return self.in.read(self.random, to);
    }

    /// As a socket that does not block.
    pub fn write(self: Faulty, from: []const u8) i64 {
        return self.out.write(self.random, from);
    }
};

/// A side of a link: T1's pump and what T0 does with the other ends of the rings.
const Side = struct {
    pump: pump.Pump(Faulty),
    tx: ring.Producer,
    rx: ring.Consumer,
    outbound: session.Outbound,
    inbound: session.Inbound = .{},
    maps: [2]ring.Map,
    sent: u64 = 0,
    arrived: u64 = 0,
    bye_seen: bool = false,

    fn init(epoch: u64, io: Faulty) !Side {
        var maps: [2]ring.Map = undefined;
        for (&maps) |*map| {
            const fd = sys.memfd("pump-test", ring.Map.fileBytes(limits.RING_BYTES));
            defer sys.close(fd);
            map.* = ring.Map.init(fd, limits.RING_BYTES).?;
        }
        var self = Side{
            .pump = .init(io, epoch, maps[0], maps[1]),
            .rx = .{ .map = maps[0] },
            .tx = .{ .map = maps[1] },
            .outbound = .{ .epoch = epoch },
            .maps = maps,
        };
        const hello = frame.Hello{
            .slot = 0,
            .pid = 1,
            .ring_bytes = limits.RING_BYTES,
            .host = 0,
            .beat_ms = 1,
            .lease_ms = 9,
        };
        hello.encodeFrame(epoch, self.tx.place()[0..frame.Hello.FRAME_BYTES]);
        self.tx.commit(frame.Hello.FRAME_BYTES);
        return self;
    }

    fn deinit(self: *Side) void {
        for (&self.maps) |*map| map.deinit();
    }

    /// Send one message with a body of `size` bytes, each of which is its number, if it fits.
    fn trySend(self: *Side, size: u32) !bool {
        var body: [limits.FRAME_PAYLOAD_BYTES_MAX]u8 = undefined;
        const number: u8 = @truncate(self.sent);
        @memset(body[0..size], number);
        var spans = [_]session.Span{.{ .bytes = &body, .size = size }};
        const message = session.Message{
            .head = &.{number},
            .bodies = &spans,
            .total = size,
        };
        const length = message.firstLength();
        const span = ring.alignFrame(length);
        if (try self.tx.room(span, limits.RING_CONTROL_RESERVE_BYTES) < span) return false;
        _ = self.outbound.writeMessage(self.tx.place(), .data, message);
        self.tx.commit(span);
        self.sent += 1;
        return true;
    }

    fn sayBye(self: *Side) void {
        self.outbound.writeBye(self.tx.place());
        self.tx.commit(frame.BYTES);
    }

    /// T0 reads at most `max` frames and checks them.
    fn consume(self: *Side, max: u32) !void {
        for (0..max) |_| {
            const available = try self.rx.available();
            if (available == 0) break;
            const bytes = self.rx.place();
            const header = try frame.decode(bytes[0..frame.BYTES]);
            try testing.expect(header.span() <= available);
            switch (try self.inbound.receive(header, bytes)) {
                .message => {
                    const number: u8 = @truncate(self.arrived);
                    try testing.expectEqual(number, bytes[frame.BYTES]);
                    for (bytes[header.bodyOffset()..header.length]) |byte| try testing.expectEqual(number, byte);
                    self.arrived += 1;
                },
                .hello => {},
                .bye => self.bye_seen = true,
                .fragment, .dropped, .release, .retire => return error.TestUnexpectedResult,
            }
            self.rx.advance(header.span());
        }
        _ = self.rx.release();
    }

    /// What T1 does whenever it is woken.
    fn serve(self: *Side) !void {
        _ = try self.pump.receive();
        self.pump.tend();
        var freed = false;
        _ = try self.pump.transmit(&freed);
    }
};

const Rig = struct {
    prng: std.Random.DefaultPrng,
    pipes: [2]Pipe,
    sides: [2]Side,

    fn init(seed: u64, step_max: usize, refusals: u32) !*Rig {
        const self = try testing.allocator.create(Rig); // its sides point into it, so it stays where it is
        errdefer testing.allocator.destroy(self);
        self.prng = .init(seed);
        for (&self.pipes) |*pipe| pipe.* = .{ .step_max = step_max, .refusals = refusals };
        const random = self.prng.random();
        self.sides[0] = try .init(11, .{ .in = &self.pipes[0], .out = &self.pipes[1], .random = random });
        self.sides[1] = try .init(22, .{ .in = &self.pipes[1], .out = &self.pipes[0], .random = random });
        return self;
    }

    fn deinit(self: *Rig) void {
        for (&self.sides) |*side| side.deinit();
        testing.allocator.destroy(self);
    }
};

/// Send `count` messages each way while everything goes slowly, and see all of them arrive.
fn exchange(seed: u64, count: u64, step_max: usize, refusals: u32, size_max: u32) !void {
    const rig = try Rig.init(seed, step_max, refusals);
    defer rig.deinit();
    const random = rig.prng.random();
    var turns: u64 = 0;
    while (rig.sides[0].arrived < count or rig.sides[1].arrived < count) : (turns += 1) {
        try testing.expect(turns < 3_000_000); // stuck: each waits for the other
        const side = &rig.sides[random.uintLessThan(usize, 2)];
        switch (random.uintLessThan(u32, 10)) {
            0...2 => if (side.sent < count) {
                _ = try side.trySend(random.uintLessThan(u32, size_max));
            },
            3 => try side.consume(random.uintLessThan(u32, 8)),
            4 => if (random.uintLessThan(u32, 50) == 0) {
                _ = side.pump.tick();
            },
            else => try side.serve(),
        }
    }
    for (&rig.sides) |*side| try testing.expectEqual(count, side.arrived);
}

test "what is sent arrives, byte by byte" {
    try exchange(1, 30, 1, 10, 300);
}

test "what is sent arrives, in pieces of any size" {
    for (2..12) |seed| try exchange(seed, 300, 5000, 30, 20_000);
}

test "the largest frames pass both ways on what credit is left" {
    for (20..24) |seed| try exchange(seed, 60, 48_000, 5, limits.FRAME_PAYLOAD_BYTES_MAX - 100);
}

test "the socket can be read while T0 consumes nothing" {
    const rig = try Rig.init(31, 48_000, 0);
    defer rig.deinit();
    const a = &rig.sides[0];
    const b = &rig.sides[1];
    // A fills everything there is: its ring, the pipe and the window of B, whose T0 sleeps.
    for (0..2000) |_| {
        _ = try a.trySend(10_000);
        try a.serve();
        try b.serve();
    }
    try testing.expectEqual(0, b.arrived);
    try testing.expectEqual(0, rig.pipes[1].len); // nothing waits in the stream itself

    _ = a.pump.tick(); // there was traffic in this one
    _ = b.pump.tick();
    for (0..20) |_| { // beats still come through: each renews the lease
        _ = a.pump.tick();
        try a.serve();
        try b.serve();
        try testing.expectEqual(0, b.pump.tick());
    }

    const count = a.sent;
    for (0..2000) |_| {
        try b.consume(4);
        try b.serve();
        try a.serve();
    }
    try testing.expectEqual(count, b.arrived);
}

test "silence is counted in ticks and any byte ends it" {
    const rig = try Rig.init(32, 48_000, 0);
    defer rig.deinit();
    const a = &rig.sides[0];
    const b = &rig.sides[1];
    for (0..3) |_| {
        try a.serve();
        try b.serve();
    }
    _ = b.pump.tick();

    for (1..6) |ticks| try testing.expectEqual(@as(u32, @intCast(ticks)), b.pump.tick());

    _ = try a.trySend(10);
    try a.serve();
    try b.serve();
    try testing.expectEqual(0, b.pump.tick());
}

test "a goodbye leaves after everything else" {
    const rig = try Rig.init(33, 3000, 20);
    defer rig.deinit();
    const a = &rig.sides[0];
    const b = &rig.sides[1];
    for (0..5) |_| try testing.expect(try a.trySend(30_000));
    a.sayBye();

    for (0..5000) |_| {
        try a.serve();
        try b.serve();
        try b.consume(2);
    }

    try testing.expect(a.pump.bye_sent and b.bye_seen);
    try testing.expectEqual(5, b.arrived);
}

/// Feed raw bytes to a fresh side whose peer has said hello or not.
fn feed(bytes: []const u8, greeted: bool) !void {
    const rig = try Rig.init(34, 48_000, 0);
    defer rig.deinit();
    if (greeted) {
        for (0..3) |_| for (&rig.sides) |*side| try side.serve();
    }
    const random = rig.prng.random();
    _ = rig.pipes[0].write(random, bytes);
    rig.pipes[0].ended = true;
    for (0..100) |_| _ = try rig.sides[0].pump.receive();
    return error.TestUnexpectedResult; // a stream that has ended says so
}

fn encoded(header: frame.Header) [frame.BYTES]u8 {
    var bytes: [frame.BYTES]u8 = undefined;
    frame.encode(header, &bytes);
    return bytes;
}

test "foreign bytes, frames out of place and greedy peers are violations" {
    const letter = "GET / HTTP/1.1\r\nHost: example.org\r\n\r\n";
    try testing.expectError(error.Protocol, feed(letter, false));
    try testing.expectError(error.Protocol, feed(letter, true));
    try testing.expectError(error.Protocol, feed(&encoded(.{ .kind = .beat, .epoch = 22 }), false));
    const second_hello = frame.Hello{
        .slot = 0,
        .pid = 1,
        .ring_bytes = limits.RING_BYTES,
        .host = 0,
        .beat_ms = 1,
        .lease_ms = 9,
    };
    var bytes: [frame.Hello.FRAME_BYTES]u8 = undefined;
    second_hello.encodeFrame(22, &bytes);
    try testing.expectError(error.Protocol, feed(&bytes, true));
    // Credit for more than a whole window, and credit that is taken back.
    for ([_]u64{ std.math.maxInt(u64), 1 << 40, 0 }) |credit| {
        const greedy = encoded(.{ .kind = .credit, .epoch = 22, .sequence = credit });
        try testing.expectError(error.Protocol, feed(&greedy, true));
    }
}

test "a stream that ends in the middle of a frame is torn" {
    const whole = encoded(.{ .kind = .beat, .epoch = 22 });
    try testing.expectError(error.Ended, feed(whole[0..17], true));
    try testing.expectError(error.Ended, feed("", true));
}

test "a peer that sends more than it has credit for is refused" {
    const rig = try Rig.init(35, 48_000, 0);
    defer rig.deinit();
    const a = &rig.sides[0];
    const b = &rig.sides[1];
    for (0..3) |_| for (&rig.sides) |*side| try side.serve();
    a.pump.credit = 1 << 40; // a greedy build of the library

    const result = for (0..2000) |_| {
        _ = try a.trySend(10_000);
        try a.serve();
        b.serve() catch |problem| break problem;
    } else error.TestUnexpectedResult;

    try testing.expectEqual(error.Protocol, result);
    try testing.expectEqualStrings("more bytes than it had credit for", b.pump.problem);
}
