//! Both sides of a connection back to back over streams that are slow, torn and full, driven by a seed; and either side
//! against a peer whose bytes are damaged. What memory there is on both sides is plain arrays, so that a byte that
//! moves where it must not is seen.

const std = @import("std");
const asking = @import("asking.zig");
const limits = @import("../limits.zig");
const serving = @import("serving.zig");
const status = @import("../status.zig");
const wire = @import("wire.zig");

const testing = std.testing;

const EPOCH = 0xABCD;
const SECRET: wire.Secret = "0123456789abcdef".*;
const WRONG: wire.Secret = "0123456789abcdeF".*;
const RANGE_BYTES = 4096;

/// One direction of a stream: a bounded buffer that moves as many bytes at a time as the seed says.
const Pipe = struct {
    bytes: [3000]u8 = undefined,
    start: usize = 0,
    len: usize = 0,
    random: std.Random,
    step_max: usize,
    /// Of 10,000 bytes, how many are damaged.
    damage: u32 = 0,

    fn write(self: *Pipe, from: []const u8) usize {
        const n = @min(from.len, self.bytes.len - self.len, self.random.uintLessThan(usize, self.step_max + 1));
        for (from[0..n]) |byte| {
            const flip: u8 = if (self.random.uintLessThan(u32, 10_000) < self.damage) self.random.int(u8) else 0;
            self.bytes[(self.start + self.len) % self.bytes.len] = byte ^ flip;
            self.len += 1;
        }
        return n;
    }

    fn read(self: *Pipe, to: []u8) usize {
        const n = @min(to.len, self.len, self.random.uintLessThan(usize, self.step_max + 1));
        for (to[0..n]) |*byte| {
            byte.* = self.bytes[self.start];
            self.start = (self.start + 1) % self.bytes.len;
            self.len -= 1;
        }
        return n;
    }
};

/// The owner: one grant, of which it knows whether it was revoked.
const Owner = struct {
    machine: serving.Serving = .init(EPOCH, @splat(3)),
    memory: [RANGE_BYTES]u8 = undefined,
    revoked: bool = false,
    in: *Pipe,
    out: *Pipe,
    /// Bytes of the memory that were touched after it was revoked.
    trespasses: u64 = 0,
    verdicts: u64 = 0,

    /// False: the connection has ended.
    fn step(self: *Owner) bool {
        var scrap: [512]u8 = @splat(0);
        switch (self.machine.want()) {
            .receive => |into| self.machine.received(self.in.read(into)),
            .send => |head| self.machine.sent(self.out.write(head.bytes)),
            .body_in => |span| self.machine.received(self.in.read(self.reach(span))),
            .body_out => |span| self.machine.sent(self.out.write(self.reach(span))),
            .discard => |size| self.machine.received(self.in.read(scrap[0..@min(size, scrap.len)])),
            .padding => |size| self.machine.sent(self.out.write(scrap[0..@min(size, scrap.len)])),
            .verdict => self.judge(),
            .end => return false,
        }
        return true;
    }

    fn reach(self: *Owner, span: serving.Span) []u8 {
        if (self.revoked) self.trespasses += 1;
        return self.memory[@intCast(span.offset)..][0..@intCast(span.size)];
    }

    fn judge(self: *Owner) void {
        const request = self.machine.request;
        self.verdicts += 1;
        if (!self.machine.isAuthentic(&SECRET)) return self.machine.conclude(status.ERR_DENIED, 0);
        if (self.revoked) return self.machine.conclude(status.ERR_REVOKED, 0);
        if (request.offset > RANGE_BYTES or request.size > RANGE_BYTES - request.offset)
            return self.machine.conclude(status.ERR_DENIED, 0);
        switch (request.kind) {
            .read, .write => self.machine.admit(),
            .add, .swap => {
                const word = self.memory[@intCast(request.offset)..][0..8];
                const old = std.mem.readInt(u64, word, .little);
                if (request.kind == .add) std.mem.writeInt(u64, word, old +% request.operand, .little);
                self.machine.conclude(status.OK, old);
            },
        }
    }

    fn revoke(self: *Owner) void {
        self.revoked = true;
        self.machine.spoil(status.ERR_REVOKED);
    }
};

