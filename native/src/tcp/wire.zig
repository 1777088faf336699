//! The bytes by which one process reads and writes memory that another has granted, over a stream. PURE. Little endian.
//!
//!     client hello   u64 magic, u32 version, u32 0, u64 epoch of the process that is wanted
//!     server hello   u64 magic, u32 version, u32 0, u64 epoch of the process that answers, nonce of 16 bytes
//!     request        u32 kind, u32 place, u32 generation, u32 0, u64 counter, u64 offset, u64 size, u64 operand,
//!                    u64 expected, 16 bytes of MAC; after a WRITE: `size` bytes
//!     answer         u64 counter, i32 status, u32 0, u64 size, u64 value; after UNDER_WAY: `size` bytes, and another
//!                    answer, which says how it ended
//!
//! A READ that is allowed is answered by UNDER_WAY, its bytes, and how it ended: a grant may be revoked in the middle,
//! what is still owed of the bytes is then zeros. Everything else has one answer, a WRITE after all of its bytes.
//!
//! TW-1 Who does not know the secret of a grant learns nothing of it: the MAC of a request is keyed by the secret and
//! covers the nonce of the connection, the counter and all other fields. So a request is worth nothing on any other
//! connection, and at any other time. TW-2 Nothing that a peer sends is used before it was checked; the first thing
//! that is wrong ends the connection.

const std = @import("std");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");

const Mac = std.crypto.auth.siphash.SipHash128(2, 4);

pub const VERSION: u32 = 1;

/// "trimeshb".
const MAGIC: u64 = 0x6268_7365_6D69_7274;

pub const NONCE_BYTES = 16;
pub const SECRET_BYTES = Mac.key_length;

pub const Nonce = [NONCE_BYTES]u8;
pub const Secret = [SECRET_BYTES]u8;

/// What is wrong with what came.
pub const Error = error{ Foreign, Version, Reserved, Kind, Size, Status, Counter };

/// The problem as text that completes "the peer sent".
pub fn explain(problem: Error) []const u8 {
    return switch (problem) {
        error.Foreign => "bytes that are no hello",
        error.Version => "a hello of another protocol version",
        error.Reserved => "something where nothing may stand",
        error.Kind => "a request of an unknown kind",
        error.Size => "a size that does not fit its kind",
        error.Status => "an answer that does not fit its request",
        error.Counter => "a counter out of turn",
    };
}

fn put(comptime T: type, to: []u8, at: usize, value: T) void {
    std.mem.writeInt(T, to[at..][0..@sizeOf(T)], value, .little);
}

fn get(comptime T: type, from: []const u8, at: usize) T {
    return std.mem.readInt(T, from[at..][0..@sizeOf(T)], .little);
}

fn checkGreeting(from: []const u8) Error!void {
    if (get(u64, from, 0) != MAGIC) return error.Foreign;
    if (get(u32, from, 8) != VERSION) return error.Version;
    if (get(u32, from, 12) != 0) return error.Reserved;
}

/// The first bytes of the client.
pub const ClientHello = struct {
    /// The process that it wants to speak to.
    epoch: u64,

    pub const BYTES = 24;

    /// Write it.
    pub fn encode(self: ClientHello, to: *[BYTES]u8) void {
        put(u64, to, 0, MAGIC);
        put(u32, to, 8, VERSION);
        put(u32, to, 12, 0);
        put(u64, to, 16, self.epoch);
    }

    /// Read it.
    pub fn decode(from: *const [BYTES]u8) Error!ClientHello {
        try checkGreeting(from);
        return .{ .epoch = get(u64, from, 16) };
    }
};

/// The first bytes of the server, once it has a hello.
pub const ServerHello = struct {
    epoch: u64,
    /// Drawn anew for each connection.
    nonce: Nonce,

    pub const BYTES = 40;

    /// Write it.
    pub fn encode(self: ServerHello, to: *[BYTES]u8) void {
        put(u64, to, 0, MAGIC);
        put(u32, to, 8, VERSION);
        put(u32, to, 12, 0);
        put(u64, to, 16, self.epoch);
        to[24..40].* = self.nonce;
    }

    /// Read it.
    pub fn decode(from: *const [BYTES]u8) Error!ServerHello {
        try checkGreeting(from);
        return .{ .epoch = get(u64, from, 16), .nonce = from[24..40].* };
    }
};

/// As TM_READ .. TM_SWAP.
pub const Kind = enum(u32) { read = 1, write = 2, add = 3, swap = 4 };

/// Bytes of the word that ADD and SWAP change.
pub const WORD_BYTES = 8;

