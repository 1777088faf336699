//! T2: the thread that carries large transfers, a piece of each in turn, and looks after the descriptors and the
//! pending work of carriers that are not done by copying. It starts with the first that needs it.
//!
//!     free --T0--> queued --T2--> running --T2--> ended --T0 polls--> free
//!
//! MH-1 The lock is held for the lists only, never while bytes are moved or anything is waited for. MH-2 Whoever finds
//! T2 asleep, under the lock, wakes it. MH-3 A record is there before the bell is rung, and the bell is cleared only
//! when no record is left. MH-4 T2 makes and closes descriptors under `driving` only: a fork takes it, and the child
//! finds them all in their tables.

const std = @import("std");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("transfer.zig");
const attachment = @import("../grants/attachment.zig");

const Transfer = transfer.Transfer;

/// What the events of a descriptor in T2's epoll set are about: a tag in the top byte, below it what the driver likes.
pub const Tag = enum(u8) { wake = 1, tcp = 2, ucx = 3 };

/// The word for `sys.epollAdd`.
pub fn dataOf(tag: Tag, about: u56) u64 {
    return @as(u64, @intFromEnum(tag)) << 56 | about;
}

/// A carrier that pends. Functions are called by T2, but for `reaches` and `forget`.
pub const Driver = struct {
    tag: Tag,
    carrier: u32,
    context: *anyopaque,
    /// T0: whether it goes to the process of an attachment. Else it says why in `why_not`.
    reaches: *const fn (context: *anyopaque, one: *attachment.Attachment) bool,
    /// Begin a transfer. It is the driver's until `Thread.finish`, which may be called at once.
    begin: *const fn (context: *anyopaque, one: *Transfer) void,
    /// A transfer that was begun is to end soon: `Thread.finish` must follow.
    giveUp: *const fn (context: *anyopaque, one: *Transfer) void,
    /// A descriptor has something; `about` as it was added.
    ready: *const fn (context: *anyopaque, about: u56, events: u32) void,
    /// Once a round: do what is pending. How many ms it may be until the next time; 0 = there is more, -1 = for ever.
    turn: *const fn (context: *anyopaque) i32,
    /// T2 has ended: close everything. Called by T0.
    close: *const fn (context: *anyopaque) void,
    /// In a forked child: close the descriptors, and touch nothing else.
    forget: *const fn (context: *anyopaque) void,
};

const Index = u16;

comptime {
    std.debug.assert(limits.TRANSFERS_MAX <= std.math.maxInt(Index));
}