const Reader = struct {
    machine: asking.Asking = .init(EPOCH),
    memory: [RANGE_BYTES]u8 = undefined,
    in: *Pipe,
    out: *Pipe,
    ended: u64 = 0,
    statuses: [64]i32 = undefined,
    values: [64]u64 = undefined,
    stranger: bool = false,

    fn step(self: *Reader) wire.Error!void {
        switch (self.machine.toSend()) {
            .nothing => {},
            .head => |head| self.machine.sent(self.out.write(head.bytes)),
            .body => |span| self.machine.sent(self.out.write(self.reach(span))),
        }
        const event = switch (self.machine.toReceive()) {
            .head => |into| try self.machine.received(self.in.read(into)),
            .body => |span| try self.machine.received(self.in.read(self.reach(span))),
        };
        switch (event) {
            .none, .greeted => {},
            .stranger => self.stranger = true,
            .ended => |one| {
                self.statuses[self.ended % 64] = one.status;
                self.values[self.ended % 64] = one.value;
                self.ended += 1;
            },
        }
    }

    fn reach(self: *Reader, span: asking.Span) []u8 {
        std.debug.assert(span.about == 7);
        return self.memory[@intCast(span.local)..][0..@intCast(span.size)];
    }

    fn ask(self: *Reader, kind: wire.Kind, offset: u64, size: u64, secret: *const wire.Secret) void {
        self.machine.ask(.{
            .kind = kind,
            .place = 1,
            .generation = 1,
            .counter = 0,
            .offset = offset,
            .size = size,
            .operand = 5,
        }, secret, 7, offset % (RANGE_BYTES + 1 - @min(size, RANGE_BYTES)));
    }
};

const Pair = struct {
    prng: std.Random.DefaultPrng,
    to_owner: Pipe,
    to_reader: Pipe,
    owner: Owner,
    reader: Reader,

    fn init(self: *Pair, seed: u64, step_max: usize) void {
        self.prng = .init(seed);
        const random = self.prng.random();
        self.to_owner = .{ .random = random, .step_max = step_max };
        self.to_reader = .{ .random = random, .step_max = step_max };
        self.owner = .{ .in = &self.to_owner, .out = &self.to_reader };
        self.reader = .{ .in = &self.to_reader, .out = &self.to_owner };
        random.bytes(&self.owner.memory);
        random.bytes(&self.reader.memory);
    }

    /// Both take their turns until so many requests have ended.
    fn run(self: *Pair, ended: u64) !void {
        for (0..200_000) |_| {
            if (self.reader.ended >= ended) return;
            try testing.expect(self.owner.step());
            try self.reader.step();
        }
        return error.Stuck;
    }

    fn greet(self: *Pair) !void {
        for (0..2_000) |_| {
            if (self.reader.machine.greeted) return;
            try testing.expect(self.owner.step());
            try self.reader.step();
        }
        return error.Stuck;
    }
};

test "requests of every kind, torn anywhere" {
    for ([_]usize{ 1, 2, 31, 700, 5_000 }) |step_max| {
        var pair: Pair = undefined;
        pair.init(step_max, step_max);
        try pair.greet();
        const before = pair.owner.memory;

        pair.reader.ask(.read, 100, 1000, &SECRET);
        pair.reader.ask(.write, 2000, 333, &SECRET);
        pair.reader.ask(.add, 8, 8, &SECRET);
        pair.reader.ask(.read, 50, 0, &SECRET);
        try pair.run(4);
        pair.reader.ask(.write, 60, 0, &SECRET);
        pair.reader.ask(.add, 8, 8, &SECRET);
        try pair.run(6);

        try testing.expectEqualSlices(i32, &@as([6]i32, @splat(status.OK)), pair.reader.statuses[0..6]);
        const old = std.mem.readInt(u64, before[8..16], .little);
        try testing.expectEqual(old, pair.reader.values[2]);
        try testing.expectEqual(old +% 5, pair.reader.values[5]);
        try testing.expectEqualSlices(u8, before[100..1100], pair.reader.memory[100..1100]);
        try testing.expectEqualSlices(u8, pair.reader.memory[2000..2333], pair.owner.memory[2000..2333]);
        try testing.expectEqualSlices(u8, before[2333..], pair.owner.memory[2333..]);
        try testing.expectEqualSlices(u8, before[16..2000], pair.owner.memory[16..2000]);
        try testing.expect(pair.reader.machine.isIdle() and pair.owner.machine.isIdle());
    }
}

test "what is refused leaves the connection whole and the memory as it was" {
    var pair: Pair = undefined;
    pair.init(1, 500);
    try pair.greet();
    const before = pair.owner.memory;

    pair.reader.ask(.write, 0, 900, &WRONG);
    pair.reader.ask(.read, 0, 900, &WRONG);
    pair.reader.ask(.read, RANGE_BYTES - 8, 9, &SECRET);
    pair.reader.ask(.write, std.math.maxInt(u64), 200, &SECRET);
    try pair.run(4);
    pair.reader.ask(.add, 0, 8, &WRONG);
    pair.reader.ask(.read, RANGE_BYTES - 8, 8, &SECRET);
    try pair.run(6);

    try testing.expectEqualSlices(i32, &@as([5]i32, @splat(status.ERR_DENIED)), pair.reader.statuses[0..5]);
    try testing.expectEqual(status.OK, pair.reader.statuses[5]);
    try testing.expectEqualSlices(u8, &before, &pair.owner.memory);
}

