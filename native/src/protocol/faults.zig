//! The table of faults that a test has planned for links and for calls of the operating system. Its memory is shared by
//! the process of the test, which alone adds and heals, and by the processes that were handed its descriptor when they
//! were spawned: that descriptor is the capability, and a process without it has no table. PURE, but for the atomics.
//!
//! FT-1 A fault is for one direction of one link, and happens at its receiver: it needs no help of the other one, and
//! healing does not travel by the link that is to be healed. FT-2 A row is complete before its state says so. FT-3 What
//! is drawn comes from the seed of the row. FT-4 Rows are written to by any armed process; numbers are checked, and
//! whatever stands there costs the link at most.

const std = @import("std");
const limits = @import("../limits.zig");

pub const Kind = enum(u32) {
    /// `amount`: seconds.
    delay = 1,
    reorder = 2,
    /// Bytes a second.
    bandwidth = 3,
    /// Probability.
    drop = 4,
    duplicate = 5,
    corrupt = 6,
    /// Bytes that pass before the link is lost.
    reset = 7,
    /// Nothing passes, not even heartbeats.
    hold = 8,
    /// The nth call of the system that could fail with `code`, and the next ones, do. For `target`, from anywhere.
    refuse = 9,
};

pub const Rule = extern struct {
    source: u64,
    target: u64,
    kind: u32,
    /// errno of `refuse`.
    code: i32,
    amount: f64,
    nth: u64,
    times: u64,
    random: u64,
};

/// Shared: fixed layout.
pub const Row = extern struct {
    rule: Rule align(128),
    /// 0 free, 1 in force.
    state: u32,
    /// When it happened first, on the monotonic clock; 0 = not yet. How often.
    first_ns: u64,
    hits: u64,
    /// Bytes, or calls, that were counted so far; on the clock, until when the line is busy.
    passed: u64,
    busy_until: u64,
};

/// Shared: fixed layout.
pub const Table = extern struct {
    magic: u64,
    secret: u64,
    /// Rows from here on were never used.
    used: u32,
    rows: [limits.FAULT_RULES_MAX]Row align(128),

    pub const MAGIC = 0x7472_696D_6661_756C;
    pub const BYTES = std.mem.alignForward(usize, @sizeOf(Table), 4096);

    fn inUse(self: *Table) []Row {
        return self.rows[0..@min(@atomicLoad(u32, &self.used, .acquire), self.rows.len)];
    }

    /// Add a rule. Null: the table is full.
    pub fn add(self: *Table, rule: Rule) ?u32 {
        for (&self.rows, 0..) |*row, i| {
            if (@atomicLoad(u32, &row.state, .monotonic) != 0) continue;
            row.rule = rule;
            row.first_ns = 0;
            row.hits = 0;
            row.passed = 0;
            row.busy_until = 0;
            @atomicStore(u32, &row.state, 1, .release); // FT-2
            const index: u32 = @intCast(i);
            if (index >= self.used) @atomicStore(u32, &self.used, index + 1, .release);
            return index;
        }
        return null;
    }

    /// End a rule. Its counts stay until the row is used again.
    pub fn heal(self: *Table, index: u32) void {
        @atomicStore(u32, &self.rows[index].state, 0, .release);
    }

    /// Whether nothing passes from `source` to `target`.
    pub fn isHeld(self: *Table, source: u64, target: u64) bool {
        for (self.inUse()) |*row| {
            if (!matches(row, source, target) or row.rule.kind != @intFromEnum(Kind.hold)) continue;
            return true;
        }
        return false;
    }

    /// What becomes of a frame that has come now.
    pub fn judge(self: *Table, source: u64, target: u64, bytes: u64, now: u64, is_content: bool) Verdict {
        var verdict = Verdict{ .due = now };
        for (self.inUse()) |*row| {
            if (matches(row, source, target)) weigh(row, bytes, now, is_content, &verdict);
        }
        return verdict;
    }

    /// Whether the call that is about to be made is to fail; with which errno, or 0.
    pub fn refuses(self: *Table, target: u64, codes: []const i32, now: u64) i32 {
        for (self.inUse()) |*row| {
            if (@atomicLoad(u32, &row.state, .acquire) != 1 or row.rule.target != target) continue;
            if (row.rule.kind != @intFromEnum(Kind.refuse)) continue;
            if (std.mem.indexOfScalar(i32, codes, row.rule.code) == null) continue;
            row.passed +|= 1;
            if (row.passed < row.rule.nth or row.passed - row.rule.nth >= row.rule.times) continue;
            note(row, now);
            return row.rule.code;
        }
        return 0;
    }
};

pub const Fate = enum(u8) { arrives, lost, repeated, damaged };

pub const Verdict = struct {
    due: u64,
    fate: Fate = .arrives,
    /// For the damage.
    random: u64 = 0,
};

fn matches(row: *Row, source: u64, target: u64) bool {
    return @atomicLoad(u32, &row.state, .acquire) == 1 and row.rule.source == source and row.rule.target == target;
}

fn note(row: *Row, now: u64) void {
    if (@atomicLoad(u64, &row.first_ns, .monotonic) == 0) @atomicStore(u64, &row.first_ns, now, .monotonic);
    @atomicStore(u64, &row.hits, row.hits +| 1, .release);
}