/// All zero is one that was not started and has no transfers, but for the descriptors.
pub const Thread = struct {
    lock: sys.Mutex,
    /// Held by T2 while it calls drivers; taken before `lock`.
    driving: sys.Mutex,
    transfers: [limits.TRANSFERS_MAX]Transfer,
    /// T0's.
    used: u32,
    free: [limits.TRANSFERS_MAX]Index,
    free_count: u32,
    next_number: u64,
    /// Under the lock.
    queued: [limits.TRANSFERS_MAX]Index,
    queued_count: u32,
    ended: [limits.TRANSFERS_MAX]Index,
    ended_first: u32,
    ended_count: u32,
    is_asleep: bool,
    /// T2's.
    running: [limits.TRANSFERS_MAX]Index,
    running_count: u32,
    /// Readable: records are there.
    bell: i32,
    wake: i32,
    epoll: i32,
    drivers: [2]?Driver,
    stopping: bool,
    thread: ?sys.Thread,

    /// Make descriptors. 0 or -errno.
    pub fn init(self: *Thread) i32 {
        self.bell = sys.eventfd();
        self.wake = sys.eventfd();
        self.epoll = sys.epollCreate();
        self.drivers = @splat(null);
        for ([_]i32{ self.bell, self.wake, self.epoll }) |fd| if (fd < 0) {
            self.closeFds();
            return fd;
        };
        const rc = sys.epollAdd(self.epoll, self.wake, sys.IN, dataOf(.wake, 0));
        if (rc < 0) self.closeFds();
        return rc;
    }

    /// Close all descriptors; also what a forked child does.
    pub fn closeFds(self: *Thread) void {
        for ([_]*i32{ &self.bell, &self.wake, &self.epoll }) |fd| {
            if (fd.* >= 0) sys.closeAt(fd);
        }
    }

    /// In a forked child: close the descriptors of drivers, too.
    pub fn forget(self: *Thread) void {
        self.closeFds();
        for (self.drivers) |place| if (place) |driver| driver.forget(driver.context);
    }

    // ---- T0 ----

    /// Start T2, unless it runs. A status.
    pub fn start(self: *Thread) i32 {
        if (self.thread != null) return status.OK;
        self.thread = sys.threadStart(main, self) orelse return status.ERR_THREAD;
        return status.OK;
    }

    /// Join T2, and give back what transfers hold, without records.
    pub fn stop(self: *Thread) void {
        if (self.thread) |thread| {
            @atomicStore(bool, &self.stopping, true, .seq_cst);
            sys.eventfdSignal(self.wake);
            sys.threadJoin(thread);
            self.thread = null;
        }
        for (self.drivers) |place| if (place) |driver| driver.close(driver.context);
        for (self.transfers[0..self.used]) |*one| one.close();
        self.closeFds();
    }

    /// Have a carrier pend. Before T2 is started.
    pub fn addDriver(self: *Thread, driver: Driver) void {
        std.debug.assert(self.thread == null);
        for (&self.drivers) |*place| if (place.* == null) {
            place.* = driver;
            return;
        };
        unreachable; // there is a place for each tag
    }

    /// Hand a transfer to T2. Null: there are too many.
    pub fn submit(self: *Thread, one: *const Transfer) ?u64 {
        const index = self.takePlace() orelse return null;
        const place = &self.transfers[index];
        place.become(one); // T2 may still look at the state, of what it was before
        self.next_number += 1;
        place.id = self.next_number << 16 | index;
        @atomicStore(transfer.State, &place.state, .queued, .release);
        _ = @atomicRmw(u32, &one.attachment.uses, .Add, 1, .acquire);
        self.lock.lock();
        defer self.lock.unlock();
        self.queued[self.queued_count] = index;
        self.queued_count += 1;
        self.rouse();
        return place.id;
    }

    fn takePlace(self: *Thread) ?Index {
        if (self.free_count > 0) {
            self.free_count -= 1;
            return self.free[self.free_count];
        }
        if (self.used == limits.TRANSFERS_MAX) return null;
        self.used += 1;
        return @intCast(self.used - 1);
    }

    /// Have one end soon. False: there is none of that number.
    pub fn giveUp(self: *Thread, id: u64) bool {
        const index = id & 0xFFFF;
        if (index >= self.used) return false;
        const one = &self.transfers[@intCast(index)];
        if (@atomicLoad(transfer.State, &one.state, .acquire) == .free or one.id != id) return false;
        self.giveUpOne(one);
        return true;
    }

    /// Have all transfers of an attachment end soon.
    pub fn giveUpAttachment(self: *Thread, of: *const attachment.Attachment) void {
        for (self.transfers[0..self.used]) |*one| {
            const is_used = @atomicLoad(transfer.State, &one.state, .acquire) != .free;
            if (is_used and one.attachment == of) self.giveUpOne(one);
        }
    }

    fn giveUpOne(self: *Thread, one: *Transfer) void {
        @atomicStore(bool, &one.given_up, true, .release);
        self.lock.lock();
        defer self.lock.unlock();
        self.rouse();
    }

    fn rouse(self: *Thread) void {
        if (!self.is_asleep) return;
        self.is_asleep = false;
        sys.eventfdSignal(self.wake); // MH-2
    }

    /// Have T2 turn once more, and its drivers with it.
    pub fn nudge(self: *Thread) void {
        sys.eventfdSignal(self.wake);
    }

    /// Take records of transfers that have ended. Their number.
    pub fn poll(self: *Thread, into: []transfer.Done) u32 {
        self.lock.lock();
        defer self.lock.unlock();
        var n: u32 = 0;
        while (n < into.len and self.ended_count > 0) : (n += 1) {
            const index = self.ended[self.ended_first];
            self.ended_first = (self.ended_first + 1) % limits.TRANSFERS_MAX;
            self.ended_count -= 1;
            const one = &self.transfers[index];
            into[n] = one.done();
            @atomicStore(transfer.State, &one.state, .free, .release);
            self.free[self.free_count] = index;
            self.free_count += 1;
        }
        if (self.ended_count == 0) sys.eventfdClear(self.bell); // MH-3
        return n;
    }

    // ---- T2 ----

    /// The transfer of a number, which is a driver's.
    pub fn transferOf(self: *Thread, id: u64) *Transfer {
        const one = &self.transfers[@intCast(id & 0xFFFF)];
        std.debug.assert(one.id == id and isRunning(one));
        return one;
    }

    /// A transfer has ended. Nothing is written to its destination from here on.
    pub fn finish(self: *Thread, one: *Transfer, how: i32) void {
        std.debug.assert(one.state == .running);
        one.close();
        _ = @atomicRmw(u32, &one.attachment.uses, .Sub, 1, .release);
        one.status = how;
        self.lock.lock();
        defer self.lock.unlock();
        @atomicStore(transfer.State, &one.state, .ended, .release);
        self.ended[(self.ended_first + self.ended_count) % limits.TRANSFERS_MAX] = @intCast(one.id & 0xFFFF);
        self.ended_count += 1;
        if (self.ended_count == 1) sys.eventfdSignal(self.bell);
    }

    fn main(argument: ?*anyopaque) callconv(.c) ?*anyopaque {
        const self: *Thread = @ptrCast(@alignCast(argument.?));
        sys.threadName("trimesh-t2");
        var wait_ms: i32 = 0;
        while (!@atomicLoad(bool, &self.stopping, .seq_cst)) {
            self.wait(wait_ms);
            self.takeQueued();
            wait_ms = self.round();
            wait_ms = sooner(wait_ms, self.turnDrivers());
        }
        return null;
    }

    fn turnDrivers(self: *Thread) i32 {
        self.driving.lock();
        defer self.driving.unlock();
        var wait_ms: i32 = -1;
        for (self.drivers) |place| if (place) |driver| {
            wait_ms = sooner(wait_ms, driver.turn(driver.context));
        };
        return wait_ms;
    }

    /// Of two times to wait, where -1 is for ever.
    fn sooner(a: i32, b: i32) i32 {
        return if (a < 0) b else if (b < 0) a else @min(a, b);
    }

    /// Wait for events, at most this long, and have drivers handle theirs.
    fn wait(self: *Thread, wait_ms: i32) void {
        var most = wait_ms;
        if (most != 0) {
            self.lock.lock();
            defer self.lock.unlock();
            if (self.queued_count > 0 or self.isAnyGivenUp()) most = 0 else self.is_asleep = true;
        }
        var events: [limits.EVENTS_MAX]sys.Event = undefined;
        const n = sys.epollWait(self.epoll, &events, most);
        if (most != 0) {
            self.lock.lock();
            defer self.lock.unlock();
            self.is_asleep = false;
        }
        if (n == 0) return;
        self.driving.lock();
        defer self.driving.unlock();
        for (events[0..n]) |event| {
            const tag = std.enums.fromInt(Tag, event.data.u64 >> 56) orelse unreachable; // we made the data ourselves
            if (tag == .wake) {
                sys.eventfdClear(self.wake);
                continue;
            }
            for (self.drivers) |place| if (place) |driver| {
                if (driver.tag == tag) driver.ready(driver.context, @truncate(event.data.u64), event.events);
            };
        }
    }

    fn isAnyGivenUp(self: *Thread) bool {
        for (self.running[0..self.running_count]) |index| {
            const one = &self.transfers[index];
            if (isRunning(one) and one.isGivenUp() and !one.is_told) return true;
        }
        return false;
    }

    fn takeQueued(self: *Thread) void {
        self.forgetEnded(); // before any of their places comes again
        self.lock.lock();
        const first = self.running_count;
        for (self.queued[0..self.queued_count]) |index| {
            @atomicStore(transfer.State, &self.transfers[index].state, .running, .release);
            self.running[self.running_count] = index;
            self.running_count += 1;
        }
        self.queued_count = 0;
        const last = self.running_count;
        self.lock.unlock();
        self.driving.lock();
        defer self.driving.unlock();
        for (self.running[first..last]) |index| {
            const one = &self.transfers[index];
            if (one.carrier.how == .pends) self.driverOf(one).begin(self.driverOf(one).context, one);
        }
    }

    fn driverOf(self: *Thread, one: *const Transfer) *const Driver {
        for (&self.drivers) |*place| if (place.*) |*driver| {
            if (driver.carrier == one.carrier.bit) return driver;
        };
        unreachable; // an attachment has only carriers whose driver is there
    }

    fn isRunning(one: *const Transfer) bool {
        return @atomicLoad(transfer.State, &one.state, .acquire) == .running; // which only T2 makes it
    }

    fn forgetEnded(self: *Thread) void {
        var kept: u32 = 0;
        for (self.running[0..self.running_count]) |index| {
            if (!isRunning(&self.transfers[index])) continue;
            self.running[kept] = index;
            kept += 1;
        }
        self.running_count = kept;
    }

    /// A piece of each. How long until the next round: 0 = there is more to copy.
    fn round(self: *Thread) i32 {
        var wait_ms: i32 = -1;
        for (self.running[0..self.running_count], 1..) |index, n| {
            if (@atomicLoad(bool, &self.stopping, .seq_cst)) break;
            const one = &self.transfers[index];
            if (isRunning(one)) wait_ms = sooner(wait_ms, self.carry(one));
            if (n % limits.ROUND_PIECES == 0) { // those who come by a socket do not wait for all of these
                self.wait(0);
                _ = self.turnDrivers();
            }
        }
        return wait_ms;
    }

    fn carry(self: *Thread, one: *Transfer) i32 {
        const is_given_up = one.isGivenUp();
        if (one.carrier.how == .pends) {
            const driver = self.driverOf(one);
            if (is_given_up and !one.is_told) {
                one.is_told = true;
                self.driving.lock();
                defer self.driving.unlock();
                driver.giveUp(driver.context, one);
            }
            return -1;
        }
        var how = if (is_given_up) status.ERR_CANCELLED else one.step();
        if (how == transfer.LOCKED) {
            self.driving.lock(); // MH-4: the holder is looked at
            defer self.driving.unlock();
            how = one.stillLocked();
        }
        if (how == transfer.LOCKED) return limits.LOCK_AGAIN_MS;
        if (how == status.UNDER_WAY) return 0;
        self.finish(one, how);
        return -1;
    }
};