pub const Request = struct {
    kind: Kind,
    place: u32,
    generation: u32,
    /// Requests of the connection before it.
    counter: u64,
    /// Into the granted range.
    offset: u64,
    size: u64,
    operand: u64 = 0,
    expected: u64 = 0,

    pub const BYTES = 72;
    const SIGNED_BYTES = BYTES - Mac.mac_length;

    /// Write it, with its MAC.
    pub fn encode(self: Request, nonce: *const Nonce, secret: *const Secret, to: *[BYTES]u8) void {
        put(u32, to, 0, @intFromEnum(self.kind));
        put(u32, to, 4, self.place);
        put(u32, to, 8, self.generation);
        put(u32, to, 12, 0);
        put(u64, to, 16, self.counter);
        put(u64, to, 24, self.offset);
        put(u64, to, 32, self.size);
        put(u64, to, 40, self.operand);
        put(u64, to, 48, self.expected);
        to[SIGNED_BYTES..].* = macOf(nonce, secret, to);
    }

    /// Read it. Whether its sender knows the secret is for `isAuthentic` to say.
    pub fn decode(from: *const [BYTES]u8) Error!Request {
        if (get(u32, from, 12) != 0) return error.Reserved;
        const request = Request{
            .kind = std.enums.fromInt(Kind, get(u32, from, 0)) orelse return error.Kind,
            .place = get(u32, from, 4),
            .generation = get(u32, from, 8),
            .counter = get(u64, from, 16),
            .offset = get(u64, from, 24),
            .size = get(u64, from, 32),
            .operand = get(u64, from, 40),
            .expected = get(u64, from, 48),
        };
        switch (request.kind) {
            .read, .write => if (request.size > limits.TCP_BODY_BYTES_MAX) return error.Size,
            .add, .swap => if (request.size != WORD_BYTES) return error.Size,
        }
        return request;
    }

    fn macOf(nonce: *const Nonce, secret: *const Secret, bytes: *const [BYTES]u8) [Mac.mac_length]u8 {
        var mac = Mac.init(secret);
        mac.update(nonce);
        mac.update(bytes[0..SIGNED_BYTES]);
        return mac.finalResult();
    }

    /// Whether the sender of these bytes knows the secret. Takes the same time whatever is wrong.
    pub fn isAuthentic(bytes: *const [BYTES]u8, nonce: *const Nonce, secret: *const Secret) bool {
        const expected = macOf(nonce, secret, bytes);
        return std.crypto.timing_safe.eql([Mac.mac_length]u8, expected, bytes[SIGNED_BYTES..].*);
    }
};

/// What was granted is not in the owner's memory any more.
pub const NOT_THERE = status.ofErrno(-process.EFAULT);

pub const Answer = struct {
    /// Of the request.
    counter: u64,
    status: i32,
    /// Of the bytes that follow.
    size: u64 = 0,
    /// Of ADD and SWAP.
    value: u64 = 0,

    pub const BYTES = 32;

    /// Write it.
    pub fn encode(self: Answer, to: *[BYTES]u8) void {
        put(u64, to, 0, self.counter);
        put(i32, to, 8, self.status);
        put(u32, to, 12, 0);
        put(u64, to, 16, self.size);
        put(u64, to, 24, self.value);
    }

    /// Read an answer to `request`; `ending`: it is what follows the bytes of a READ.
    pub fn decode(from: *const [BYTES]u8, request: Request, ending: bool) Error!Answer {
        if (get(u32, from, 12) != 0) return error.Reserved;
        const answer = Answer{
            .counter = get(u64, from, 0),
            .status = get(i32, from, 8),
            .size = get(u64, from, 16),
            .value = get(u64, from, 24),
        };
        if (answer.counter != request.counter) return error.Counter;
        const begins = request.kind == .read and !ending;
        switch (answer.status) {
            status.OK => if (begins) return error.Status, // where are the bytes?
            status.UNDER_WAY => if (!begins) return error.Status,
            status.ERR_REVOKED, status.ERR_DENIED, status.ERR_DEVICE, NOT_THERE => {},
            // The word does not lie as it must; or its lock was held for too long.
            status.ERR_ARGUMENT, status.ERR_SILENT => switch (request.kind) {
                .add, .swap => {},
                .read, .write => return error.Status,
            },
            else => return error.Status,
        }
        const expected = if (answer.status == status.UNDER_WAY) request.size else 0;
        if (answer.size != expected) return error.Size;
        return answer;
    }
};

// ---- tests ----

const testing = std.testing;

const some = Request{ .kind = .swap, .place = 3, .generation = 9, .counter = 5, .offset = 1 << 40, .size = 8 };
const NONCE: Nonce = @splat(7);
const SECRET: Secret = @splat(8);

