//! The table of a process's grants, in a sealed memfd that others of the host map themselves (docs/design/memory.md).
//! The owner writes rows and blocks; readers write claims and locks.
//!
//!     row:    empty --grant--> granted --revoke--> revoked --drop--> empty    (each grant has a new generation)
//!     claim:  free --take--> a process is at a place --leave, or its holder has ended--> free
//!
//! LE-1 A claim is taken before the word of its row is looked at; the owner changes the word before it looks at the
//! claims (both seq_cst). So one of the two sees the other: a reader that found its grant in force is waited for.
//! LE-2 A claim is one word that says who: there is no moment at which it is taken and anonymous. LE-3 Claims of
//! processes that have ended do not count. LE-4 A row is complete before its word says so, and is not written to while
//! any process may have a claim on it. LE-5 What stands here may have been written by any process of this user: readers
//! check what they read, once read; owners read nothing back but claims and locks, which cost time at most.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

const MAGIC = 0x7472_696D_6C65_6467;

/// One more at every change of the table.
const LAYOUT: u32 = 1;

pub const State = enum(u32) { empty = 0, granted = 1, revoked = 2 };

/// The word of a row: generation and state in one.
pub fn wordOf(generation: u32, state: State) u64 {
    return @as(u64, generation) << 32 | @intFromEnum(state);
}

pub const RIGHT_READ: u32 = 1;
pub const RIGHT_WRITE: u32 = 2;

/// What is asked of a grant.
pub const Wanted = struct {
    place: u32,
    generation: u32,
    secret: [16]u8,
    rights: u32,
    offset: u64,
    size: u64,
};

/// Whether a grant, by its word and terms, allows what is wanted: a status.
pub fn judge(word: u64, terms: *const Terms, wanted: *const Wanted) i32 {
    const generation: u32 = @truncate(word >> 32);
    if (wanted.generation == 0 or wanted.generation > generation) return status.ERR_DENIED; // never was
    if (word != wordOf(wanted.generation, .granted)) return status.ERR_REVOKED;
    if (!std.crypto.timing_safe.eql([16]u8, terms.secret, wanted.secret)) return status.ERR_DENIED;
    if (terms.rights == 0) return status.ERR_DEVICE; // processors do not reach it, and the terms do not say where it is
    if (wanted.rights & ~terms.rights != 0) return status.ERR_DENIED;
    if (wanted.offset > terms.size or wanted.size > terms.size - wanted.offset) return status.ERR_DENIED;
    // What the terms say may be anything here, but nothing that is asked for leaves the address space.
    if (terms.address +% terms.size < terms.address or terms.block_offset +% terms.size < terms.block_offset)
        return status.ERR_DENIED;
    return status.OK;
}

/// What a grant says, as far as others are concerned.
pub const Terms = extern struct {
    address: u64,
    size: u64,
    /// Where the range begins in its block.
    block_offset: u64,
    /// 0: in none.
    block: u32,
    /// 0: memory of a device, which is told apart from that (`grants.Range`).
    rights: u32,
    secret: [16]u8,
};

/// Shared: fixed layout.
pub const Row = extern struct {
    word: u64 align(128),
    /// The claim whose holder is at an atomic operation; 0 = none.
    lock: u64,
    terms: Terms,

    /// The word as it is now.
    pub fn now(self: *const Row) u64 {
        return @atomicLoad(u64, &self.word, .seq_cst);
    }

    /// The terms, read once. They hold if the word is still the same.
    pub fn read(self: *const Row) Terms {
        return @as(*const volatile Terms, &self.terms).*;
    }

    /// Take the lock. False: it is taken; nothing waits here.
    pub fn tryLock(self: *Row, mine: Claim) bool {
        const found = @cmpxchgStrong(u64, &self.lock, 0, mine.word(), .acquire, .monotonic) orelse return true;
        _ = found;
        return false;
    }

    /// Take the lock off a holder that has ended. The next `tryLock` may succeed.
    pub fn breakLock(self: *Row) void {
        const found = @atomicLoad(u64, &self.lock, .monotonic);
        if (found == 0 or Claim.parse(found).isHeld()) return;
        _ = @cmpxchgStrong(u64, &self.lock, found, 0, .acq_rel, .monotonic);
    }

    /// Give the lock back, unless it is not ours any more.
    pub fn unlock(self: *Row, mine: Claim) void {
        _ = @cmpxchgStrong(u64, &self.lock, mine.word(), 0, .release, .monotonic);
    }
};

