//! How T0 waits for its bell, which may be one of many things that it waits for.
//!
//! Armed, it is woken by whoever rings. Awake, it looks by itself before it waits again, so it needs no waking.

const bells = @import("../rings/bell.zig");
const busy_polls = @import("busy_poll.zig");

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
        return if (poller < 0) .none else self.busy_poll.spin(bell, poller);
    }

    fn isUnrung(self: *const Wait, bell: bells.Bell) bool {
        return self.armed and bell.isUnrung();
    }
};
