//! Movers: what becomes of transfers, locks, blocks and views. See mover/stage.zig.

const std = @import("std");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("../copying/transfer.zig");
const views = @import("../grants/view.zig");
const attachment = @import("../grants/attachment.zig");
const Stage = @import("stage.zig").Stage;

const testing = std.testing;
const Kind = transfer.Kind;

test "bytes come by every carrier of a host, small and large" {
    for ([_]u32{ attachment.SHM, attachment.CMA }) |bit| {
        var stage = try Stage.initWith(3 * limits.TRANSFER_CHUNK_BYTES + 5, bit);
        defer stage.deinit();
        try testing.expectEqual(bit, stage.of.carriers);
        for ([_]usize{ 100, stage.block.len }) |size| {
            const ours = try testing.allocator.alloc(u8, size);
            defer testing.allocator.free(ours);
            var done: transfer.Done = undefined;
            const rc = stage.begin(stage.request(.read, ours), &done);
            if (rc == status.UNDER_WAY) done = stage.wait();
            try testing.expectEqual(status.OK, done.status);
            try testing.expectEqual(bit, done.carrier);
            try testing.expectEqualSlices(u8, stage.block[0..size], ours);
        }
        try testing.expectEqual(0, stage.of.uses);
    }
}

test "the lock of a claim whose holder has ended is broken" {
    var stage = try Stage.init(4096);
    defer stage.deinit();
    const row = &stage.owner.table.rows[stage.name.place];
    std.mem.writeInt(u64, stage.block[0..8], 40, .little);
    try testing.expect(row.tryLock(.{ .pid = process.PID_MAX - 1, .started = 1, .place = stage.name.place }));

    var done: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, stage.begin(stage.request(.add, &.{}), &done));

    const ended = stage.wait();
    try testing.expectEqual(done.id, ended.id);
    try testing.expectEqual(status.OK, ended.status);
    try testing.expectEqual(40, ended.value);
    try testing.expectEqual(41, std.mem.readInt(u64, stage.block[0..8], .little));
}

test "an atomic operation waits for a lock, and can be given up meanwhile" {
    var stage = try Stage.init(4096);
    defer stage.deinit();
    const row = &stage.owner.table.rows[stage.name.place];
    const own = stage.owner.self;
    const holder = ledger.Claim{ .pid = own.pid, .started = own.started, .place = stage.name.place };
    try testing.expect(row.tryLock(holder));

    var first: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, stage.begin(stage.request(.add, &.{}), &first));
    try testing.expect(stage.reader.thread.giveUp(first.id));
    try testing.expectEqual(status.ERR_CANCELLED, stage.wait().status);

    var second: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, stage.begin(stage.request(.add, &.{}), &second));
    row.unlock(holder);
    const ended = stage.wait();
    try testing.expectEqual(second.id, ended.id);
    try testing.expectEqual(status.OK, ended.status);
}

test "a lock that waits ends with its grant" {
    var stage = try Stage.init(4096);
    defer stage.deinit();
    const row = &stage.owner.table.rows[stage.name.place];
    const own = stage.owner.self;
    try testing.expect(row.tryLock(.{ .pid = own.pid, .started = own.started, .place = stage.name.place }));
    var done: transfer.Done = undefined;
    try testing.expectEqual(status.UNDER_WAY, stage.begin(stage.request(.swap, &.{}), &done));

    try testing.expectEqual(status.FULL, stage.owner.revoke(&stage.name));

    try testing.expectEqual(status.ERR_REVOKED, stage.wait().status);
    try testing.expectEqual(status.OK, stage.owner.revoke(&stage.name));
}

test "a block that the ledger names no more is unmapped by the way" {
    var stage = try Stage.init(4096);
    defer stage.deinit();
    var ours: [8]u8 = undefined;
    var done: transfer.Done = undefined;
    try testing.expectEqual(status.OK, stage.begin(stage.request(.read, &ours), &done));
    try testing.expectEqual(attachment.SHM, done.carrier);
    try testing.expect(stage.of.blocks[0].pages != null);
    stage.owner.table.blocks[stage.number].inode = 0;

    try testing.expectEqual(status.OK, stage.begin(stage.request(.read, &ours), &done));
    try testing.expectEqual(attachment.CMA, done.carrier); // it lies there all the same
    stage.owner.table.blocks[stage.number].inode = stage.of.blocks[0].inode + 1;
    try testing.expectEqual(status.OK, stage.begin(stage.request(.read, &ours), &done));
    try testing.expectEqual(attachment.CMA, done.carrier);
    try testing.expect(stage.of.blocks[0].pages == null);
}