test "hellos, requests and answers survive encoding" {
    var client: [ClientHello.BYTES]u8 = undefined;
    (ClientHello{ .epoch = 77 }).encode(&client);
    try testing.expectEqual(ClientHello{ .epoch = 77 }, try ClientHello.decode(&client));

    var server: [ServerHello.BYTES]u8 = undefined;
    (ServerHello{ .epoch = 78, .nonce = NONCE }).encode(&server);
    try testing.expectEqual(ServerHello{ .epoch = 78, .nonce = NONCE }, try ServerHello.decode(&server));

    var bytes: [Request.BYTES]u8 = undefined;
    some.encode(&NONCE, &SECRET, &bytes);
    try testing.expectEqual(some, try Request.decode(&bytes));

    const answer = Answer{ .counter = 5, .status = status.OK, .value = 1 << 63 };
    var said: [Answer.BYTES]u8 = undefined;
    answer.encode(&said);
    try testing.expectEqual(answer, try Answer.decode(&said, some, false));
}

test "hellos of others are refused" {
    var bytes: [ClientHello.BYTES]u8 = undefined;
    (ClientHello{ .epoch = 77 }).encode(&bytes);
    const Case = struct { at: usize, problem: Error };
    const cases = [_]Case{
        .{ .at = 0, .problem = error.Foreign },
        .{ .at = 7, .problem = error.Foreign },
        .{ .at = 8, .problem = error.Version },
        .{ .at = 15, .problem = error.Reserved },
    };
    for (cases) |case| {
        var bad = bytes;
        bad[case.at] ^= 1;
        try testing.expectError(case.problem, ClientHello.decode(&bad));
    }
}

test "a MAC holds for one nonce, one secret, and every bit of a request" {
    var bytes: [Request.BYTES]u8 = undefined;
    some.encode(&NONCE, &SECRET, &bytes);
    try testing.expect(Request.isAuthentic(&bytes, &NONCE, &SECRET));
    for (0..Request.BYTES * 8) |bit| {
        var bad = bytes;
        bad[bit / 8] ^= @as(u8, 1) << @intCast(bit % 8);
        try testing.expect(!Request.isAuthentic(&bad, &NONCE, &SECRET));
    }
    for (0..NONCE_BYTES * 8) |bit| {
        var bad = NONCE;
        bad[bit / 8] ^= @as(u8, 1) << @intCast(bit % 8);
        try testing.expect(!Request.isAuthentic(&bytes, &bad, &SECRET));
        try testing.expect(!Request.isAuthentic(&bytes, &NONCE, &bad));
    }
}

test "requests whose size does not fit their kind are refused" {
    const Case = struct { kind: Kind, size: u64 };
    const cases = [_]Case{
        .{ .kind = .read, .size = limits.TCP_BODY_BYTES_MAX + 1 },
        .{ .kind = .write, .size = std.math.maxInt(u64) },
        .{ .kind = .add, .size = 16 },
        .{ .kind = .swap, .size = 0 },
    };
    for (cases) |case| {
        var request = some;
        request.kind = case.kind;
        request.size = case.size;
        var bytes: [Request.BYTES]u8 = undefined;
        request.encode(&NONCE, &SECRET, &bytes);
        try testing.expectError(error.Size, Request.decode(&bytes));
    }
    var bytes: [Request.BYTES]u8 = undefined;
    some.encode(&NONCE, &SECRET, &bytes);
    bytes[0] = 5;
    try testing.expectError(error.Kind, Request.decode(&bytes));
    some.encode(&NONCE, &SECRET, &bytes);
    bytes[13] = 1;
    try testing.expectError(error.Reserved, Request.decode(&bytes));
}

test "answers that do not fit their request are refused" {
    var read = some;
    read.kind = .read;
    const Case = struct { to: Request, status: i32, size: u64 = 0, counter: u64 = 5, ending: bool = false };
    const counters = [_]Case{.{ .to = some, .status = status.OK, .counter = 6 }};
    const statuses = [_]Case{
        .{ .to = some, .status = status.UNDER_WAY, .size = 8 },
        .{ .to = some, .status = status.ERR_GONE },
        .{ .to = some, .status = 77 },
        .{ .to = read, .status = status.OK },
        .{ .to = read, .status = status.ERR_SILENT },
        .{ .to = read, .status = status.UNDER_WAY, .size = 8, .ending = true },
    };
    const sizes = [_]Case{
        .{ .to = some, .status = status.OK, .size = 1 },
        .{ .to = read, .status = status.UNDER_WAY, .size = 9 },
        .{ .to = read, .status = status.OK, .size = 8, .ending = true },
        .{ .to = read, .status = status.ERR_DENIED, .size = 1 },
    };
    const all = .{ .{ error.Counter, &counters }, .{ error.Status, &statuses }, .{ error.Size, &sizes } };
    inline for (all) |group| for (group[1]) |one| {
        var bytes: [Answer.BYTES]u8 = undefined;
        (Answer{ .counter = one.counter, .status = one.status, .size = one.size }).encode(&bytes);
        try testing.expectError(group[0], Answer.decode(&bytes, one.to, one.ending));
    };
}
