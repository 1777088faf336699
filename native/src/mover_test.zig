//! Two movers in one process: each is to the other what another process would be.

const std = @import("std");
const ledger = @import("ledger.zig");
const limits = @import("limits.zig");
const process = @import("process.zig");
const status = @import("status.zig");
const sys = @import("sys.zig");
const transfer = @import("transfer.zig");
const views = @import("view.zig");
const visit = @import("visit.zig");
const Mover = @import("mover.zig").Mover;

const testing = std.testing;
const Kind = transfer.Kind;

/// An owner with one block, all of it granted, and a reader that visits it.
const Rig = struct {
    owner: *Mover,
    reader: *Mover,
    of: *visit.Visit,
    number: u32,
    block: []u8,
    name: transfer.GrantName,

    fn init(size: usize) !Rig {
        return initWith(size, visit.ALL);
    }

    fn initWith(size: usize, carriers: u32) !Rig {
        var self: Rig = undefined;
        self.owner = try newMover(1, visit.ALL);
        self.reader = try newMover(2, carriers);
        self.number = @intCast(self.owner.takeBlock(size));
        self.block = self.owner.blocks.find(self.number).?.pages.?[0..size];
        for (self.block, 0..) |*byte, i| byte.* = @truncate(i *% 31);
        self.name = .{ .place = 0, .generation = 0, .secret = @splat(9) };
        try testing.expectEqual(status.OK, self.owner.grant(self.block.ptr, size, 3, self.number, &self.name));
        self.of = self.reader.findVisit(self.reader.openVisit(&self.owner.home).?).?;
        return self;
    }

    fn newMover(epoch: u64, carriers: u32) !*Mover {
        var out: ?*Mover = null;
        const rc = Mover.create(.{ .epoch = epoch, .host = 5, .carriers = carriers, .address = "" }, &out);
        try testing.expectEqual(status.OK, rc);
        return out.?;
    }

    fn deinit(self: *Rig) void {
        self.reader.destroy();
        _ = self.owner.revoke(&self.name);
        _ = self.owner.drop(&self.name);
        _ = self.owner.giveBackBlock(self.number);
        self.owner.destroy();
    }

    fn request(self: *Rig, kind: Kind, ours: []u8) transfer.Request {
        return .{
            .visit = 0,
            .kind = @intFromEnum(kind),
            .grant = self.name,
            .offset = 0,
            .size = if (kind.isAtomic()) 8 else ours.len,
            .local = if (kind.isAtomic()) null else ours.ptr,
            .operand = 1,
            .expected = 0,
            .carriers = visit.ALL,
            .reserved = 0,
        };
    }

    fn begin(self: *Rig, asked: transfer.Request, done: *transfer.Done) i32 {
        done.* = .{ .id = 0, .status = status.OK, .carrier = 0, .value = 0 };
        return self.reader.begin(&asked, self.of, done);
    }

    /// Wait for one record.
    fn wait(self: *Rig) transfer.Done {
        var done: [1]transfer.Done = undefined;
        while (self.reader.poll(&done) == 0) sys.threadYield();
        return done[0];
    }
};

test "bytes come by every carrier of a host, small and large" {
    for ([_]u32{ visit.SHM, visit.CMA }) |bit| {
        var rig = try Rig.initWith(3 * limits.TRANSFER_CHUNK_BYTES + 5, bit);
        defer rig.deinit();
        try testing.expectEqual(bit, rig.of.carriers);
        for ([_]usize{ 100, rig.block.len }) |size| {
            const ours = try testing.allocator.alloc(u8, size);
            defer testing.allocator.free(ours);
            var done: transfer.Done = undefined;
            const rc = rig.begin(rig.request(.read, ours), &done);
            if (rc == status.UNDER_WAY) done = rig.wait();
            try testing.expectEqual(status.OK, done.status);
            try testing.expectEqual(bit, done.carrier);
            try testing.expectEqualSlices(u8, rig.block[0..size], ours);
        }
        try testing.expectEqual(0, rig.of.uses);
    }
}

test "the lock of a claim whose holder has ended is broken" {
    var rig = try Rig.init(4096);
    defer rig.deinit();
    const row = &rig.owner.table.rows[rig.name.place];
    std.mem.writeInt(u64, rig.block[0..8], 40, .little);
    try testing.expect(row.tryLock(.{ .pid = process.PID_MAX - 1, .started = 1, .place = rig.name.place }));

    var done: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, rig.begin(rig.request(.add, &.{}), &done));

    const ended = rig.wait();
    try testing.expectEqual(done.id, ended.id);
    try testing.expectEqual(status.OK, ended.status);
    try testing.expectEqual(40, ended.value);
    try testing.expectEqual(41, std.mem.readInt(u64, rig.block[0..8], .little));
}

