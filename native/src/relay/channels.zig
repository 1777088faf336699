//! The channels of one session of hosts: found by their numbers, in turns. PURE. Memory is given once.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");

pub const Index = u16;

pub const NONE: Index = std.math.maxInt(Index);

/// Those that each side may open, and channel 0.
pub const CHANNELS = 2 * limits.HOST_CHANNELS_MAX + 1;

/// Numbers grow by two; this many buckets are as good as a table of all.
pub const BUCKETS = 1 << 16;

/// The channel that exists from the start: it has the first index, too.
pub const CONTROL: Index = 0;

pub const Channel = struct {
    number: u32,
    is_used: bool = true,
    /// Bytes that the peer has granted, and that were sent; that have come, that were taken here, that were granted.
    granted: u64 = limits.HOST_WINDOW_BYTES,
    sent: u64 = 0,
    received: u64 = 0,
    consumed: u64 = 0,
    allowed: u64 = limits.HOST_WINDOW_BYTES,
    /// There may be bytes to read for it.
    is_ready: bool = false,
    /// No more is read; the peer has been told so; the peer has said so.
    is_finished: bool = false,
    has_closed: bool = false,
    peer_closed: bool = false,
    /// Gone here; the peer is to be told.
    is_reset: bool = false,
    owes_window: bool = false,
    /// Next ones: in the bucket, in the turns, in what is to be said.
    next: Index = NONE,
    next_turn: Index = NONE,
    next_chore: Index = NONE,
    in_turns: bool = false,
    in_chores: bool = false,

    /// What is so between two calls. What has come is held against `allowed` first, and taken by the reader then.
    pub fn check(self: *const Channel) void {
        assert(self.is_used);
        assert(self.sent <= self.granted); // HM-3
        assert(self.consumed <= self.received);
        assert(self.consumed <= self.allowed);
        assert(self.allowed - self.consumed <= limits.HOST_WINDOW_BYTES);
        assert(!self.has_closed or self.is_finished);
    }

    /// Whether it may have its turn.
    pub fn mayRead(self: *const Channel) bool {
        assert(self.sent <= self.granted);
        return self.is_ready and !self.is_finished and !self.is_reset and self.sent < self.granted;
    }
};

/// Channels in the order in which they came; `link` and `flag` are the fields that it uses.
pub fn Line(comptime link: []const u8, comptime flag: []const u8) type {
    return struct {
        first: Index = NONE,
        last: Index = NONE,

        const Self = @This();

        /// Put a channel at the end, unless it is there.
        pub fn join(self: *Self, all: []Channel, index: Index) void {
            assert((self.first == NONE) == (self.last == NONE));
            const one = &all[index];
            assert(one.is_used);
            if (@field(one, flag)) return;
            @field(one, flag) = true;
            @field(one, link) = NONE;
            if (self.last == NONE) self.first = index else @field(all[self.last], link) = index;
            self.last = index;
        }

        /// Take the first one away.
        pub fn shift(self: *Self, all: []Channel) ?Index {
            const index = self.first;
            if (index == NONE) return null;
            const one = &all[index];
            assert(@field(one, flag));
            assert(one.is_used);
            @field(one, flag) = false;
            self.first = @field(one, link);
            if (self.first == NONE) self.last = NONE;
            return index;
        }

        /// Take one away, wherever it is.
        pub fn leave(self: *Self, all: []Channel, index: Index) void {
            if (!@field(all[index], flag)) return;
            assert(self.first != NONE);
            @field(all[index], flag) = false;
            var before: Index = NONE;
            var at = self.first;
            while (at != index) : (at = @field(all[at], link)) before = at;
            const after = @field(all[index], link);
            if (before == NONE) self.first = after else @field(all[before], link) = after;
            if (self.last == index) self.last = before;
            assert((self.first == NONE) == (self.last == NONE));
        }
    };
}

