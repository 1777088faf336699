//! For how long a process should spin before it sleeps: by what a wake costs on this machine, how long answers take,
//! and how much of its time went into spinning for nothing. Pure: it is told of times.
//!
//! SB-1 A wait of up to `SPIN_WAKES` wakes is short, as is one of `SPIN_SHORT_NS`: who spins through the first pays at
//! most that many times what it saves.
//! SB-2 The bound is twice what short waits took of late, but at least one wake (who spins in vain for as long as a
//! wake takes pays twice of what the best choice would cost) and at most what is short.
//! SB-3 At most one part in `SPIN_VAIN_SHARE` of all time is spun in vain: it is paid from a credit that time fills.

const std = @import("std");
const limits = @import("../limits.zig");

pub const SpinBound = struct {
    /// The longest time that the caller of the library allows; 0 = none.
    max_ns: u64 = 0,
    /// What a wake costs: from the ring of a peer until what it rang for is taken.
    wake_ns: u64 = limits.SPIN_WAKE_NS,
    /// Twice what the slowest of the last short waits took; it falls with each shorter one.
    reach_ns: u64 = std.math.maxInt(u64),
    credit_ns: u64 = limits.SPIN_VAIN_NS_MAX,
    filled_ns: u64 = 0,

    /// Waits of up to this are short (SB-1).
    pub fn short(self: *const SpinBound) u64 {
        return @min(self.max_ns, @max(limits.SPIN_SHORT_NS, limits.SPIN_WAKES * self.wake_ns));
    }

    /// The bound that holds now (SB-2).
    pub fn current(self: *const SpinBound) u64 {
        return @min(self.short(), @max(self.wake_ns, self.reach_ns));
    }

    /// A wake took this long, while cores were to spare.
    pub fn woke(self: *SpinBound, took_ns: u64) void {
        const sample = @min(took_ns, self.max_ns);
        self.wake_ns = self.wake_ns - self.wake_ns / WEIGHT + sample / WEIGHT;
    }

    /// A wait took this long. Whether it was short.
    pub fn waited(self: *SpinBound, took_ns: u64) bool {
        if (took_ns > self.short()) return false;
        self.reach_ns = @max(2 * took_ns, self.reach_ns - self.reach_ns / WEIGHT);
        return true;
    }

    /// Whether a spin up to the bound may end in vain (SB-3).
    pub fn canPay(self: *SpinBound, now_ns: u64) bool {
        const filled = (now_ns -| self.filled_ns) / limits.SPIN_VAIN_SHARE;
        if (filled > 0) {
            if (self.credit_ns < limits.SPIN_VAIN_NS_MAX) {
                self.credit_ns = @min(limits.SPIN_VAIN_NS_MAX, self.credit_ns +| filled);
            }
            self.filled_ns = now_ns;
        }
        return self.credit_ns >= self.current();
    }

    /// A spin of this length was in vain.
    pub fn pay(self: *SpinBound, spun_ns: u64) void {
        self.credit_ns -|= spun_ns;
    }
};

/// Of what was known before, against one new sample.
const WEIGHT = 8;

const testing = std.testing;

test "without a bound of the caller nothing is short" {
    var none = SpinBound{};
    try testing.expectEqual(0, none.short());
    try testing.expectEqual(0, none.current());
    none.woke(1_000_000);
    try testing.expect(!none.waited(1));
}

test "where a wake is dear, longer waits are worth spinning through" {
    var slow = SpinBound{ .max_ns = 1_000_000 };
    const before = slow.short();
    try testing.expectEqual(limits.SPIN_WAKES * limits.SPIN_WAKE_NS, before);
    try testing.expect(!slow.waited(before + 1));
    for (0..100) |_| slow.woke(4 * limits.SPIN_WAKE_NS);
    try testing.expect(slow.waited(before + 1));
    try testing.expect(slow.short() > 3 * before and slow.short() <= 4 * before);
}

test "no bound exceeds the caller's, whatever a peer says of its ring" {
    var one = SpinBound{ .max_ns = 300_000 };
    for (0..1_000) |_| one.woke(std.math.maxInt(u64));
    try testing.expect(one.current() <= 300_000);
    for (0..1_000) |_| one.woke(0);
    try testing.expectEqual(limits.SPIN_SHORT_NS, one.current());
}

test "quick answers make the bound small, one that is slower makes it long again" {
    var one = SpinBound{ .max_ns = 1_000_000 };
    const short = one.short();
    try testing.expectEqual(short, one.current());
    for (0..1_000) |_| try testing.expect(one.waited(5_000));
    try testing.expectEqual(one.wake_ns, one.current());
    try testing.expect(one.waited(short - 10_000));
    try testing.expectEqual(short, one.current());
}

test "over any long time at most its share is spun in vain" {
    var one = SpinBound{ .max_ns = 100_000 };
    var now: u64 = 1;
    var vain: u64 = 0;
    const began = now;
    for (0..100_000) |i| {
        now += 1_000 + (i * 7919) % 40_000;
        if (!one.canPay(now)) continue;
        const spun = one.current();
        now += spun;
        vain += spun;
        one.pay(spun);
    }
    try testing.expect(vain <= (now - began) / limits.SPIN_VAIN_SHARE + limits.SPIN_VAIN_NS_MAX);
    try testing.expect(vain > (now - began) / limits.SPIN_VAIN_SHARE / 2);
}
