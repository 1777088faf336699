//! Whether the caller's thread (T0) still turns: T1 rings it at every tick, and a ring is answered by a poll. PURE.
//!
//! SL-1 A thread that only waits is not behind: the ring wakes it. SL-2 Ticks are T1's own, so a process that was
//! stopped as a whole is not behind when it goes on. SL-3 It is said when the threshold is reached, again whenever the
//! time has doubled, and when the thread turns again: in a day less than twenty times.

const std = @import("std");

pub const Watch = struct {
    /// Ticks without an answer after which the thread counts as stalled; 0 = never.
    threshold: u32 = 0,
    /// Polls that were seen at the last tick; before the first one no loop is behind.
    polls: u64 = 0,
    /// Ticks since the first ring without an answer.
    behind: u32 = 0,
    /// What was said last; 0 = all is well.
    said: u32 = 0,

    /// One tick, with the number of polls so far. Returns what there is to say: ticks behind, 0 = it turns again.
    pub fn tick(self: *Watch, polls: u64) ?u32 {
        if (self.threshold == 0 or polls == 0) return null;
        if (polls != self.polls) {
            self.polls = polls;
            self.behind = 0;
            return if (self.said != 0) 0 else null;
        }
        self.behind +|= 1;
        return if (self.behind >= self.threshold and self.behind >= 2 *| self.said) self.behind else null;
    }
};

const testing = std.testing;

test "a thread that answers is never behind" {
    var watch = Watch{ .threshold = 3 };
    for (1..100) |polls| try testing.expectEqual(null, watch.tick(polls));
}

test "a thread that has not begun is never behind" {
    var watch = Watch{ .threshold = 3 };
    for (0..100) |_| try testing.expectEqual(null, watch.tick(0));
}

test "a threshold of 0 watches nothing" {
    var watch = Watch{};
    for (0..100) |_| try testing.expectEqual(null, watch.tick(7));
}

test "silence is said at the threshold, when it has doubled, and when it is over" {
    var watch = Watch{ .threshold = 3 };
    var said: [8]u32 = @splat(0);
    var count: usize = 0;
    _ = watch.tick(7);
    for (0..14) |_| {
        if (watch.tick(7)) |news| {
            watch.said = news;
            said[count] = news;
            count += 1;
        }
    }
    try testing.expectEqualSlices(u32, &.{ 3, 6, 12 }, said[0..count]);
    try testing.expectEqual(0, watch.tick(8));
    watch.said = 0;
    try testing.expectEqual(null, watch.tick(9));
}

test "news that was not passed on comes again" {
    var watch = Watch{ .threshold = 2 };
    _ = watch.tick(1);
    _ = watch.tick(1);
    try testing.expectEqual(2, watch.tick(1));
    try testing.expectEqual(3, watch.tick(1));
}