/// Shared: fixed layout. What a block is to others.
pub const BlockRow = extern struct {
    /// By which its memfd is told from others; 0 = no block.
    inode: u64,
    bytes: u64,
    /// Number of its descriptor in the owner.
    fd: u32,
    reserved: u32,
};

const PID_BITS = 22;
const START_BITS = 28;
const PLACE_BITS = 13;
const HELD: u64 = 1 << 63;

comptime {
    assert(process.PID_MAX == 1 << PID_BITS and limits.GRANTS_MAX <= 1 << PLACE_BITS);
    assert(PID_BITS + START_BITS + PLACE_BITS == 63);
}

/// Who is at which place: LE-2.
pub const Claim = struct {
    pid: u32,
    /// The lower bits of the time its process has started at: a pid comes again, with the same bits after a month.
    started: u64,
    place: u32,

    const START_MASK: u64 = (1 << START_BITS) - 1;

    fn word(self: Claim) u64 {
        assert(self.pid < process.PID_MAX); // else it would say another place
        assert(self.place < limits.GRANTS_MAX);
        const start = (self.started & START_MASK) << PID_BITS;
        return HELD | @as(u64, self.place) << (PID_BITS + START_BITS) | start | self.pid;
    }

    fn parse(raw: u64) Claim {
        return .{
            .pid = @truncate(raw & ((1 << PID_BITS) - 1)),
            .started = raw >> PID_BITS & START_MASK,
            .place = @truncate(raw >> (PID_BITS + START_BITS) & ((1 << PLACE_BITS) - 1)),
        };
    }

    /// Whether its holder lives.
    fn isHeld(self: Claim) bool {
        return process.lives(self.pid, self.started, START_MASK);
    }
};

/// Shared: fixed layout.
pub const Table = extern struct {
    magic: u64,
    layout: u32,
    reserved: u32,
    epoch: u64,
    /// Where the owner has the table, by which process_vm_readv is tried.
    address: u64,
    blocks: [1 + limits.BLOCKS_MAX]BlockRow,
    claims: [limits.CLAIMS_MAX]u64 align(128),
    rows: [limits.GRANTS_MAX]Row align(128),

    pub const BYTES = std.mem.alignForward(usize, @sizeOf(Table), 4096);

    /// What a table begins with, by which it is known again.
    pub const Head = extern struct { magic: u64, layout: u32, reserved: u32, epoch: u64, address: u64 };

    /// Write the head of a new table; the rest is zero.
    pub fn init(self: *Table, epoch: u64) void {
        assert(@intFromPtr(self) % 4096 == 0);
        self.magic = MAGIC;
        self.layout = LAYOUT;
        self.epoch = epoch;
        self.address = @intFromPtr(self);
    }

    /// The head, read once.
    pub fn head(self: *const Table) Head {
        return @as(*const volatile Head, @ptrCast(self)).*;
    }

    // ---- readers ----

    /// Whether a mapping is the table of the process of this epoch.
    pub fn isOf(self: *const Table, epoch: u64) bool {
        const said = self.head();
        return said.magic == MAGIC and said.layout == LAYOUT and said.epoch == epoch;
    }

    /// Take a claim. Null: all are held by the living.
    pub fn claim(self: *Table, mine: Claim) ?u32 {
        assert(mine.pid > 0);
        assert(mine.pid < process.PID_MAX);
        assert(mine.place < limits.GRANTS_MAX);
        // Processes begin in different cache lines.
        const first = mine.pid *% 8;
        for (0..limits.CLAIMS_MAX) |i| {
            const index: u32 = @intCast((first +% i) % limits.CLAIMS_MAX);
            const one = &self.claims[index];
            if (@atomicLoad(u64, one, .monotonic) != 0) continue;
            if (@cmpxchgStrong(u64, one, 0, mine.word(), .seq_cst, .monotonic) == null) return index; // LE-1
        }
        for (&self.claims, 0..) |*one, i| {
            const found = @atomicLoad(u64, one, .monotonic);
            if (found != 0 and Claim.parse(found).isHeld()) continue;
            if (@cmpxchgStrong(u64, one, found, mine.word(), .seq_cst, .monotonic) == null) return @intCast(i); // LE-3
        }
        return null;
    }

    /// Give a claim back.
    pub fn leave(self: *Table, index: u32, mine: Claim) void {
        _ = @cmpxchgStrong(u64, &self.claims[index], mine.word(), 0, .seq_cst, .monotonic); // else it is not ours: LE-5
    }

    // ---- the owner ----

    /// Let a grant begin.
    pub fn grant(self: *Table, place: u32, generation: u32, terms: Terms) void {
        assert(place < limits.GRANTS_MAX);
        assert(generation > 0); // 0 is asked for by no name
        const row = &self.rows[place];
        row.terms = terms;
        @atomicStore(u64, &row.lock, 0, .monotonic);
        @atomicStore(u64, &row.word, wordOf(generation, .granted), .seq_cst); // LE-4
    }

    /// Let nothing new begin, or take the row out of use.
    pub fn end(self: *Table, place: u32, generation: u32, state: State) void {
        assert(place < limits.GRANTS_MAX);
        assert(generation > 0);
        assert(state != .granted);
        @atomicStore(u64, &self.rows[place].word, wordOf(generation, state), .seq_cst); // LE-1
    }

    /// Whether a process that lives has a claim on a place.
    pub fn isClaimed(self: *Table, place: u32) bool {
        assert(place < limits.GRANTS_MAX);
        for (&self.claims) |*one| {
            const found = @atomicLoad(u64, one, .seq_cst); // LE-1
            if (found == 0) continue;
            const who = Claim.parse(found);
            if (who.place != place) continue;
            if (who.isHeld()) return true;
            _ = @cmpxchgStrong(u64, one, found, 0, .seq_cst, .monotonic); // LE-3
        }
        return false;
    }
};