test "a revocation at any moment ends what runs, and no byte moves after it" {
    for ([_]wire.Kind{ .read, .write }) |kind| {
        var seen = [2]u32{ 0, 0 };
        for (0..400) |moment| {
            var pair: Pair = undefined;
            pair.init(moment, 64);
            try pair.greet();
            pair.reader.ask(kind, 0, 3000, &SECRET);
            for (0..moment) |_| {
                _ = pair.owner.step();
                try pair.reader.step();
            }
            const done = pair.reader.ended == 1;
            pair.owner.revoke();
            const before = pair.owner.memory;

            try pair.run(1);
            pair.reader.ask(.read, 0, 1, &SECRET);
            try pair.run(2);

            try testing.expectEqual(0, pair.owner.trespasses);
            try testing.expectEqualSlices(u8, &before, &pair.owner.memory);
            try testing.expectEqual(status.ERR_REVOKED, pair.reader.statuses[1]);
            if (done) try testing.expectEqual(status.OK, pair.reader.statuses[0]);
            seen[@intFromBool(pair.reader.statuses[0] == status.OK)] += 1;
        }
        try testing.expect(seen[0] > 10 and seen[1] > 10);
    }
}

test "a client of another incarnation is told so and sent away" {
    var pair: Pair = undefined;
    pair.init(2, 10);
    pair.reader.machine = .init(EPOCH + 1);

    var open = true;
    for (0..500) |_| {
        open = open and pair.owner.step();
        if (!pair.reader.stranger) try pair.reader.step();
    }

    try testing.expect(!open and pair.reader.stranger);
    try testing.expectEqualStrings("", pair.owner.machine.problem);
}

/// Ask whatever comes to mind, for a while.
fn chat(pair: *Pair, turns: u32) void {
    const random = pair.prng.random();
    for (0..turns) |_| {
        if (pair.reader.machine.room() > 0 and random.uintLessThan(u32, 4) == 0) {
            const kind = random.enumValue(wire.Kind);
            const size: u64 = if (kind == .read or kind == .write) random.uintLessThan(u64, 1000) else 8;
            pair.reader.ask(kind, random.uintLessThan(u64, RANGE_BYTES), size, &SECRET);
        }
        if (!pair.owner.step()) return;
        pair.reader.step() catch return;
        if (pair.reader.stranger) return;
    }
}

test "damaged requests move nothing but what was asked for, and end the connection or are refused" {
    var ends: u32 = 0;
    for (0..300) |seed| {
        var pair: Pair = undefined;
        pair.init(seed, 200);
        pair.to_owner.damage = 5;
        chat(&pair, 3_000);
        if (pair.owner.machine.want() == .end) {
            ends += 1;
            try testing.expect(pair.owner.machine.problem.len > 0 or pair.owner.machine.mistaken);
        }
    }
    try testing.expect(ends > 100);
}

test "damaged answers are an error, or are told for the request that is next" {
    var errors: u32 = 0;
    for (0..300) |seed| {
        var pair: Pair = undefined;
        pair.init(seed, 200);
        pair.to_reader.damage = 5;
        chat(&pair, 3_000);
        try testing.expect(pair.reader.ended == pair.reader.machine.answered);
        try testing.expect(pair.reader.machine.answered <= pair.reader.machine.left);
        if (pair.reader.ended < pair.owner.verdicts) errors += 1;
    }
    try testing.expect(errors > 100);
}

test "a request that comes again is out of turn" {
    var machine = serving.Serving.init(EPOCH, @splat(3));
    var hello: [wire.ClientHello.BYTES]u8 = undefined;
    (wire.ClientHello{ .epoch = EPOCH }).encode(&hello);
    @memcpy(machine.want().receive, &hello);
    machine.received(hello.len);
    machine.sent(wire.ServerHello.BYTES);
    const request = wire.Request{ .kind = .add, .place = 1, .generation = 1, .counter = 0, .offset = 0, .size = 8 };
    var bytes: [wire.Request.BYTES]u8 = undefined;
    request.encode(&machine.nonce, &SECRET, &bytes);
    @memcpy(machine.want().receive, &bytes);
    machine.received(bytes.len);
    try testing.expect(machine.want() == .verdict and machine.isAuthentic(&SECRET));
    machine.conclude(status.OK, 0);
    machine.sent(wire.Answer.BYTES);
    try testing.expect(machine.isIdle());

    @memcpy(machine.want().receive, &bytes);
    machine.received(bytes.len);

    try testing.expect(machine.want() == .end);
    try testing.expectEqualStrings(wire.explain(error.Counter), machine.problem);
}
