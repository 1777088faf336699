//! Fuzz targets: whatever a peer sends, decoders answer with an error or with something whose every offset lies
//! inside what was sent. `zig build fuzz` runs each once, `zig build fuzz --fuzz=100K` for so many inputs.
//!
//! Frames are made from the fuzzer's numbers and given a right check, because random bytes never get past it.

const std = @import("std");
const fuzz_input = @import("fuzz_input.zig");
const body = @import("protocol/body.zig");
const frame = @import("protocol/frame.zig");
const limits = @import("limits.zig");
const pump = @import("links/pump.zig");
const ring = @import("rings/ring.zig");
const segment = @import("rings/segment.zig");
const session = @import("protocol/session.zig");
const shelf = @import("rings/shelf.zig");
const socket = @import("system/socket.zig");
const sys = @import("system/sys.zig");

const Smith = fuzz_input.Smith;
const testing = std.testing;

const EPOCH = 7;

/// The fuzzer keeps what one input asked for in a buffer of bounded size.
const TURNS_MAX = 64;

/// Put a header with a right check and otherwise any content at the start of `to`.
fn forge(smith: *Smith, to: *[frame.BYTES]u8) void {
    frame.encode(.{
        .kind = @enumFromInt(smith.valueRangeAtMost(u8, 1, 8)),
        .lane = @enumFromInt(smith.valueRangeAtMost(u8, 0, 1)),
        .more = smith.value(bool),
        .chunk = smith.boolWeighted(3, 1),
        .length = switch (smith.valueRangeAtMost(u8, 0, 4)) {
            0 => 32,
            3 => frame.Hello.FRAME_BYTES,
            1 => smith.valueRangeAtMost(u32, 32, 200),
            2 => smith.valueRangeAtMost(u32, 0, limits.FRAME_BYTES_MAX + 10),
            else => smith.value(u32),
        },
        .epoch = if (smith.boolWeighted(1, 7)) EPOCH else smith.value(u64),
        .sequence = if (smith.boolWeighted(1, 3)) smith.valueRangeAtMost(u64, 0, 3) else smith.value(u64),
        .head_size = if (smith.value(bool)) smith.valueRangeAtMost(u16, 0, 40) else smith.value(u16),
        .n_bodies = if (smith.value(bool)) smith.valueRangeAtMost(u16, 0, 4) else smith.value(u16),
    }, to);
}

/// What must hold of every header that `decode` accepts.
fn checkHeader(header: frame.Header) !void {
    try testing.expect(header.length >= frame.BYTES and header.length <= limits.FRAME_BYTES_MAX);
    try testing.expect(header.span() >= header.length and header.span() - header.length < 8);
    try testing.expect(header.bodyOffset() <= header.length);
    try testing.expect(frame.BYTES + @as(u32, header.head_size) <= header.length);
    try testing.expect(header.lane == .data or header.n_bodies == 0);
}

fn fuzzHeader(_: void, smith: *Smith) !void {
    var bytes: [frame.BYTES]u8 = undefined;
    if (smith.value(bool)) smith.bytes(&bytes) else forge(smith, &bytes);
    const header = frame.decode(&bytes) catch return;
    try checkHeader(header);
    var again: [frame.BYTES]u8 = undefined;
    frame.encode(header, &again);
    try testing.expectEqualSlices(u8, &bytes, &again);
}

test "fuzz: headers" {
    try fuzz_input.feed(fuzzHeader);
}

fn greet(inbound: *session.Inbound) !void {
    var bytes: [frame.Hello.FRAME_BYTES]u8 = undefined;
    hello().encodeFrame(EPOCH, &bytes);
    _ = try inbound.receive(try frame.decode(bytes[0..frame.BYTES]), &bytes);
}

fn hello() frame.Hello {
    return .{ .slot = 1, .pid = 1, .ring_bytes = limits.RING_BYTES, .host = 0, .beat_ms = 1, .lease_ms = 9 };
}

fn forgeHello(smith: *Smith) frame.Hello {
    var one = hello();
    if (smith.boolWeighted(3, 1)) one.abi = smith.value(u32);
    if (smith.boolWeighted(3, 1)) one.slot = smith.value(u32);
    const sizes = [_]u32{ 0, 1, limits.RING_BYTES, limits.RING_BYTES + 8, limits.RING_BYTES_MAX, smith.value(u32) };
    one.ring_bytes = sizes[smith.index(sizes.len)];
    return one;
}