comptime {
    assert(@sizeOf(Row) == 128 and @sizeOf(Terms) == 48 and @sizeOf(BlockRow) == 24);
    assert(@sizeOf(Table.Head) == @offsetOf(Table, "blocks"));
}

// ---- tests ----

const testing = std.testing;

fn newTable() *Table {
    const memory = sys.mapPrivate(Table.BYTES).?;
    const table: *Table = @ptrCast(@alignCast(memory));
    table.init(7);
    return table;
}

fn drop(table: *Table) void {
    sys.unmap(@ptrCast(@alignCast(table)), Table.BYTES);
}

fn ours(place: u32) Claim {
    const pid: u32 = @intCast(sys.getpid());
    return .{ .pid = pid, .started = process.startedAt(pid).?, .place = place };
}

fn deads(place: u32) Claim {
    return .{ .pid = process.PID_MAX - 1, .started = 5, .place = place };
}

const some_terms = Terms{ .address = 1, .size = 8, .block_offset = 0, .block = 0, .rights = 3, .secret = @splat(1) };

test "only what a grant allows is allowed" {
    const word = wordOf(5, .granted);
    const right = Wanted{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 1, .offset = 0, .size = 8 };
    try testing.expectEqual(status.OK, judge(word, &some_terms, &right));
    const max = std.math.maxInt(u64);
    for ([_]Wanted{
        .{ .place = 3, .generation = 0, .secret = @splat(1), .rights = 1, .offset = 0, .size = 8 },
        .{ .place = 3, .generation = 6, .secret = @splat(1), .rights = 1, .offset = 0, .size = 8 },
        .{ .place = 3, .generation = 5, .secret = @splat(2), .rights = 1, .offset = 0, .size = 8 },
        .{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 4, .offset = 0, .size = 8 },
        .{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 1, .offset = 1, .size = 8 },
        .{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 1, .offset = 9, .size = 0 },
        .{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 1, .offset = max, .size = 8 },
        .{ .place = 3, .generation = 5, .secret = @splat(1), .rights = 1, .offset = 8, .size = max },
    }) |wrong| try testing.expectEqual(status.ERR_DENIED, judge(word, &some_terms, &wrong));
    for ([_]u64{ wordOf(5, .revoked), wordOf(5, .empty), wordOf(6, .granted), word | 4 }) |other| {
        try testing.expectEqual(status.ERR_REVOKED, judge(other, &some_terms, &right));
    }
    var of_device = some_terms;
    of_device.rights = 0;
    try testing.expectEqual(status.ERR_DEVICE, judge(word, &of_device, &right));
    try testing.expectEqual(status.ERR_REVOKED, judge(wordOf(5, .revoked), &of_device, &right));
    var over = some_terms;
    over.address = max;
    try testing.expectEqual(status.ERR_DENIED, judge(word, &over, &right));
}

