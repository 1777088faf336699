//! How a sleeping thread is woken, also from another process: an eventfd, and a page with a word "I sleep" and one
//! bit per link "look here". The page is shared with peers; whatever they write there costs at most a needless look.
//!
//! Ringing: publish the data; set the bit; if `sleeping` was 1, clear it and write the eventfd. Sleeping: set
//! `sleeping`; look at the bits again; wait for the eventfd. Both sides write, then read the other's word, in one
//! total order (seq_cst), so one of them always sees the other.
//!
//! An owner that spins on its bits instead of sleeping says so in the same word: the eventfd is not written for it, and
//! who has something for it need not wait with the rest of its ringing.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

pub const WORDS = limits.LINKS_MAX / 64;
pub const PAGE_BYTES = 4096;

/// What `sleeping` says. Any other word that a peer writes counts as awake.
const AWAKE = 0;
const ASLEEP = 1;
const SPINNING = 2;

/// Shared: fixed layout.
pub const Page = extern struct {
    sleeping: u32 align(64),
    /// When the owner was last woken, by the clock of this machine; of a peer, so it may say anything.
    rung_ns: u64,
    bits: [WORDS]u64 align(64),
};

comptime {
    assert(@sizeOf(Page) <= PAGE_BYTES);
    assert(@offsetOf(Page, "bits") == 64);
}

pub const Bits = [WORDS]u64;

pub const Bell = struct {
    page: *Page,
    fd: i32,

    /// Make the owner look at `slot`; wake it if it sleeps. Data must have been published before.
    pub fn ring(self: Bell, slot: u32) void {
        assert(slot < limits.LINKS_MAX);
        const bit = @as(u64, 1) << @intCast(slot % 64);
        _ = @atomicRmw(u64, &self.page.bits[slot / 64], .Or, bit, .seq_cst);
        self.wake();
    }

    /// Wake the owner if it sleeps, without a link to look at.
    pub fn wake(self: Bell) void {
        // The load first: most rings find the owner awake, and a plain load keeps its line shared.
        if (@atomicLoad(u32, &self.page.sleeping, .seq_cst) != ASLEEP) return;
        if (!self.change(ASLEEP, AWAKE)) return; // another ringer was first, or the owner woke by itself
        @atomicStore(u64, &self.page.rung_ns, sys.monotonicNs(), .release);
        self.call();
    }

    /// Make the bell readable, whatever its owner does.
    pub fn call(self: Bell) void {
        assert(self.fd >= 0);
        sys.eventfdSignal(self.fd);
    }

    fn change(self: Bell, from: u32, to: u32) bool {
        return @cmpxchgStrong(u32, &self.page.sleeping, from, to, .seq_cst, .seq_cst) == null;
    }

    /// The owner is about to sleep. True: it must not, something has come.
    pub fn arm(self: Bell) bool {
        @atomicStore(u32, &self.page.sleeping, ASLEEP, .seq_cst);
        if (!self.hasBits()) return false;
        @atomicStore(u32, &self.page.sleeping, AWAKE, .seq_cst);
        return true;
    }

    /// Whether there is a link to look at.
    pub fn hasBits(self: Bell) bool {
        for (&self.page.bits) |*word| {
            if (@atomicLoad(u64, word, .seq_cst) != 0) return true;
        }
        return false;
    }

    /// The owner, which is armed, spins on its bits from now on. False: it has been rung already.
    pub fn beginSpinning(self: Bell) bool {
        return self.change(ASLEEP, SPINNING);
    }

    /// The owner has spun for long enough. False: it is armed, to sleep; true: something has come meanwhile.
    pub fn endSpinning(self: Bell) bool {
        return self.arm();
    }

    /// Whether the owner, which is armed, has not been rung since.
    pub fn isUnrung(self: Bell) bool {
        return @atomicLoad(u32, &self.page.sleeping, .seq_cst) == ASLEEP;
    }

    /// When the owner was last woken, as who woke it says.
    pub fn rungAt(self: Bell) u64 {
        return @atomicLoad(u64, &self.page.rung_ns, .acquire);
    }

    /// Whether the owner of this bell spins on it.
    pub fn isSpunOn(self: Bell) bool {
        return @atomicLoad(u32, &self.page.sleeping, .monotonic) == SPINNING;
    }

    /// The owner is awake again. Always reads the eventfd: a ringer may have cleared the word and not yet written,
    /// and a write that is never read would wake the owner for ever.
    pub fn disarm(self: Bell) void {
        assert(self.fd >= 0); // reading nothing would leave the owner awake for ever
        @atomicStore(u32, &self.page.sleeping, AWAKE, .seq_cst);
        sys.eventfdClear(self.fd);
    }

    /// Move the bits that are set into `into`. True: there was one.
    pub fn take(self: Bell, into: *Bits) bool {
        var any = false;
        for (&self.page.bits, into) |*word, *to| {
            if (@atomicLoad(u64, word, .monotonic) == 0) continue;
            to.* |= @atomicRmw(u64, word, .Xchg, 0, .seq_cst);
            any = true;
        }
        return any;
    }
};

