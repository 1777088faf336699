//! Fuzz target: whatever a process of this user writes into a ledger, those who read it go on, and touch nothing but
//! their destination and the block that the ledger truly names.

const std = @import("std");
const fuzz_input = @import("../fuzz_input.zig");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const Mover = @import("mover.zig").Mover;
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("../copying/transfer.zig");
const views = @import("../grants/view.zig");
const attachment = @import("../grants/attachment.zig");

const Smith = fuzz_input.Smith;
const testing = std.testing;

/// The fuzzer keeps what one input asked for in a buffer of bounded size.
const TURNS_MAX = 32;

/// A number that a ledger may say: near what is right, near a border, or anything.
fn someNumber(smith: *Smith, right: u64) u64 {
    return switch (smith.valueRangeAtMost(u8, 0, 5)) {
        0, 1, 2 => right,
        3 => smith.valueRangeAtMost(u64, 0, 3 * 4096),
        4 => std.math.maxInt(u64) - smith.valueRangeAtMost(u64, 0, 3 * 4096),
        else => smith.value(u64),
    };
}

/// Write into a ledger as any process of this user may. Locks stay free, because a held one is waited for.
fn spoil(smith: *Smith, table: *ledger.Table, right: ledger.Row, blocks: []const ledger.BlockRow) void {
    const row = &table.rows[0];
    if (smith.boolWeighted(7, 1)) row.word = smith.value(u64) else row.word = right.word;
    row.terms = .{
        .address = someNumber(smith, right.terms.address),
        .size = someNumber(smith, right.terms.size),
        .block_offset = someNumber(smith, right.terms.block_offset),
        .block = @truncate(someNumber(smith, right.terms.block)),
        .rights = if (smith.boolWeighted(7, 1)) smith.value(u32) else 3,
        .secret = right.terms.secret,
    };
    const block = &table.blocks[1];
    block.* = blocks[smith.index(blocks.len)];
    block.inode = someNumber(smith, block.inode);
    block.bytes = someNumber(smith, block.bytes);
    if (smith.boolWeighted(7, 1)) block.fd = smith.value(u32);
    for (0..smith.valueRangeAtMost(u8, 0, 4)) |_| {
        table.claims[smith.valueRangeAtMost(u32, 0, limits.CLAIMS_MAX - 1)] = smith.value(u64);
    }
    if (smith.boolWeighted(7, 1)) table.epoch +%= 1;
}

fn newMover(epoch: u64, carriers: u32) !*Mover {
    var out: ?*Mover = null;
    const rc = Mover.create(.{ .epoch = epoch, .host = 5, .carriers = carriers, .address = "", .ucx = "" }, &out);
    try testing.expectEqual(status.OK, rc);
    return out.?;
}

/// Whatever stands in a ledger, transfers end with a status, and touch nothing but the block and their destination.
fn fuzzLedger(_: void, smith: *Smith) !void {
    const size = 2 * 4096;
    const owner = try newMover(1, attachment.ALL);
    defer owner.destroy();
    // What is written by cma goes where the ledger says, and here that is this very process.
    const by_cma = smith.value(bool);
    const reader = try newMover(2, if (by_cma) attachment.CMA else attachment.SHM);
    defer reader.destroy();
    const number: u32 = @intCast(owner.takeBlock(size));
    defer _ = owner.giveBackBlock(number);
    const other = sys.memfd("fuzz", size);
    defer sys.close(other);
    var name = transfer.GrantName{ .place = 0, .generation = 0, .secret = @splat(9) };
    const pages = owner.blocks.find(number).?.pages.?;
    try testing.expectEqual(status.OK, owner.grant(pages, size, 3, number, &name));
    defer _ = owner.drop(&name);
    defer _ = owner.revoke(&name);
    const right = owner.table.rows[0];
    const blocks = [_]ledger.BlockRow{
        owner.table.blocks[number],
        .{ .inode = process.fileOf(other).?.inode, .bytes = size, .fd = @intCast(other), .reserved = 0 },
        .{ .inode = process.fileOf(owner.table_fd).?.inode, .bytes = size, .fd = owner.home.ledger, .reserved = 0 },
    };
    const one = reader.findAttachment(reader.attach(&owner.home).?).?;
    for (0..TURNS_MAX) |_| {
        if (smith.eos()) break;
        spoil(smith, owner.table, right, &blocks);
        var ours: [4096 + 16]u8 = @splat(0xAA);
        const kind: transfer.Kind = if (by_cma) .read else @enumFromInt(smith.valueRangeAtMost(u8, 1, 4));
        const asked = transfer.Request{
            .attachment = 0,
            .kind = @intFromEnum(kind),
            .grant = name,
            .offset = someNumber(smith, 0),
            .size = if (kind.isAtomic()) 8 else smith.valueRangeAtMost(u64, 1, 4096),
            .local = ours[8..],
            .operand = smith.value(u64),
            .expected = 0,
            .carriers = attachment.ALL,
            .exported = null,
            .exported_size = 0,
        };
        if (smith.boolWeighted(3, 1)) {
            var seen: views.Opened = undefined;
            const wanted = asked.wanted();
            if (reader.openView(one, &wanted, .read, &seen) == status.OK) {
                std.mem.doNotOptimizeAway(seen.bytes.?[0] +% seen.bytes.?[@intCast(asked.size - 1)]);
                try testing.expect(reader.closeView(seen.handle));
            }
            continue;
        }
        var done: transfer.Done = undefined;
        const rc = reader.begin(&asked, one, &done);
        try testing.expect(rc == status.OK or rc == status.ERR_ARGUMENT);
        try testing.expect(std.mem.allEqual(u8, ours[0..8], 0xAA));
        try testing.expect(std.mem.allEqual(u8, ours[@intCast(8 + asked.size)..], 0xAA));
    }
    owner.table.rows[0] = right;
    owner.table.blocks[number] = blocks[0];
    owner.table.claims = @splat(0);
}

test "fuzz: ledger" {
    try fuzz_input.feed(fuzzLedger);
}
