//! What this process has granted, as it knows it itself: the ledger repeats it for others, and is not believed. Places
//! are taken again with another generation, unless an access to one was open when its grant was dropped.
//!
//! GR-1 Who is at a grant from within this process (the carrier `local`, the server of `tcp`) counts in `uses`, taken
//! before the word is looked at, as claims are. GR-2 Rows are written to by T0 alone; T2 may look at them at any time.
//! GR-3 Memory of a device is in no terms: whoever goes by them, in this process or another, finds neither a right nor
//! an address. Only adapters are told where it is (docs/design/memory.md).

const std = @import("std");
const assert = std.debug.assert;
const former = @import("former.zig");
const ledger = @import("ledger.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");

const Terms = ledger.Terms;

/// Whose memory it is; as in trimesh.h.
pub const Memory = enum(u32) { host = 0, cuda = 1 };

/// What adapters may reach of a grant.
pub const Range = struct {
    memory: Memory,
    address: u64,
    size: u64,
    rights: u32,

    /// Of memory of the host, as its terms say.
    pub fn ofHost(terms: *const Terms) Range {
        return .{ .memory = .host, .address = terms.address, .size = terms.size, .rights = terms.rights };
    }
};

/// A grant in this process.
pub const Grant = struct {
    /// As in the ledger. All zero: this place was never used.
    word: u64,
    terms: Terms,
    /// For adapters. T0's.
    range: Range,
    uses: u32,
    /// Never to be used again.
    lost: bool,

    fn generation(self: *const Grant) u32 {
        return @truncate(@atomicLoad(u64, &self.word, .monotonic) >> 32);
    }

    fn state(self: *const Grant) ledger.State {
        return @enumFromInt(@as(u32, @truncate(@atomicLoad(u64, &self.word, .monotonic))));
    }

    /// The word as it is now.
    pub fn now(self: *const Grant) u64 {
        return @atomicLoad(u64, &self.word, .seq_cst);
    }

    /// Who has entered, leaves.
    pub fn leave(self: *Grant) void {
        const before = @atomicRmw(u32, &self.uses, .Sub, 1, .seq_cst);
        assert(before > 0);
    }

    fn isUsed(self: *const Grant) bool {
        return @atomicLoad(u32, &self.uses, .seq_cst) > 0;
    }
};

