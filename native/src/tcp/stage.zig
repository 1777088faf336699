//! Both sides of the carrier tcp over real loopback sockets, in one thread, under a clock of the test.

const std = @import("std");
const client = @import("client.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const tcp = @import("tcp.zig");
const tcp_socket = @import("tcp_socket.zig");
const wire = @import("wire.zig");

const testing = std.testing;

pub const EPOCH = 99;
pub const MEMORY_BYTES = 12 << 20;
pub const SECRET: wire.Secret = @splat(5);

/// An owner with one grant.
const Grants = struct {
    memory: []align(8) u8,
    writable: bool = true,
    revoked: bool = false,
    at: u32 = 0,
    /// Revoke it when so many pieces have been looked at.
    revoke_after: u32 = std.math.maxInt(u32),
    /// The lock is taken.
    locked: bool = false,

    /// As `carrier_tcp.Granted` has it; so the others.
    pub fn secretOf(_: *Grants, place: u32, generation: u32) ?wire.Secret {
        return if (place == 1 and generation == 2) SECRET else null;
    }

    /// Counted.
    pub fn enter(self: *Grants, request: *const wire.Request, bytes_out: *[*]u8) i32 {
        if (self.revoked) return status.ERR_REVOKED;
        if (request.kind != .read and !self.writable) return status.ERR_DENIED;
        if (request.offset > MEMORY_BYTES or request.size > MEMORY_BYTES - request.offset) return status.ERR_DENIED;
        self.at += 1;
        bytes_out.* = self.memory.ptr + @as(usize, @intCast(request.offset));
        return status.OK;
    }

    /// Counted.
    pub fn leave(self: *Grants, place: u32) void {
        std.debug.assert(place == 1);
        self.at -= 1;
    }

    /// Until it is revoked.
    pub fn isCurrent(self: *Grants, _: u32, _: u32) bool {
        if (self.revoke_after == 0) self.revoked = true else self.revoke_after -= 1;
        return !self.revoked;
    }

    /// Unless it is locked.
    pub fn change(self: *Grants, request: *const wire.Request, bytes: [*]u8, value: *u64) ?i32 {
        if (self.locked) return null;
        const word: *u64 = @ptrCast(@alignCast(bytes));
        value.* = word.*;
        if (request.kind == .add) word.* +%= request.operand;
        if (request.kind == .swap and word.* == request.expected) word.* = request.operand;
        return status.OK;
    }
};

const Owners = struct {
    ended: ?bool = false,

    /// As the test wants it.
    pub fn hasEnded(self: *Owners, _: u64) ?bool {
        return self.ended;
    }
};

const Carrier = tcp.Tcp(Grants, Owners);

/// An owner, a reader, and their clock.
pub const Stage = struct {
    owner: *Carrier,
    reader: *Carrier,
    grants: Grants,
    owners: Owners = .{},
    local: []align(8) u8,
    address: tcp_socket.Address,
    now: u64 = 1,
    ids: u64 = 0,
    owner_sleeps: bool = false,
    /// Buffers are small: bodies are stuck in the middle when one side stands still.
    narrow: bool = false,

    /// Memory of both sides, which differs; the owner listens.
    pub fn init(self: *Stage) !void {
        self.* = .{
            .owner = try testing.allocator.create(Carrier),
            .reader = try testing.allocator.create(Carrier),
            .grants = .{ .memory = try testing.allocator.alignedAlloc(u8, .@"8", MEMORY_BYTES) },
            .local = try testing.allocator.alignedAlloc(u8, .@"8", MEMORY_BYTES),
            .address = .{ .bytes = .{ 127, 0, 0, 1 } ++ .{0} ** 12, .size = 4, .port = 0 },
        };
        var prng = std.Random.DefaultPrng.init(1);
        prng.random().bytes(self.grants.memory);
        prng.random().bytes(self.local);
        try testing.expectEqual(0, self.owner.init(&self.grants, &self.owners, EPOCH));
        try testing.expectEqual(0, self.reader.init(&self.grants, &self.owners, EPOCH + 1));
        try testing.expectEqual(0, self.owner.server.listen(&self.address));
    }

    /// Close and free everything.
    pub fn deinit(self: *Stage) void {
        self.owner.closeFds();
        self.reader.closeFds();
        testing.allocator.destroy(self.owner);
        testing.allocator.destroy(self.reader);
        testing.allocator.free(self.grants.memory);
        testing.allocator.free(self.local);
    }

    /// A transfer of the owner's memory to the same place of ours, or back.
    pub fn orderOf(self: *Stage, kind: wire.Kind, offset: u64, size: u64) client.Order {
        self.ids += 1;
        return .{
            .id = self.ids,
            .target = .{ .epoch = EPOCH, .address = self.address },
            .kind = kind,
            .place = 1,
            .generation = 2,
            .secret = SECRET,
            .offset = offset,
            .size = size,
            .local = self.local.ptr + (if (offset < MEMORY_BYTES) offset else 0),
            .operand = 3,
            .expected = 0,
        };
    }

    /// Begin one.
    pub fn begin(self: *Stage, kind: wire.Kind, offset: u64, size: u64) void {
        std.debug.assert(self.reader.client.begin(self.orderOf(kind, offset, size)));
    }

    /// Each side has a turn.
    pub fn turn(self: *Stage) void {
        self.now += 100_000;
        if (self.narrow) {
            const theirs = self.owner.server.connections[0..self.owner.server.connections_end];
            for (theirs) |one| tcp_socket.setBuffers(one.fd, 1 << 16);
            const ours = self.reader.client.streams[0..self.reader.client.streams_end];
            for (ours) |one| tcp_socket.setBuffers(one.fd, 1 << 16);
        }
        if (!self.owner_sleeps) self.owner.turn(self.now);
        self.reader.turn(self.now);
    }

    /// Turn until a transfer has ended.
    pub fn wait(self: *Stage) !client.Done {
        for (0..1_000_000) |_| {
            if (self.reader.client.takeDone()) |done| return done;
            self.turn();
        }
        return error.Stuck;
    }

    /// Begin one, which is the only one, and wait for its status.
    pub fn run(self: *Stage, kind: wire.Kind, offset: u64, size: u64) !i32 {
        self.begin(kind, offset, size);
        const done = try self.wait();
        try testing.expectEqual(self.ids, done.id);
        try testing.expectEqual(0, self.reader.client.job_count);
        return done.status;
    }

    /// How many the owner has.
    pub fn connections(self: *const Stage) u32 {
        return self.owner.server.count;
    }

    /// Turn until the owner is in the middle of so many requests at least.
    pub fn reach(self: *Stage, count: u32) !void {
        self.narrow = true;
        for (0..10_000) |_| {
            if (self.grants.at >= count) return;
            self.turn();
        }
        return error.Stuck;
    }

    /// Turn until so many connections are known here.
    pub fn settle(self: *Stage, count: u32) !void {
        for (0..100_000) |_| {
            if (self.connections() == count) return;
            self.turn();
        }
        return error.Stuck;
    }

    /// Let time pass.
    pub fn pass(self: *Stage, ticks: u32) void {
        for (0..ticks) |_| {
            self.now += limits.TCP_TICK_MS * 1_000_000;
            self.turn();
        }
    }
};