fn fuzzSession(_: void, smith: *Smith) !void {
    var bytes: [limits.FRAME_BYTES_MAX]u8 align(8) = undefined;
    var inbound = session.Inbound{ .segments = smith.value(bool) };
    if (smith.boolWeighted(1, 7)) {
        try greet(&inbound);
    } else {
        forgeHello(smith).encodeFrame(EPOCH, bytes[0..frame.Hello.FRAME_BYTES]);
        _ = inbound.receive(try frame.decode(bytes[0..frame.BYTES]), &bytes) catch return;
    }
    var open: u64 = 0; // body bytes that were announced and have not come
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        forge(smith, bytes[0..frame.BYTES]);
        for (0..4) |i| { // head, table and the beginning of bodies
            const word = switch (smith.valueRangeAtMost(u8, 0, 2)) {
                0 => smith.valueRangeAtMost(u64, 0, 200),
                1 => (body.Entry{ .size = 65_537, .segment = .{ .place = 1, .generation = 1 } }).encode(),
                else => smith.value(u64),
            };
            std.mem.writeInt(u64, bytes[frame.BYTES + 8 * i ..][0..8], word, .little);
        }
        const header = frame.decode(bytes[0..frame.BYTES]) catch return;
        const event = inbound.receive(header, &bytes) catch {
            try testing.expect(inbound.problem.len > 0);
            try testing.expectEqual(.ended, inbound.state);
            return;
        };
        try testing.expect(inbound.missing <= limits.MESSAGE_BYTES_MAX);
        switch (event) {
            .message => |one| {
                try testing.expectEqual(EPOCH, one.epoch);
                try testing.expectEqual(one.more, one.n_bodies > 0 and inbound.missing > 0);
                if (one.n_bodies > 0) open = inbound.missing;
            },
            .fragment => |one| {
                const here = one.length - frame.BYTES;
                try testing.expectEqual(open - here, inbound.missing);
                try testing.expectEqual(one.more, inbound.missing > 0);
                open -= here;
            },
            .dropped => try testing.expect(
                header.epoch != EPOCH or header.sequence < inbound.next[@intFromEnum(header.lane)],
            ),
            .release, .retire => |one| {
                try testing.expect(inbound.segments);
                try testing.expectEqual(0, (one.length - frame.BYTES) % 4);
            },
            .hello, .bye => {},
        }
    }
}

test "fuzz: session" {
    try fuzz_input.feed(fuzzSession);
}

/// A stream that gives out what the fuzzer wants, in pieces of its choice.
const Source = struct {
    smith: *Smith,
    /// Frame bytes that are still to come of what was forged.
    held: *std.ArrayListUnmanaged(u8),

    /// As a socket that does not block.
    pub fn read(self: Source, to: []u8) i64 {
        if (self.held.items.len == 0) {
            if (self.smith.eos()) return 0;
            self.refill() catch return -12;
        }
        const n = @min(to.len, self.held.items.len, self.smith.valueRangeAtMost(u32, 0, 100_000));
        if (n == 0) return pump.WOULD_BLOCK;
        @memcpy(to[0..n], self.held.items[0..n]);
        self.held.replaceRangeAssumeCapacity(0, n, &.{});
        return @intCast(n);
    }

    fn refill(self: Source) !void {
        var bytes: [limits.FRAME_BYTES_MAX]u8 align(8) = @splat(0);
        switch (self.smith.valueRangeAtMost(u8, 0, 9)) {
            0 => hello().encodeFrame(EPOCH, bytes[0..frame.Hello.FRAME_BYTES]),
            2 => forgeHello(self.smith).encodeFrame(EPOCH, bytes[0..frame.Hello.FRAME_BYTES]),
            1 => self.smith.bytes(bytes[0..64]),
            else => forge(self.smith, bytes[0..frame.BYTES]),
        }
        const header = frame.decode(bytes[0..frame.BYTES]) catch
            return self.held.appendSlice(testing.allocator, bytes[0..64]);
        try self.held.appendSlice(testing.allocator, bytes[0..header.span()]);
    }

    /// Takes any number of bytes.
    pub fn write(self: Source, from: []const u8) i64 {
        const n = @min(from.len, self.smith.valueRangeAtMost(u32, 0, 100_000));
        return if (n == 0) pump.WOULD_BLOCK else @intCast(n);
    }
};

fn newRing() ring.Map {
    const fd = sys.memfd("fuzz", ring.Map.fileBytes(limits.RING_BYTES));
    defer sys.close(fd);
    return ring.Map.init(fd, limits.RING_BYTES).?;
}