/// All grants of a process. All zero but for `table` is none.
pub const Grants = struct {
    table: *ledger.Table,
    rows: [limits.GRANTS_MAX]Grant,
    /// Places from here on were never used.
    places: u32,
    free: [limits.GRANTS_MAX]u16,
    free_count: u32,
    former: former.Former,

    // ---- T0 ----

    /// Grant. `place_out` and `generation_out` name it. False: no place is left.
    pub fn add(self: *Grants, terms: Terms, place_out: *u32, generation_out: *u32) bool {
        return self.addRange(terms, .ofHost(&terms), place_out, generation_out);
    }

    /// Grant memory of a device: GR-3.
    pub fn addDevice(self: *Grants, range: Range, secret: [16]u8, place_out: *u32, generation_out: *u32) bool {
        assert(range.memory != .host);
        const no_terms = Terms{ .address = 0, .size = 0, .block_offset = 0, .block = 0, .rights = 0, .secret = secret };
        return self.addRange(no_terms, range, place_out, generation_out);
    }

    fn addRange(self: *Grants, terms: Terms, range: Range, place_out: *u32, generation_out: *u32) bool {
        const place = self.takePlace() orelse return false;
        const row = &self.rows[place];
        assert(row.state() == .empty); // LE-4
        assert(!row.lost);
        const generation = row.generation() + 1;
        row.terms = terms;
        row.range = range;
        @atomicStore(u64, &row.word, ledger.wordOf(generation, .granted), .seq_cst);
        self.table.grant(place, generation, terms);
        assert(row.state() == .granted);
        place_out.* = place;
        generation_out.* = generation;
        return true;
    }

    fn takePlace(self: *Grants) ?u32 {
        assert(self.places <= limits.GRANTS_MAX);
        assert(self.free_count <= self.places);
        if (self.free_count > 0) {
            self.free_count -= 1;
            assert(self.free[self.free_count] < self.places);
            return self.free[self.free_count];
        }
        if (self.places == limits.GRANTS_MAX) return null;
        self.places += 1;
        return self.places - 1;
    }

    /// The grant of that name, in force or revoked.
    pub fn find(self: *Grants, place: u32, generation: u32) ?*Grant {
        if (place >= self.places or generation == 0) return null;
        const row = &self.rows[place];
        return if (row.generation() == generation and row.state() != .empty) row else null;
    }

    /// Let nothing new begin. Whether an access is still open.
    pub fn revoke(self: *Grants, place: u32, generation: u32) bool {
        const row = &self.rows[place];
        assert(row.generation() == generation);
        assert(row.state() != .empty);
        @atomicStore(u64, &row.word, ledger.wordOf(generation, .revoked), .seq_cst);
        self.table.end(place, generation, .revoked);
        return row.isUsed() or self.table.isClaimed(place);
    }

    pub const Dropped = enum { free, used_by_others, used_here };

    /// Forget a revoked grant, and say who is still at it.
    pub fn drop(self: *Grants, place: u32, generation: u32) Dropped {
        const row = &self.rows[place];
        assert(row.generation() == generation);
        assert(row.state() == .revoked);
        assert(!row.lost);
        const is_claimed = self.table.isClaimed(place);
        const dropped: Dropped = if (row.isUsed()) .used_here else if (is_claimed) .used_by_others else .free;
        self.former.add(place, generation, row.terms.secret);
        @atomicStore(u64, &row.word, ledger.wordOf(generation, .empty), .seq_cst);
        self.table.end(place, generation, .empty);
        row.lost = dropped != .free or generation == std.math.maxInt(u32); // a generation never comes again
        if (!row.lost) {
            assert(self.free_count < self.places);
            self.free[self.free_count] = @intCast(place);
            self.free_count += 1;
        }
        return dropped;
    }

    /// T2: the secret of a grant in force, revoked, or dropped not long ago. Null: there is none of that name.
    pub fn secretOf(self: *Grants, place: u32, generation: u32) ?[16]u8 {
        if (place >= limits.GRANTS_MAX or generation == 0) return null;
        const row = &self.rows[place];
        const before = row.now();
        const is_it = before == ledger.wordOf(generation, .granted) or before == ledger.wordOf(generation, .revoked);
        if (!is_it) return self.former.secretOf(place, generation);
        const secret = @as(*const volatile [16]u8, &row.terms.secret).*;
        // Terms are written to while the word says "empty" only.
        const after = row.now();
        const is_still = after == before or after == ledger.wordOf(generation, .revoked);
        return if (is_still) secret else self.former.secretOf(place, generation);
    }

    // ---- T0 and T2 ----

    /// Begin to use a grant from within this process. Null: `why` is the status.
    pub fn enter(self: *Grants, wanted: *const ledger.Wanted, why: *i32) ?*Grant {
        why.* = status.ERR_DENIED;
        if (wanted.place >= limits.GRANTS_MAX) return null;
        const row = &self.rows[wanted.place];
        _ = @atomicRmw(u32, &row.uses, .Add, 1, .seq_cst); // GR-1
        why.* = ledger.judge(row.now(), &row.terms, wanted);
        if (why.* == status.OK) return row;
        row.leave();
        return null;
    }
};

// ---- tests ----

const testing = std.testing;
const sys = @import("../system/sys.zig");

const some_terms = Terms{ .address = 4096, .size = 8, .block_offset = 0, .block = 0, .rights = 1, .secret = @splat(1) };

