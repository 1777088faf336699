//! Whether T0 keeps polling its bell for a while before it sleeps. An answer that comes soon is seen at once then;
//! the kernel takes longer to wake a sleeper on another core than most answers take.
//!
//! LO-1 Only a wait that follows traffic counts: a process without traffic sleeps. LO-2 It spins only if the last
//! waits were short, whether it spun in them or slept. T0 sleeps for its bell alone, without its loop, only if the last
//! waits ended within the time for which it may. LO-3 It does not spin while cores are short; that is asked again every
//! `limits.CORES_AGAIN_MS`. LO-4 Spinning ends at a bound that follows what wakes cost and how long answers take
//! (`spin_bound`), and that is never above the one that the caller of the library gave.

const std = @import("std");
const bells = @import("../rings/bell.zig");
const cores = @import("../system/cores.zig");
const limits = @import("../limits.zig");
const spin_bounds = @import("spin_bound.zig");
const sys = @import("../system/sys.zig");

/// Above this waits are expected to be short.
const HALF = 1;
const SURE = 3;

/// What came of it.
pub const Seen = enum(i32) {
    /// T0 did not spin: nothing is expected soon, cores are short, or it may not.
    none = 0,
    /// Something has come.
    came = 1,
    /// Nothing has come in the time.
    vain = 2,
    /// Something else has come that T0 waits for.
    other = 3,
};

pub const BusyPoll = struct {
    bound: spin_bounds.SpinBound = .{},
    /// How short the last waits were: 0 .. SURE.
    trust: u8 = SURE,
    /// How many of the last waits ended within `alone_ns`: 0 .. SURE.
    nearness: u8 = SURE,
    /// The longest time for which T0 may wait for its bell alone, as it last said.
    alone_ns: u64 = 0,
    /// Something was sent or has come since the last wait began.
    traffic: bool = false,
    /// When the wait that counts began; 0 = none.
    began_ns: u64 = 0,
    /// Since when the process sleeps in that wait.
    slept_ns: u64 = 0,
    /// When the cores were counted; 0 = never.
    counted_ns: u64 = 0,
    spare: bool = false,

    /// Look at the bell of this process, which is armed, for a while, if that may pay off.
    pub fn spin(self: *BusyPoll, bell: bells.Bell, poller: i32) Seen {
        if (!self.counts()) return .none;
        const now = sys.monotonicNs();
        const expected = self.begin(now);
        if (self.mustCount(now)) self.counted(now, cores.areSpare(cores.allowed(), cores.runnable()));
        if (!expected or !self.spare or cores.allowed() < 2) return .none;
        if (!self.bound.canPay(now) or !bell.beginSpinning()) return .none;
        const seen = self.watch(bell, poller, now);
        self.spun(seen, sys.monotonicNs());
        return if (bell.endSpinning()) .came else seen;
    }

    fn watch(self: *BusyPoll, bell: bells.Bell, poller: i32, began: u64) Seen {
        const bound = self.bound.current();
        const pause = @max(limits.SPIN_PAUSE_NS, self.bound.wake_ns);
        var last = began;
        while (true) {
            for (0..limits.SPINS) |_| {
                if (bell.hasBits()) return .came;
                std.atomic.spinLoopHint();
            }
            const now = sys.monotonicNs();
            if (now - last > pause) self.counted(now, cores.areSpare(cores.allowed(), cores.runnable()));
            if (now - began > bound or !self.spare) return .vain;
            if (sys.isReadableWithin(poller, 0)) return .other;
            last = now;
        }
    }

    /// Whether what is waited for now is expected within `alone_ns` (LO-2).
    pub fn isExpecting(self: *const BusyPoll) bool {
        return self.began_ns != 0 and self.nearness > HALF;
    }

    /// Messages have come, whose senders may have rung this bell.
    pub fn came(self: *BusyPoll, bell: bells.Bell) void {
        self.traffic = true;
        if (self.began_ns != 0) self.woken(sys.monotonicNs(), bell.rungAt());
    }

    /// Whether the wait that begins now counts (LO-1).
    fn counts(self: *const BusyPoll) bool {
        return self.bound.max_ns != 0 and self.traffic;
    }

    /// A wait that counts begins. Whether it is expected to be short (LO-2).
    fn begin(self: *BusyPoll, now: u64) bool {
        if (self.began_ns != 0) self.end(now); // nothing has come since the one before
        self.traffic = false;
        self.began_ns = now;
        self.slept_ns = now;
        return self.trust > HALF;
    }

    /// It spun until now.
    fn spun(self: *BusyPoll, seen: Seen, now: u64) void {
        switch (seen) {
            .came => self.end(now),
            .vain => self.bound.pay(now - self.began_ns),
            .other, .none => {},
        }
        self.slept_ns = now;
    }

    /// It slept, and has something since now, that it was rung for then; 0 or nonsense: this is not known.
    fn woken(self: *BusyPoll, now: u64, rung: u64) void {
        if (rung < self.slept_ns or rung > now) return self.end(now);
        if (self.spare) self.bound.woke(now - rung);
        self.end(rung);
    }

    /// The wait is over: what it was for has come now, or something else is begun.
    fn end(self: *BusyPoll, now: u64) void {
        if (self.began_ns == 0) return;
        const took = now - self.began_ns;
        const is_short = self.bound.waited(took);
        self.trust = weighed(self.trust, is_short);
        self.nearness = weighed(self.nearness, is_short or took <= self.alone_ns);
        self.began_ns = 0;
    }

    fn weighed(before: u8, was_so: bool) u8 {
        return if (was_so) @min(SURE, before + 1) else before -| 1;
    }

    /// Whether the cores are to be counted again (LO-3).
    fn mustCount(self: *const BusyPoll, now: u64) bool {
        return self.counted_ns == 0 or now - self.counted_ns > limits.CORES_AGAIN_MS * 1_000_000;
    }

    /// What counting them gave.
    fn counted(self: *BusyPoll, now: u64, spare: bool) void {
        self.counted_ns = now;
        self.spare = spare;
    }
};