test "a ring before arming keeps the owner awake" {
    var page align(64) = std.mem.zeroes(Page);
    const bell = Bell{ .page = &page, .fd = sys.eventfd() };
    defer sys.close(bell.fd);

    bell.ring(70);

    try std.testing.expect(bell.arm());
    var bits: Bits = @splat(0);
    try std.testing.expect(bell.take(&bits));
    try std.testing.expectEqual(@as(u64, 1 << 6), bits[1]);
    try std.testing.expect(!bell.arm());
}

test "who wakes a sleeping owner says when; a ring of an owner that is awake does not" {
    var page align(64) = std.mem.zeroes(Page);
    const bell = Bell{ .page = &page, .fd = sys.eventfd() };
    defer sys.close(bell.fd);

    bell.ring(0);
    try std.testing.expectEqual(0, bell.rungAt());
    var bits: Bits = @splat(0);
    _ = bell.take(&bits);

    const before = sys.monotonicNs();
    try std.testing.expect(!bell.arm());
    bell.ring(0);
    try std.testing.expect(bell.rungAt() >= before and bell.rungAt() <= sys.monotonicNs());
}

test "a ring after arming wakes the owner once" {
    var page align(64) = std.mem.zeroes(Page);
    const bell = Bell{ .page = &page, .fd = sys.eventfd() };
    defer sys.close(bell.fd);
    const epoll = sys.epollCreate();
    defer sys.close(epoll);
    _ = sys.epollAdd(epoll, bell.fd, sys.IN, 0);
    var events: [1]sys.Event = undefined;

    try std.testing.expect(!bell.arm());
    bell.ring(0);
    bell.ring(1);

    try std.testing.expectEqual(1, sys.epollWait(epoll, &events, 0));
    bell.disarm();
    try std.testing.expectEqual(0, sys.epollWait(epoll, &events, 0));
}

test "an owner that spins is not woken, and wakes itself for what has come" {
    var page align(64) = std.mem.zeroes(Page);
    const bell = Bell{ .page = &page, .fd = sys.eventfd() };
    defer sys.close(bell.fd);

    try std.testing.expect(!bell.arm());
    try std.testing.expect(bell.beginSpinning());
    try std.testing.expect(bell.isSpunOn());
    bell.ring(3);
    try std.testing.expect(!sys.isReadableWithin(bell.fd, 0));
    try std.testing.expect(bell.hasBits());

    try std.testing.expect(bell.endSpinning());
    try std.testing.expect(!bell.isUnrung());
}

test "an owner that was rung does not begin to spin" {
    var page align(64) = std.mem.zeroes(Page);
    const bell = Bell{ .page = &page, .fd = sys.eventfd() };
    defer sys.close(bell.fd);

    try std.testing.expect(!bell.arm());
    bell.ring(3);
    try std.testing.expect(!bell.beginSpinning());
    try std.testing.expect(sys.isReadableWithin(bell.fd, 0));
}