const Rig = struct {
    grants: *Grants,

    fn init() !Rig {
        const grants = try testing.allocator.create(Grants);
        @memset(std.mem.asBytes(grants), 0);
        grants.table = @ptrCast(@alignCast(sys.mapPrivate(ledger.Table.BYTES).?));
        return .{ .grants = grants };
    }

    fn deinit(self: Rig) void {
        sys.unmap(@ptrCast(@alignCast(self.grants.table)), ledger.Table.BYTES);
        testing.allocator.destroy(self.grants);
    }
};

fn wantedOf(place: u32, generation: u32) ledger.Wanted {
    return .{ .place = place, .generation = generation, .secret = @splat(1), .rights = 1, .offset = 0, .size = 8 };
}

test "a place is used again with another generation" {
    const rig = try Rig.init();
    defer rig.deinit();
    var place: u32 = 0;
    var generation: u32 = 0;
    try testing.expect(rig.grants.add(some_terms, &place, &generation));
    const first = wantedOf(place, generation);
    try testing.expect(!rig.grants.revoke(place, generation));
    try testing.expectEqual(.free, rig.grants.drop(place, generation));
    try testing.expectEqual(null, rig.grants.find(place, generation));
    try testing.expect(rig.grants.add(some_terms, &place, &generation));
    try testing.expectEqual(first.place, place);
    var why: i32 = 0;
    try testing.expectEqual(null, rig.grants.enter(&first, &why));
    try testing.expectEqual(status.ERR_REVOKED, why);
    rig.grants.enter(&wantedOf(place, generation), &why).?.leave();
}

test "the secret of a grant is known until long after it was dropped" {
    const rig = try Rig.init();
    defer rig.deinit();
    var place: u32 = 0;
    var first: u32 = 0;
    var second: u32 = 0;
    try testing.expectEqual(null, rig.grants.secretOf(0, 1));
    try testing.expect(rig.grants.add(some_terms, &place, &first));
    try testing.expectEqual(some_terms.secret, rig.grants.secretOf(place, first).?);
    _ = rig.grants.revoke(place, first);
    try testing.expectEqual(some_terms.secret, rig.grants.secretOf(place, first).?);
    _ = rig.grants.drop(place, first);
    try testing.expectEqual(some_terms.secret, rig.grants.secretOf(place, first).?);
    var terms = some_terms;
    terms.secret = @splat(2);
    try testing.expect(rig.grants.add(terms, &place, &second));
    try testing.expectEqual(some_terms.secret, rig.grants.secretOf(place, first).?);
    try testing.expectEqual(terms.secret, rig.grants.secretOf(place, second).?);
    for ([_]u32{ 0, second + 1, std.math.maxInt(u32) }) |never| {
        try testing.expectEqual(null, rig.grants.secretOf(place, never));
    }
    try testing.expectEqual(null, rig.grants.secretOf(limits.GRANTS_MAX, 1));
}

test "a place with an access that stays open is lost" {
    const rig = try Rig.init();
    defer rig.deinit();
    var place: u32 = 0;
    var generation: u32 = 0;
    var why: i32 = 0;
    try testing.expect(rig.grants.add(some_terms, &place, &generation));
    const inside = rig.grants.enter(&wantedOf(place, generation), &why).?;
    try testing.expect(rig.grants.revoke(place, generation));
    try testing.expectEqual(.used_here, rig.grants.drop(place, generation));
    inside.leave();
    const lost = place;
    try testing.expect(rig.grants.add(some_terms, &place, &generation));
    try testing.expect(place != lost);
}

test "grants are bounded" {
    const rig = try Rig.init();
    defer rig.deinit();
    var place: u32 = 0;
    var generation: u32 = 0;
    for (0..limits.GRANTS_MAX) |_| try testing.expect(rig.grants.add(some_terms, &place, &generation));
    try testing.expect(!rig.grants.add(some_terms, &place, &generation));
    _ = rig.grants.revoke(70, 1);
    _ = rig.grants.drop(70, 1);
    try testing.expect(rig.grants.add(some_terms, &place, &generation));
    try testing.expectEqual(70, place);
}