const testing = std.testing;

test "without a bound, or without traffic, no wait counts" {
    var never = BusyPoll{ .traffic = true };
    try testing.expect(!never.counts());
    var idle = BusyPoll{ .bound = .{ .max_ns = 100 } };
    try testing.expect(!idle.counts());
    idle.traffic = true;
    try testing.expect(idle.counts());
    _ = idle.begin(5);
    try testing.expect(!idle.counts());
}

test "two long waits end the spinning, two short ones bring it back" {
    var one = BusyPoll{ .bound = .{ .max_ns = 100 } };
    var now: u64 = 1;
    for ([_]u64{ 101, 500, 500, 90, 100, 7 }, [_]bool{ true, true, false, false, false, true }) |wait, spins| {
        try testing.expectEqual(spins, one.begin(now));
        now += wait;
        one.end(now);
    }
}

test "a wait too long to spin through is expected, if T0 may wait for its bell alone for so long" {
    var one = BusyPoll{ .bound = .{ .max_ns = 100 }, .alone_ns = 1_000 };
    var now: u64 = 1;
    for ([_]u64{ 1_000, 1_000, 1_000, 1_001, 1_001 }, [_]bool{ true, true, true, true, false }) |wait, is_expected| {
        _ = one.begin(now);
        now += wait;
        one.end(now);
        try testing.expectEqual(0, one.began_ns);
        _ = one.begin(now);
        try testing.expectEqual(is_expected, one.isExpecting());
        one.began_ns = 0; // this wait is not one of them
    }
    try testing.expectEqual(0, one.trust);
}

test "a wait that has ended does not end again" {
    var one = BusyPoll{ .bound = .{ .max_ns = 100 } };
    _ = one.begin(1);
    one.end(500);
    const trust = one.trust;
    one.end(1000);
    try testing.expectEqual(trust, one.trust);
}

test "a wait that was slept through is as long as it took until the ring; what it took since is what a wake costs" {
    var one = BusyPoll{ .bound = .{ .max_ns = 1_000_000 }, .trust = 0, .spare = true };
    const wake = one.bound.wake_ns;
    _ = one.begin(1_000);
    one.woken(1_000 + 10 * wake, 1_000 + 2 * wake);
    try testing.expectEqual(1, one.trust);
    try testing.expectEqual(2 * wake - wake / 8, one.bound.wake_ns);
}

