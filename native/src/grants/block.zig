//! Blocks: memory that this process makes for others to map. Each is a sealed memfd, whose descriptor others open by
//! its number; the ledger has a row for it. Blocks that are given back are kept for the next, up to a bound.
//!
//! BM-1 A block that may still be looked at is never used again: one with an open access to its grants (`spoilt`),
//! and one that a forked child has (`inherited`). Its memory goes with its last mapping. BM-2 What a thread of this
//! process is still at stays mapped here. BM-3 All pages are there before a block is handed out.

const std = @import("std");
const assert = std.debug.assert;
const ledger = @import("ledger.zig");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const sys = @import("../system/sys.zig");

const Pages = [*]align(4096) u8;

pub const Block = struct {
    /// Null: an empty place.
    pages: ?Pages,
    bytes: u64,
    fd: i32,
    /// Grants on it that were not dropped.
    grants: u32,
    idle: bool,
    /// BM-1
    spoilt: bool,
    inherited: bool,
    /// BM-2
    pinned: bool,
    /// When it was given back.
    stamp: u64,
};

/// The blocks of one process. All zero but for `table` is none.
pub const Blocks = struct {
    table: *ledger.Table,
    rows: [limits.BLOCKS_MAX]Block,
    idle_bytes: u64,
    clock: u64,

    /// Whole pages in steps of an eighth, so that sizes that differ little share their blocks.
    fn classOf(size: u64) u64 {
        const step = @max(4096, std.math.floorPowerOfTwo(u64, size) / 8);
        const bytes = std.mem.alignForward(u64, size, step);
        assert(bytes >= size);
        assert(bytes % 4096 == 0);
        return bytes;
    }

    /// A block of at least `size` bytes. Its number, or -errno; 0: there are too many.
    pub fn take(self: *Blocks, size: u64) i32 {
        assert(size > 0);
        assert(size <= limits.BLOCK_BYTES_MAX);
        const bytes = classOf(size);
        if (self.newestIdle(bytes)) |one| {
            assert(one.grants == 0);
            assert(!one.spoilt); // BM-1
            assert(!one.inherited);
            one.idle = false;
            self.idle_bytes -= bytes;
            return self.numberOf(one);
        }
        const one = self.emptyPlace() orelse return 0;
        assert(one.pages == null);
        assert(!one.idle);
        const fd = sys.memfd("trimesh-block", bytes); // BM-3
        if (fd < 0) return fd;
        const file = process.fileOf(fd);
        const pages = if (file == null) null else sys.mapInherited(fd, @intCast(bytes));
        if (pages == null) {
            sys.close(fd);
            return -sys.ENOMEM;
        }
        one.* = .{
            .pages = pages,
            .bytes = bytes,
            .fd = fd,
            .grants = 0,
            .idle = false,
            .spoilt = false,
            .inherited = false,
            .pinned = false,
            .stamp = 0,
        };
        const number = self.numberOf(one);
        const row = &self.table.blocks[@intCast(number)];
        row.bytes = bytes;
        row.fd = @intCast(fd);
        @atomicStore(u64, &row.inode, file.?.inode, .release);
        return number;
    }

    fn newestIdle(self: *Blocks, bytes: u64) ?*Block {
        var best: ?*Block = null;
        for (&self.rows) |*one| {
            if (one.pages == null or !one.idle or one.bytes != bytes) continue;
            if (best == null or one.stamp > best.?.stamp) best = one;
        }
        return best;
    }

    fn oldestIdle(self: *Blocks) ?*Block {
        var best: ?*Block = null;
        for (&self.rows) |*one| {
            if (one.pages == null or !one.idle) continue;
            if (best == null or one.stamp < best.?.stamp) best = one;
        }
        return best;
    }

    fn emptyPlace(self: *Blocks) ?*Block {
        for (&self.rows) |*one| {
            if (one.pages == null) return one;
        }
        const oldest = self.oldestIdle() orelse return null;
        self.retire(oldest);
        return oldest;
    }

    fn numberOf(self: *const Blocks, one: *const Block) i32 {
        const place = (@intFromPtr(one) - @intFromPtr(&self.rows)) / @sizeOf(Block);
        assert(place < limits.BLOCKS_MAX);
        return @intCast(1 + place);
    }

    /// The block of a number that was taken and not given back.
    pub fn find(self: *Blocks, number: u32) ?*Block {
        if (number == 0 or number > limits.BLOCKS_MAX) return null;
        const one = &self.rows[number - 1];
        return if (one.pages != null and !one.idle) one else null;
    }

    /// Take a block back, all of whose grants were dropped.
    pub fn giveBack(self: *Blocks, one: *Block) void {
        assert(one.grants == 0);
        assert(one.pages != null);
        assert(!one.idle);
        if (one.spoilt or one.inherited) return self.retire(one); // BM-1
        self.clock += 1;
        one.stamp = self.clock;
        one.idle = true;
        self.idle_bytes += one.bytes;
        while (self.idle_bytes > limits.BLOCK_IDLE_BYTES_MAX) self.retire(self.oldestIdle().?); // what is idle is there
    }

    fn retire(self: *Blocks, one: *Block) void {
        assert(one.pages != null);
        assert(one.grants == 0);
        if (one.idle) assert(one.bytes <= self.idle_bytes);
        if (one.idle) self.idle_bytes -= one.bytes;
        const row = &self.table.blocks[@intCast(self.numberOf(one))];
        @atomicStore(u64, &row.inode, 0, .release);
        if (!one.pinned) sys.unmap(one.pages.?, @intCast(one.bytes)); // BM-2
        sys.closeAt(&one.fd);
        one.pages = null;
        one.idle = false;
    }

    /// A child was forked, which has the blocks that are in use, too.
    pub fn markInherited(self: *Blocks) void {
        for (&self.rows) |*one| {
            if (one.pages != null and !one.idle) one.inherited = true;
        }
    }

    /// Close all descriptors; also what a forked child does.
    pub fn closeFds(self: *Blocks) void {
        for (&self.rows) |*one| if (one.pages != null) sys.closeAt(&one.fd);
    }

    /// Give back what is not used. What was not given back stays mapped.
    pub fn deinit(self: *Blocks) void {
        for (&self.rows) |*one| if (one.pages != null and one.idle) self.retire(one);
        self.closeFds();
    }
};