test "a view and its claim outlive their mover" {
    var stage = try Stage.init(8192);
    var seen: views.Opened = undefined;
    try testing.expectEqual(status.OK, stage.openView(10, .read, &seen));
    try testing.expectEqualSlices(u8, stage.block[0..10], seen.bytes.?[0..10]);
    try testing.expectEqual(status.FULL, stage.owner.revoke(&stage.name));

    stage.reader.destroy();

    try testing.expectEqual(status.FULL, stage.owner.revoke(&stage.name));
    try testing.expectEqual(status.FULL, stage.owner.drop(&stage.name));
    try testing.expectEqual(status.OK, stage.owner.giveBackBlock(stage.number));
    stage.owner.destroy();
    for (seen.bytes.?[0..10], 0..) |byte, i| try testing.expectEqual(@as(u8, @truncate(i *% 31)), byte);
    sys.unmap(@ptrCast(@alignCast(seen.bytes.?)), 4096);
}

test "a shared view leaves its mapping to transfers and later views, and outlives its mover" {
    var stage = try Stage.init(8192);
    var seen: views.Opened = undefined;
    try testing.expectEqual(status.OK, stage.openView(5, .shared, &seen));
    try testing.expectEqualSlices(u8, stage.block[0..5], seen.bytes.?[0..5]);
    const first = seen.bytes.?;
    stage.owner.table.blocks[stage.number].inode += 1; // the ledger names it no more; a look at another block is next
    try testing.expect(stage.of.hold(stage.number) == null);
    try testing.expectEqual(1, stage.of.blocks[0].uses);
    stage.owner.table.blocks[stage.number].inode -= 1;
    try testing.expect(stage.reader.closeView(seen.handle));
    try testing.expect(stage.of.blocks[0].isIdle());

    try testing.expectEqual(status.OK, stage.openView(5, .shared, &seen));
    try testing.expectEqual(first, seen.bytes.?);
    try testing.expectEqual(status.FULL, stage.owner.revoke(&stage.name));
    stage.reader.destroy();
    stage.owner.destroy();
    for (seen.bytes.?[0..5], 0..) |byte, i| try testing.expectEqual(@as(u8, @truncate(i *% 31)), byte);
}

test "a kept view holds up no revocation, and outlives the attachment and the owner" {
    var stage = try Stage.init(8192);
    var seen: views.Opened = undefined;
    try testing.expectEqual(status.OK, stage.openView(5, .kept, &seen));

    try testing.expectEqual(status.OK, stage.owner.revoke(&stage.name));
    try testing.expectEqual(status.OK, stage.owner.drop(&stage.name));
    stage.owner.destroy();
    stage.reader.detach(stage.of);

    for (seen.bytes.?[0..5], 0..) |byte, i| try testing.expectEqual(@as(u8, @truncate(i *% 31)), byte);
    try testing.expectEqual(.closed, stage.of.state);
    try testing.expect(stage.reader.closeView(seen.handle));
    try testing.expectEqual(.free, stage.of.state);
    stage.reader.destroy();
}

test "views of more than there can be are refused" {
    var stage = try Stage.init(4096);
    defer stage.deinit();
    const terms = &stage.owner.table.rows[stage.name.place].terms;
    terms.size = std.math.maxInt(u64) - 1;
    terms.address = 0;
    terms.block_offset = 0;
    var seen: views.Opened = undefined;
    const asked = stage.request(.read, stage.block[0..10]);
    for ([_]u64{ terms.size, 1 << 50, 8192, 4097 }) |size| {
        var wanted = asked.wanted();
        wanted.size = size;
        const rc = stage.reader.openView(stage.of, &wanted, .read, &seen);
        try testing.expect(rc == status.ERR_UNREACHABLE or rc == status.ERR_DENIED);
    }
}

test "a place of a transfer is used again, and never named by an old number" {
    var stage = try Stage.init(2 * limits.INLINE_BYTES_MAX);
    defer stage.deinit();
    const ours = try testing.allocator.alloc(u8, stage.block.len);
    defer testing.allocator.free(ours);
    var last: u64 = 0;
    for (0..2 * limits.TRANSFERS_MAX) |_| {
        var done: transfer.Done = undefined;
        try testing.expectEqual(status.UNDER_WAY, stage.begin(stage.request(.read, ours), &done));
        try testing.expect(done.id != last);
        try testing.expect(!stage.reader.thread.giveUp(last));
        last = done.id;
        try testing.expectEqual(status.OK, stage.wait().status);
    }
    try testing.expectEqual(1, stage.reader.thread.used);
}

test "why not is cut where it ends" {
    var why: attachment.WhyNot = .{ .text = undefined, .size = 0 };
    for (0..100) |i| why.add("carrier {d}: for some reason", .{i});
    try testing.expectEqual(limits.WHY_NOT_BYTES, why.size);
    try testing.expectEqual(0, why.text[limits.WHY_NOT_BYTES]);
}