test "a ring of before the sleep, or of the future, says nothing" {
    for ([_]u64{ 0, 999, 500_001 }) |rung| {
        var one = BusyPoll{ .bound = .{ .max_ns = 1_000_000 }, .trust = 2, .spare = true };
        const wake = one.bound.wake_ns;
        _ = one.begin(1_000);
        one.woken(500_000, rung);
        try testing.expectEqual(wake, one.bound.wake_ns);
        try testing.expectEqual(1, one.trust);
    }
}

test "while cores are short a wake is not measured: the sleeper waits for its turn, too" {
    var one = BusyPoll{ .bound = .{ .max_ns = 1_000_000 }, .spare = false };
    const wake = one.bound.wake_ns;
    _ = one.begin(1_000);
    one.woken(900_000, 2_000);
    try testing.expectEqual(wake, one.bound.wake_ns);
    try testing.expectEqual(SURE, one.trust);
}

test "a process that sends and is never answered sleeps at once" {
    var one = BusyPoll{ .bound = .{ .max_ns = 100 } };
    var now: u64 = 1;
    for ([_]bool{ true, true, false, false }) |spins| {
        try testing.expectEqual(spins, one.begin(now));
        now += 1_000;
    }
}

test "cores are counted now and then" {
    var one = BusyPoll{ .bound = .{ .max_ns = 100 } };
    try testing.expect(one.mustCount(1));
    one.counted(1, true);
    try testing.expect(!one.mustCount(limits.CORES_AGAIN_MS * 1_000_000));
    try testing.expect(one.mustCount(limits.CORES_AGAIN_MS * 1_000_000 + 2));
}

/// A bell that is armed, and a `BusyPoll` that expects something, on a machine with cores to spare.
const Rig = struct {
    page: bells.Page align(64),
    bell: bells.Bell,
    poller: i32,
    busy_poll: BusyPoll,

    fn init(self: *Rig) !void {
        if (cores.allowed() < 2) return error.SkipZigTest;
        self.page = std.mem.zeroes(bells.Page);
        self.bell = .{ .page = &self.page, .fd = sys.eventfd() };
        self.poller = sys.epollCreate();
        _ = sys.epollAdd(self.poller, self.bell.fd, sys.IN, 0);
        self.busy_poll = .{ .bound = .{ .max_ns = 50_000 }, .traffic = true };
        self.busy_poll.counted(sys.monotonicNs(), true);
        try testing.expect(!self.bell.arm());
    }

    fn deinit(self: *Rig) void {
        sys.close(self.bell.fd);
        sys.close(self.poller);
    }
};

test "spinning in vain ends, and the owner sleeps" {
    var rig: Rig = undefined;
    try rig.init();
    defer rig.deinit();

    try testing.expectEqual(.vain, rig.busy_poll.spin(rig.bell, rig.poller));

    try testing.expect(!sys.isReadableWithin(rig.poller, 0));
    rig.bell.ring(0);
    try testing.expect(sys.isReadableWithin(rig.poller, 0));
}

test "spinning ends for what else the owner waits for, which stays there" {
    var rig: Rig = undefined;
    try rig.init();
    defer rig.deinit();
    const hour = 3_600_000_000_000;
    const other = sys.eventfd();
    defer sys.close(other);
    _ = sys.epollAdd(rig.poller, other, sys.IN, 0);
    sys.eventfdSignal(other);
    rig.busy_poll.bound = .{ .max_ns = hour, .wake_ns = hour, .credit_ns = hour };

    try testing.expectEqual(.other, rig.busy_poll.spin(rig.bell, rig.poller));

    try testing.expect(sys.isReadableWithin(rig.poller, 0));
}

test "one wait is spun through for one batch of traffic" {
    var rig: Rig = undefined;
    try rig.init();
    defer rig.deinit();

    _ = rig.busy_poll.spin(rig.bell, rig.poller);

    try testing.expectEqual(.none, rig.busy_poll.spin(rig.bell, rig.poller));
}

test "no process spins while cores are short" {
    var rig: Rig = undefined;
    try rig.init();
    defer rig.deinit();
    rig.busy_poll.counted(sys.monotonicNs(), false);

    const before = rig.busy_poll.counted_ns;
    if (rig.busy_poll.spin(rig.bell, rig.poller) != .none) { // this test was held up, so that they were counted again
        try testing.expect(rig.busy_poll.counted_ns != before);
    }
}
