//! How T0 waits for its bell, which may be one of many things that it waits for.
//!
//! Armed, it is woken by whoever rings. Awake, it looks by itself before it waits again, so it needs no waking.

const bells = @import("../rings/bell.zig");
const busy_polls = @import("busy_poll.zig");
const sys = @import("../system/sys.zig");

pub const Wait = struct {
    armed: bool = false,
    /// The bell may be readable for what has been taken already.
    unread: bool = false,
    busy_poll: busy_polls.BusyPoll,

    /// T0 takes what has come, and has woken for the bell, if it was armed.
    pub fn end(self: *Wait, bell: bells.Bell) void {
        if (!self.armed and !self.unread) return;
        self.armed = false;
        self.unread = false;
        bell.disarm();
    }

    /// T0 has waited for many things. True: it takes what has come. False: it is armed, and the bell has not rung.
    pub fn endWith(self: *Wait, bell: bells.Bell) bool {
        if (self.isUnrung(bell)) return false;
        self.armed = false;
        self.unread = true;
        return true;
    }

    /// Whether there is anything that T0 has not been told of.
    pub fn hasNews(self: *const Wait, bell: bells.Bell, ready: *const bells.Bits) bool {
        if (self.isUnrung(bell)) return false;
        for (ready) |word| if (word != 0) return true;
        return bell.hasBits();
    }

    /// T0 is about to wait. True: it must not, something has come.
    pub fn arm(self: *Wait, bell: bells.Bell, ready: *const bells.Bits) bool {
        for (ready) |word| if (word != 0) return true;
        self.armed = true;
        return bell.arm();
    }

    /// T0 is about to wait for many things: see to it that it wakes at once for what has come already, and look at the
    /// bell for a while first, if there is a `poller` to look at meanwhile, and it may pay off.
    pub fn begin(self: *Wait, bell: bells.Bell, ready: *const bells.Bits, poller: i32) busy_polls.Seen {
        if (!self.isUnrung(bell) and self.arm(bell, ready)) {
            bell.call();
            return .none;
        }
        if (poller < 0) return .none;
        const seen = self.busy_poll.spin(bell, poller);
        if (seen == .came) bell.call();
        return seen;
    }

    /// Wait for the bell alone, at most so long, if it is expected to be rung soon. True: T0 takes what has come, which
    /// leaves `poller` unreadable. False: T0 has to wait for many things; `poller` may be readable for another reason.
    pub fn pass(self: *Wait, bell: bells.Bell, ready: *const bells.Bits, poller: i32, most_ns: u64) bool {
        self.busy_poll.alone_ns = most_ns;
        if ((self.isUnrung(bell) or !self.arm(bell, ready)) and !self.comes(bell, poller, most_ns)) return false;
        self.armed = false;
        self.unread = true;
        return true;
    }

    /// Whether the bell, which is armed, is rung soon.
    fn comes(self: *Wait, bell: bells.Bell, poller: i32, most_ns: u64) bool {
        switch (self.busy_poll.spin(bell, poller)) {
            .came => return true,
            .vain, .other => return false,
            .none => {},
        }
        if (!self.busy_poll.isExpecting() or !sys.isReadableWithin(poller, most_ns) or bell.isUnrung()) return false;
        sys.eventfdClear(bell.fd);
        return true;
    }

    fn isUnrung(self: *const Wait, bell: bells.Bell) bool {
        return self.armed and bell.isUnrung();
    }
};

const std = @import("std");
const testing = std.testing;

/// A T0 that waits for a bell among other things, and expects it to be rung soon, but never spins.
const Rig = struct {
    page: bells.Page align(64),
    bell: bells.Bell,
    ready: bells.Bits,
    poller: i32,
    wait: Wait,

    fn init(self: *Rig) void {
        self.page = std.mem.zeroes(bells.Page);
        self.bell = .{ .page = &self.page, .fd = sys.eventfd() };
        self.ready = std.mem.zeroes(bells.Bits);
        self.poller = sys.epollCreate();
        _ = sys.epollAdd(self.poller, self.bell.fd, sys.IN | sys.ET, 0);
        self.wait = .{ .busy_poll = .{ .bound = .{ .max_ns = 50_000, .credit_ns = 0 }, .traffic = true } };
        self.wait.busy_poll.bound.filled_ns = std.math.maxInt(u64);
    }

    fn deinit(self: *Rig) void {
        sys.close(self.bell.fd);
        sys.close(self.poller);
    }

    fn pass(self: *Rig) bool {
        return self.wait.pass(self.bell, &self.ready, self.poller, HOUR);
    }

    fn ringWhenArmed(self: *Rig) void {
        while (!self.bell.isUnrung()) std.atomic.spinLoopHint();
        self.bell.ring(3);
    }
};

const HOUR = 3_600_000_000_000;

test "what has come already is taken without a wait" {
    var rig: Rig = undefined;
    rig.init();
    defer rig.deinit();
    rig.bell.ring(3);

    try testing.expect(rig.pass());

    try testing.expect(rig.bell.take(&rig.ready));
    try testing.expect(!sys.isReadableWithin(rig.poller, 0));
}

test "a bell that is rung during the wait leaves nothing to wake for" {
    var rig: Rig = undefined;
    rig.init();
    defer rig.deinit();
    const ringer = try std.Thread.spawn(.{}, Rig.ringWhenArmed, .{&rig});

    const passed = rig.pass();
    ringer.join();

    try testing.expect(passed);
    try testing.expect(rig.bell.take(&rig.ready));
    try testing.expect(!sys.isReadableWithin(rig.poller, 0));
}

test "what T0 waits for besides ends the wait, and stays there" {
    var rig: Rig = undefined;
    rig.init();
    defer rig.deinit();
    const other = sys.eventfd();
    defer sys.close(other);
    _ = sys.epollAdd(rig.poller, other, sys.IN, 0);
    sys.eventfdSignal(other);

    try testing.expect(!rig.pass());

    try testing.expect(sys.isReadableWithin(rig.poller, 0));
    rig.bell.ring(3);
    try testing.expect(rig.wait.endWith(rig.bell)); // it is armed all the same
}

test "what is not expected soon is not waited for" {
    var rig: Rig = undefined;
    rig.init();
    defer rig.deinit();
    rig.wait.busy_poll.nearness = 0;

    try testing.expect(!rig.pass());

    try testing.expect(rig.bell.isUnrung());
}