// ---- tests ----

const testing = std.testing;

const Rig = struct {
    blocks: *Blocks,

    fn init() !Rig {
        const blocks = try testing.allocator.create(Blocks);
        @memset(std.mem.asBytes(blocks), 0);
        blocks.table = @ptrCast(@alignCast(sys.mapPrivate(ledger.Table.BYTES).?));
        return .{ .blocks = blocks };
    }

    fn deinit(self: Rig) void {
        self.blocks.deinit();
        sys.unmap(@ptrCast(@alignCast(self.blocks.table)), ledger.Table.BYTES);
        testing.allocator.destroy(self.blocks);
    }

    fn take(self: Rig, size: u64) u32 {
        return @intCast(self.blocks.take(size));
    }

    fn giveBack(self: Rig, number: u32) void {
        self.blocks.giveBack(self.blocks.find(number).?);
    }
};

test "sizes that differ little share their blocks" {
    const mib = 1 << 20;
    const small = [_][2]u64{ .{ 1, 4096 }, .{ 4096, 4096 }, .{ 4097, 8192 } };
    const cases = small ++ [_][2]u64{ .{ 64 * mib, 64 * mib }, .{ 65 * mib, 72 * mib } };
    for (cases) |case| {
        try testing.expectEqual(case[1], Blocks.classOf(case[0]));
    }
}

test "a block that was given back is used again" {
    const rig = try Rig.init();
    defer rig.deinit();
    const first = rig.take(5000);
    const pages = rig.blocks.find(first).?.pages.?;
    pages[7999] = 7;
    rig.giveBack(first);
    try testing.expectEqual(null, rig.blocks.find(first));
    try testing.expect(rig.take(9000) != first);
    try testing.expectEqual(first, rig.take(8000));
    try testing.expectEqual(pages, rig.blocks.find(first).?.pages.?);
    rig.giveBack(first);
}

test "what may still be looked at is not used again" {
    const rig = try Rig.init();
    defer rig.deinit();
    const first = rig.take(4096);
    const second = rig.take(4096);
    try testing.expect(rig.blocks.table.blocks[first].inode != rig.blocks.table.blocks[second].inode);
    rig.blocks.find(first).?.spoilt = true;
    rig.blocks.markInherited();
    rig.giveBack(first);
    rig.giveBack(second);
    try testing.expectEqual(0, rig.blocks.idle_bytes);
    try testing.expectEqual(0, rig.blocks.table.blocks[first].inode);
}

test "blocks and what is idle of them are bounded" {
    const rig = try Rig.init();
    defer rig.deinit();
    var numbers: [limits.BLOCKS_MAX]u32 = undefined;
    for (&numbers) |*number| number.* = rig.take(4096);
    try testing.expectEqual(0, rig.blocks.take(4096));
    rig.giveBack(numbers[9]);
    const larger = rig.take(8192);
    try testing.expectEqual(numbers[9], larger);
    rig.giveBack(larger);
    rig.blocks.idle_bytes = limits.BLOCK_IDLE_BYTES_MAX; // as if there were more
    rig.giveBack(numbers[8]);
    try testing.expectEqual(limits.BLOCK_IDLE_BYTES_MAX - 8192 + 4096, rig.blocks.idle_bytes);
    try testing.expectEqual(null, rig.blocks.rows[larger - 1].pages);
    rig.blocks.idle_bytes = 4096;
    for (numbers) |number| if (number != numbers[9] and number != numbers[8]) rig.giveBack(number);
}