test "a claim says who is where" {
    for ([_]u32{ 0, 1, limits.GRANTS_MAX - 1 }) |place| {
        const mine = Claim{ .pid = process.PID_MAX - 1, .started = (1 << START_BITS) - 1, .place = place };
        try testing.expectEqual(mine, Claim.parse(mine.word()));
        try testing.expect(mine.word() != 0);
    }
}

test "a table is known by its head" {
    const table = newTable();
    defer drop(table);
    try testing.expect(table.isOf(7));
    try testing.expect(!table.isOf(8));
    table.layout += 1;
    try testing.expect(!table.isOf(7));
}

test "a place is claimed until the claim is left" {
    const table = newTable();
    defer drop(table);
    const first = table.claim(ours(3)).?;
    const second = table.claim(ours(3)).?;
    try testing.expect(first != second);
    try testing.expect(table.isClaimed(3) and !table.isClaimed(4));
    table.leave(first, ours(3));
    try testing.expect(table.isClaimed(3));
    table.leave(second, ours(3));
    try testing.expect(!table.isClaimed(3));
}

test "claims of the dead do not count, and give their rows to the living" {
    const table = newTable();
    defer drop(table);
    _ = table.claim(deads(3)).?;
    try testing.expect(!table.isClaimed(3));
    for (0..limits.CLAIMS_MAX) |i| table.claims[i] = (if (i == 70) deads(5) else ours(4)).word();
    try testing.expectEqual(70, table.claim(ours(6)).?);
    try testing.expectEqual(null, table.claim(ours(6)));
}

test "a lock is one holder's, unless that has ended" {
    const table = newTable();
    defer drop(table);
    const row = &table.rows[3];
    try testing.expect(row.tryLock(ours(3)));
    row.breakLock();
    try testing.expect(!row.tryLock(ours(3)));
    row.unlock(ours(3));
    try testing.expect(row.tryLock(deads(3)));
    try testing.expect(!row.tryLock(ours(3)));
    row.unlock(ours(3)); // not ours to give back
    try testing.expect(!row.tryLock(ours(3)));
    row.breakLock();
    try testing.expect(row.tryLock(ours(3)));
}

/// A reader and an owner over one table: what the owner believes to be free is never looked at.
const Race = struct {
    table: *Table,
    /// Generations up to this one are over, and no access to them is open.
    freed: std.atomic.Value(u32) = .init(0),
    stop: std.atomic.Value(bool) = .init(false),
    seen: std.atomic.Value(u32) = .init(0),
    broken: bool = false,

    fn main(argument: ?*anyopaque) callconv(.c) ?*anyopaque {
        const self: *Race = @ptrCast(@alignCast(argument.?));
        const mine = ours(3);
        while (!self.stop.load(.monotonic)) {
            const index = self.table.claim(mine) orelse unreachable; // there are more rows than threads
            const word = self.table.rows[3].now();
            if (word & 0xFFFF_FFFF == @intFromEnum(State.granted)) {
                const generation: u32 = @truncate(word >> 32);
                for (0..20) |_| {
                    if (self.freed.load(.seq_cst) >= generation) self.broken = true;
                }
                self.seen.store(generation, .seq_cst);
            }
            self.table.leave(index, mine);
            sys.threadYield();
        }
        return null;
    }
};

test "who finds a grant in force is waited for, whatever the owner does meanwhile" {
    const table = newTable();
    defer drop(table);
    var races: [2]Race = .{ .{ .table = table }, .{ .table = table } };
    var threads: [2]sys.Thread = undefined;
    for (&races, &threads) |*race, *thread| thread.* = sys.threadStart(Race.main, race).?;
    for (1..40) |i| {
        const generation: u32 = @intCast(i);
        table.grant(3, generation, some_terms);
        while (races[i % 2].seen.load(.seq_cst) < generation) sys.threadYield();
        table.end(3, generation, .revoked);
        while (table.isClaimed(3)) sys.threadYield(); // readers leave soon
        for (&races) |*race| race.freed.store(generation, .seq_cst);
        table.end(3, generation, .empty);
    }
    for (&races, threads) |*race, thread| {
        race.stop.store(true, .monotonic);
        sys.threadJoin(thread);
        try testing.expect(!race.broken);
    }
}