test "an atomic operation waits for a lock, and can be given up meanwhile" {
    var rig = try Rig.init(4096);
    defer rig.deinit();
    const row = &rig.owner.table.rows[rig.name.place];
    const own = rig.owner.self;
    const holder = ledger.Claim{ .pid = own.pid, .started = own.started, .place = rig.name.place };
    try testing.expect(row.tryLock(holder));

    var first: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, rig.begin(rig.request(.add, &.{}), &first));
    try testing.expect(rig.reader.thread.giveUp(first.id));
    try testing.expectEqual(status.ERR_CANCELLED, rig.wait().status);

    var second: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, rig.begin(rig.request(.add, &.{}), &second));
    row.unlock(holder);
    const ended = rig.wait();
    try testing.expectEqual(second.id, ended.id);
    try testing.expectEqual(status.OK, ended.status);
}

test "a lock that waits ends with its grant" {
    var rig = try Rig.init(4096);
    defer rig.deinit();
    const row = &rig.owner.table.rows[rig.name.place];
    const own = rig.owner.self;
    try testing.expect(row.tryLock(.{ .pid = own.pid, .started = own.started, .place = rig.name.place }));
    var done: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, rig.begin(rig.request(.swap, &.{}), &done));

    try testing.expectEqual(status.FULL, rig.owner.revoke(&rig.name));

    try testing.expectEqual(status.ERR_REVOKED, rig.wait().status);
    try testing.expectEqual(status.OK, rig.owner.revoke(&rig.name));
}

test "a block that the ledger names no more is unmapped by the way" {
    var rig = try Rig.init(4096);
    defer rig.deinit();
    var ours: [8]u8 = undefined;
    var done: transfer.Done = undefined;
    try testing.expectEqual(status.OK, rig.begin(rig.request(.read, &ours), &done));
    try testing.expectEqual(visit.SHM, done.carrier);
    try testing.expect(rig.of.blocks[0].pages != null);
    rig.owner.table.blocks[rig.number].inode = 0;

    try testing.expectEqual(status.OK, rig.begin(rig.request(.read, &ours), &done));
    try testing.expectEqual(visit.CMA, done.carrier); // it lies there all the same
    rig.owner.table.blocks[rig.number].inode = rig.of.blocks[0].inode + 1;
    try testing.expectEqual(status.OK, rig.begin(rig.request(.read, &ours), &done));
    try testing.expectEqual(visit.CMA, done.carrier);
    try testing.expect(rig.of.blocks[0].pages == null);
}

test "a view and its claim outlive their mover" {
    var rig = try Rig.init(8192);
    var seen: views.Opened = undefined;
    const asked = rig.request(.read, rig.block[0..10]);
    const wanted = asked.wanted();
    try testing.expectEqual(status.OK, rig.reader.openView(rig.of, &wanted, false, &seen));
    try testing.expectEqualSlices(u8, rig.block[0..10], seen.bytes.?[0..10]);
    try testing.expectEqual(status.FULL, rig.owner.revoke(&rig.name));

    rig.reader.destroy();

    try testing.expectEqual(status.FULL, rig.owner.revoke(&rig.name));
    try testing.expectEqual(status.FULL, rig.owner.drop(&rig.name));
    try testing.expectEqual(status.OK, rig.owner.giveBackBlock(rig.number));
    rig.owner.destroy();
    for (seen.bytes.?[0..10], 0..) |byte, i| try testing.expectEqual(@as(u8, @truncate(i *% 31)), byte);
    sys.unmap(@ptrCast(@alignCast(seen.bytes.?)), 4096);
}

test "views of more than there can be are refused" {
    var rig = try Rig.init(4096);
    defer rig.deinit();
    const terms = &rig.owner.table.rows[rig.name.place].terms;
    terms.size = std.math.maxInt(u64) - 1;
    terms.address = 0;
    terms.block_offset = 0;
    var seen: views.Opened = undefined;
    const asked = rig.request(.read, rig.block[0..10]);
    for ([_]u64{ terms.size, 1 << 50, 8192, 4097 }) |size| {
        var wanted = asked.wanted();
        wanted.size = size;
        const rc = rig.reader.openView(rig.of, &wanted, false, &seen);
        try testing.expect(rc == status.ERR_UNREACHABLE or rc == status.ERR_DENIED);
    }
}

test "a place of a transfer is used again, and never named by an old number" {
    var rig = try Rig.init(2 * limits.INLINE_BYTES_MAX);
    defer rig.deinit();
    const ours = try testing.allocator.alloc(u8, rig.block.len);
    defer testing.allocator.free(ours);
    var last: u64 = 0;
    for (0..2 * limits.TRANSFERS_MAX) |_| {
        var done: transfer.Done = undefined;
        try testing.expectEqual(status.UNDER_WAY, rig.begin(rig.request(.read, ours), &done));
        try testing.expect(done.id != last);
        try testing.expect(!rig.reader.thread.giveUp(last));
        last = done.id;
        try testing.expectEqual(status.OK, rig.wait().status);
    }
    try testing.expectEqual(1, rig.reader.thread.used);
}

test "why not is cut where it ends" {
    var why: visit.WhyNot = .{ .text = undefined, .size = 0 };
    for (0..100) |i| why.add("carrier {d}: for some reason", .{i});
    try testing.expectEqual(limits.WHY_NOT_BYTES, why.size);
    try testing.expectEqual(0, why.text[limits.WHY_NOT_BYTES]);
}