pub const Table = struct {
    all: []Channel,
    buckets: []Index,
    used: u32 = 0,
    count: u32 = 0,
    free: Index = NONE,

    /// Memory of `CHANNELS` and `BUCKETS`; channel 0 is in it.
    pub fn init(all: []Channel, buckets: []Index) Table {
        assert(all.len == CHANNELS);
        assert(buckets.len == BUCKETS);
        var self = Table{ .all = all, .buckets = buckets };
        const control = self.add(0).?;
        assert(control == CONTROL);
        return self;
    }

    fn bucketOf(number: u32) u32 {
        return number % BUCKETS;
    }

    /// A new channel. Null: there are too many.
    pub fn add(self: *Table, number: u32) ?Index {
        assert(self.find(number) == null);
        assert(self.count <= self.used);
        const index = if (self.free != NONE) self.free else blk: {
            if (self.used == CHANNELS) return null;
            defer self.used += 1;
            break :blk @as(Index, @intCast(self.used));
        };
        assert(index < self.used);
        if (self.free == index) self.free = self.all[index].next;
        const bucket = &self.buckets[bucketOf(number)];
        self.all[index] = .{ .number = number, .next = bucket.* -% 1 }; // memory begins with zeros: 0 is none there
        bucket.* = index +% 1;
        self.count += 1;
        return index;
    }

    /// The channel of a number.
    pub fn find(self: *const Table, number: u32) ?Index {
        var at = self.buckets[bucketOf(number)] -% 1;
        while (at != NONE) : (at = self.all[at].next) if (self.all[at].number == number) return at;
        return null;
    }

    /// Forget one, which is in no line.
    pub fn remove(self: *Table, index: Index) void {
        const one = &self.all[index];
        assert(index != CONTROL);
        assert(one.is_used);
        assert(!one.in_turns);
        assert(!one.in_chores);
        const bucket = &self.buckets[bucketOf(one.number)];
        if (bucket.* -% 1 == index) {
            bucket.* = one.next +% 1;
        } else {
            var at = bucket.* -% 1;
            while (self.all[at].next != index) at = self.all[at].next;
            self.all[at].next = one.next;
        }
        one.is_used = false;
        one.next = self.free;
        self.free = index;
        self.count -= 1;
        assert(self.count > 0); // channel 0 stays
    }
};

const testing = std.testing;

fn newTable() !Table {
    const buckets = try testing.allocator.alloc(Index, BUCKETS);
    @memset(buckets, 0);
    return Table.init(try testing.allocator.alloc(Channel, CHANNELS), buckets);
}

fn freeTable(table: *Table) void {
    testing.allocator.free(table.all);
    testing.allocator.free(table.buckets);
}

test "channels are found by numbers that share a bucket, and forgotten in any order" {
    var table = try newTable();
    defer freeTable(&table);
    const numbers = [_]u32{ 1, 1 + BUCKETS, 1 + 2 * BUCKETS };
    var at: [3]Index = undefined;
    for (numbers, &at) |number, *place| place.* = table.add(number).?;
    for (numbers, at) |number, place| try testing.expectEqual(place, table.find(number).?);

    table.remove(at[1]);
    try testing.expectEqual(null, table.find(numbers[1]));
    try testing.expectEqual(at[0], table.find(numbers[0]).?);
    try testing.expectEqual(at[2], table.find(numbers[2]).?);
    try testing.expectEqual(at[1], table.add(5).?);
    for ([_]u32{ 1, 5, 1 + 2 * BUCKETS }) |number| table.remove(table.find(number).?);
    try testing.expectEqual(1, table.count);
    try testing.expectEqual(CONTROL, table.find(0).?);
}

test "a table has room for all, and no more" {
    var table = try newTable();
    defer freeTable(&table);
    for (1..CHANNELS) |number| try testing.expect(table.add(@intCast(number)) != null);
    try testing.expectEqual(null, table.add(CHANNELS));
}

test "a line keeps its order when one leaves it" {
    var table = try newTable();
    defer freeTable(&table);
    var line = Line("next_turn", "in_turns"){};
    var at: [4]Index = undefined;
    for (&at, 1..) |*place, number| place.* = table.add(@intCast(number)).?;
    for (at) |place| line.join(table.all, place);
    line.join(table.all, at[0]);
    line.leave(table.all, at[1]);
    line.leave(table.all, at[3]);
    line.leave(table.all, at[3]);
    line.join(table.all, at[1]);
    for ([_]Index{ at[0], at[2], at[1] }) |wanted| try testing.expectEqual(wanted, line.shift(table.all).?);
    try testing.expectEqual(null, line.shift(table.all));
}