fn weigh(row: *Row, bytes: u64, now: u64, is_content: bool, verdict: *Verdict) void {
    const amount = row.rule.amount;
    switch (std.enums.fromInt(Kind, row.rule.kind) orelse return) { // FT-4
        .delay => verdict.due +|= nanoseconds(amount),
        .reorder => verdict.due +|= nanoseconds(amount * chance(row)),
        .bandwidth => {
            row.busy_until = @max(row.busy_until, now) +| nanoseconds(@as(f64, @floatFromInt(bytes)) / amount);
            verdict.due +|= row.busy_until - now;
        },
        .drop, .duplicate, .corrupt => |kind| {
            if (!is_content or verdict.fate != .arrives or chance(row) >= amount) return;
            verdict.fate = switch (kind) {
                .drop => .lost,
                .duplicate => .repeated,
                else => .damaged,
            };
            verdict.random = draw(row);
        },
        .reset => {
            row.passed +|= bytes;
            if (!is_content or @as(f64, @floatFromInt(row.passed)) <= amount) return;
            verdict.fate = .lost;
        },
        .hold, .refuse => return,
    }
    note(row, now);
}

/// Seconds of a row as nanoseconds; whatever cannot be is nothing, or very long.
fn nanoseconds(seconds: f64) u64 {
    if (!(seconds > 0)) return 0;
    return @intFromFloat(@min(seconds, limits.FAULT_SECONDS_MAX) * 1e9);
}

/// splitmix64
fn draw(row: *Row) u64 {
    row.rule.random +%= 0x9E37_79B9_7F4A_7C15;
    var mixed = row.rule.random;
    mixed = (mixed ^ (mixed >> 30)) *% 0xBF58_476D_1CE4_E5B9;
    mixed = (mixed ^ (mixed >> 27)) *% 0x94D0_49BB_1331_11EB;
    return mixed ^ (mixed >> 31);
}

fn chance(row: *Row) f64 {
    return @as(f64, @floatFromInt(draw(row) >> 11)) * 0x1p-53;
}

// ---- tests ----

const testing = std.testing;

fn newTable() !*Table {
    const table = try testing.allocator.create(Table);
    @memset(std.mem.asBytes(table), 0);
    return table;
}

fn ruleOf(kind: Kind, amount: f64) Rule {
    return .{
        .source = 1,
        .target = 2,
        .kind = @intFromEnum(kind),
        .code = 0,
        .amount = amount,
        .nth = 0,
        .times = 0,
        .random = 7,
    };
}

test "a rule is for one direction of one link, until it is healed" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    const index = table.add(ruleOf(.delay, 0.5)).?;

    try testing.expectEqual(500_000_010, table.judge(1, 2, 100, 10, true).due);
    try testing.expectEqual(10, table.judge(2, 1, 100, 10, true).due);
    try testing.expectEqual(10, table.judge(1, 3, 100, 10, true).due);
    try testing.expectEqual(1, table.rows[index].hits);
    try testing.expectEqual(10, table.rows[index].first_ns);
    table.heal(index);
    try testing.expectEqual(10, table.judge(1, 2, 100, 10, true).due);
    try testing.expectEqual(index, table.add(ruleOf(.delay, 1)).?);
}

test "delays add up, and a narrow line is busy with what came before" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    _ = table.add(ruleOf(.bandwidth, 1000)).?;
    _ = table.add(ruleOf(.delay, 1)).?;

    try testing.expectEqual(2_000_000_000, table.judge(1, 2, 1000, 0, true).due);
    try testing.expectEqual(3_000_000_000, table.judge(1, 2, 1000, 0, true).due);
}

test "a link is reset by the frame that exceeds the bytes" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    const index = table.add(ruleOf(.reset, 250)).?;

    try testing.expectEqual(Fate.arrives, table.judge(1, 2, 125, 0, true).fate);
    try testing.expectEqual(Fate.arrives, table.judge(1, 2, 125, 0, true).fate);
    try testing.expectEqual(0, table.rows[index].hits);
    try testing.expectEqual(Fate.lost, table.judge(1, 2, 1, 0, true).fate);
}

test "chance follows the seed, and its probability" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    const index = table.add(ruleOf(.drop, 0.25)).?;
    var first: [400]Fate = undefined;
    var lost: u32 = 0;
    for (&first) |*fate| {
        fate.* = table.judge(1, 2, 32, 0, true).fate;
        lost += @intFromBool(fate.* == .lost);
    }
    try testing.expect(lost > 60 and lost < 140);
    table.heal(index);
    _ = table.add(ruleOf(.drop, 0.25)).?;
    for (first) |fate| try testing.expectEqual(fate, table.judge(1, 2, 32, 0, true).fate);
    for (0..100) |_| try testing.expectEqual(Fate.arrives, table.judge(1, 2, 32, 0, false).fate);
}

test "the nth call is refused, and those after it, where it could fail so" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    var rule = ruleOf(.refuse, 0);
    rule.code = 28;
    rule.nth = 2;
    rule.times = 2;
    _ = table.add(rule).?;

    const told = [_]i32{ 0, 28, 28, 0, 0 };
    try testing.expectEqual(0, table.refuses(2, &.{24}, 5));
    for (told) |code| try testing.expectEqual(code, table.refuses(2, &.{ 24, 28 }, 5));
    try testing.expectEqual(0, table.refuses(1, &.{28}, 5));
}

test "a table is full when it is, and nonsense in it does no harm" {
    const table = try newTable();
    defer testing.allocator.destroy(table);
    const nan = std.math.nan(f64);
    for (0..limits.FAULT_RULES_MAX) |i| {
        var rule = ruleOf(.delay, if (i % 2 == 0) nan else -std.math.inf(f64));
        rule.kind = @intCast(i);
        try testing.expect(table.add(rule) != null);
    }
    try testing.expectEqual(null, table.add(ruleOf(.delay, 1)));
    table.used = 99_999_999;
    _ = table.judge(1, 2, std.math.maxInt(u64), 1, true);
    try testing.expect(table.isHeld(1, 2));
}