fn fuzzPump(_: void, smith: *Smith) !void {
    var inbound = newRing();
    defer inbound.deinit();
    var outbound = newRing();
    defer outbound.deinit();
    var held: std.ArrayListUnmanaged(u8) = .empty;
    defer held.deinit(testing.allocator);
    var one = pump.Pump(Source).init(.{ .smith = smith, .held = &held }, 9, inbound, outbound);
    var tx = ring.Producer{ .map = outbound };
    hello().encodeFrame(9, tx.place()[0..frame.Hello.FRAME_BYTES]);
    tx.commit(frame.Hello.FRAME_BYTES);
    var rx = ring.Consumer{ .map = inbound };
    for (0..TURNS_MAX) |_| {
        _ = one.receive() catch |problem| {
            if (problem == error.Protocol) try testing.expect(one.problem.len > 0);
            break;
        };
        one.tend();
        var freed = false;
        _ = one.transmit(&freed) catch unreachable; // this stream never breaks, and our own frames are right
        if (smith.value(bool)) _ = one.tick();
        try testing.expect(one.received <= one.granted);
        if (smith.value(bool)) try consume(&rx);
    }
    try consume(&rx);
}

/// What T0 sees is whole frames, whatever the stream was.
fn consume(rx: *ring.Consumer) !void {
    while (try rx.available() > 0) {
        const header = try frame.decode(rx.place()[0..frame.BYTES]);
        try checkHeader(header);
        try testing.expect(header.span() <= try rx.available());
        try testing.expect(header.kind != .beat and header.kind != .credit);
        rx.advance(header.span());
    }
    _ = rx.release();
}

test "fuzz: pump" {
    try fuzz_input.feed(fuzzPump);
}

fn someRef(smith: *Smith) u32 {
    if (smith.boolWeighted(7, 1)) return smith.value(u32);
    const ref = body.Ref{ .place = smith.valueRangeAtMost(u8, 0, 3), .generation = smith.valueRangeAtMost(u8, 1, 3) };
    return ref.word();
}

/// Whatever a peer passes, names, and gives up, nothing is lent twice, and what is lent can be read and written whole.
fn fuzzShelf(_: void, smith: *Smith) !void {
    const sizes = [_]u64{ limits.SEGMENT_BYTES_MIN, 2 * limits.SEGMENT_BYTES_MIN };
    const fds = [_]i32{ sys.memfd("fuzz", sizes[0]), sys.memfd("fuzz", sizes[1]), sys.eventfd() };
    defer for (fds) |fd| sys.close(fd);
    const pair = socket.socketPair();
    defer for (pair) |fd| sys.close(fd);
    var spare: i32 = -1;
    var one = shelf.Shelf{};
    defer one.deinit();
    var lent: [limits.SEGMENTS_MAX]?[*]align(4096) u8 = @splat(null);
    defer for (lent, 0..) |pages, place| if (pages != null) {
        _ = one.giveBack(one.places[place].ref, @intFromPtr(pages.?));
    };
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        switch (smith.valueRangeAtMost(u8, 0, 4)) {
            0, 1 => {
                const said = segment.Announcement{
                    .ref = someRef(smith),
                    .bytes = if (smith.boolWeighted(1, 7)) sizes[smith.index(2)] else smith.value(u64),
                };
                _ = socket.sendDescriptor(pair[0], std.mem.asBytes(&said), fds[smith.index(fds.len)]);
            },
            2 => {
                const word = 1 << 63 | @as(u64, someRef(smith)) << 40 | smith.valueRangeAtMost(u64, 0, 300_000);
                const body_lent = one.take(pair[1], word, &spare) catch {
                    try testing.expect(one.problem.len > 0);
                    continue;
                };
                const entry = body.Entry.decode(word).?;
                const ref = entry.segment.?;
                try testing.expect(lent[ref.place] == null and entry.size <= body_lent.bytes);
                lent[ref.place] = body_lent.pages;
                for ([_]u64{ 0, entry.size - 1, body_lent.bytes - 1 }) |at| body_lent.pages[@intCast(at)] +%= 1;
            },
            3 => {
                const ref = body.Ref.parse(someRef(smith)) orelse continue;
                const held = lent[ref.place] != null and one.places[ref.place].ref.generation == ref.generation;
                try testing.expectEqual(!held, one.retire(ref));
            },
            else => {
                const place = smith.valueRangeAtMost(u8, 0, 3);
                const pages = lent[place] orelse continue;
                try testing.expect(one.giveBack(one.places[place].ref, @intFromPtr(pages)));
                lent[place] = null;
                var refs: [limits.SEGMENTS_MAX]body.Ref = undefined;
                if (smith.value(bool)) _ = one.takeReturned(&refs);
            },
        }
    }
}

test "fuzz: shelf" {
    try fuzz_input.feed(fuzzShelf);
}

test {
    _ = @import("mover/fuzz_ledger.zig");
    _ = @import("tcp/fuzz_tcp.zig");
    _ = @import("tls/fuzz_tls.zig");
    _ = @import("relay/fuzz_relay.zig");
}
