//! All links of a process incarnation, as T0 uses them: a table of slots, one poll over them, and one flush.
//!
//! BU-1 After `init` nothing is allocated but what a new link needs. BU-2 Views that T0 holds stay mapped until
//! `pollDone`, whatever happens to their link. BU-3 In a forked child every call says so and touches nothing.

const std = @import("std");
const arms = @import("../rings/arms.zig");
const bell = @import("../rings/bell.zig");
const body = @import("../protocol/body.zig");
const carriage = @import("../rings/carriage.zig");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const link = @import("link.zig");
const busy_poll = @import("busy_poll.zig");
const records = @import("../protocol/record.zig");
const segment = @import("../rings/segment.zig");
const reactor = @import("reactor.zig");
const session = @import("../protocol/session.zig");
const shelf = @import("../rings/shelf.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const waits = @import("wait.zig");

const Link = link.Link;
pub const Watched = reactor.Watched;

pub const Options = struct {
    epoch: u64,
    host: u64,
    links_max: u32,
    ring_bytes: u32,
    beat_ms: u32,
    lease_ms: u32,
    stall_ms: u32,
    spin_us: u32 = 0,
};

pub const Bus = struct {
    common: link.Common,
    reactor: reactor.Reactor,
    links: []Link,
    pool: segment.Pool,
    /// Generation of the next link of each slot.
    generations: [limits.LINKS_MAX]u16,
    used: bell.Bits,
    /// Links that have something for the next poll.
    ready: bell.Bits,
    dirty: [limits.LINKS_MAX]u16,
    dirty_count: u32,
    touched: [limits.LINKS_MAX]u16,
    touched_count: u32,
    /// T0 holds a batch.
    borrowing: bool,
    wait: waits.Wait,
    /// Where the next poll begins, so that no link is always last.
    turn: u32,
    /// One word, 1 here and 0 in every forked child.
    alive: *u32,

    fn bytesFor(links_max: u32) usize {
        return std.mem.alignForward(usize, @sizeOf(Bus), 4096) + links_max * @sizeOf(Link);
    }

    /// Make a bus in memory of its own. Returns a status.
    pub fn create(options: Options, out: *?*Bus) i32 {
        const memory = sys.mapPrivate(bytesFor(options.links_max)) orelse return status.ofErrno(-sys.ENOMEM);
        const self: *Bus = @ptrCast(@alignCast(memory));
        const table: [*]Link = @ptrCast(@alignCast(memory + std.mem.alignForward(usize, @sizeOf(Bus), 4096)));
        // The memory is zeroed: generations, bits, counts and flags begin at 0, and slots as `.free`.
        self.links = table[0..options.links_max];
        self.wait = .{ .busy_poll = .{ .bound = .{ .max_ns = @as(u64, options.spin_us) * 1_000 } } };
        const rc = self.start(options);
        if (rc < 0) {
            self.releaseMemory();
            return rc;
        }
        out.* = self;
        return status.OK;
    }

    fn start(self: *Bus, options: Options) i32 {
        self.common = .{
            .epoch = options.epoch,
            .host = options.host,
            .ring_bytes = options.ring_bytes,
            .beat_ms = options.beat_ms,
            .lease_ms = options.lease_ms,
            .stall_ms = options.stall_ms,
            .bell = .{ .page = undefined, .fd = -1 },
            .page_fd = -1,
            .reactor_bell = .{ .page = undefined, .fd = -1 },
            .pool = &self.pool,
            .spare_fd = -1,
        };
        const rc = self.startOwned();
        if (rc < 0) {
            sys.closeAt(&self.common.bell.fd);
            sys.closeAt(&self.common.page_fd);
            sys.closeAt(&self.common.reactor_bell.fd);
        }
        return rc;
    }

    fn startOwned(self: *Bus) i32 {
        const common = &self.common;
        common.bell.fd = sys.eventfd();
        if (common.bell.fd < 0) return status.ofErrno(common.bell.fd);
        common.reactor_bell.fd = sys.eventfd();
        if (common.reactor_bell.fd < 0) return status.ofErrno(common.reactor_bell.fd);
        common.page_fd = sys.memfd("trimesh-bell", bell.PAGE_BYTES);
        if (common.page_fd < 0) return status.ofErrno(common.page_fd);
        const page = sys.mapShared(common.page_fd, bell.PAGE_BYTES) orelse return status.ofErrno(-sys.ENOMEM);
        common.bell.page = @ptrCast(page);
        const own = sys.mapPrivate(bell.PAGE_BYTES) orelse {
            sys.unmap(page, bell.PAGE_BYTES);
            return status.ofErrno(-sys.ENOMEM);
        };
        common.reactor_bell.page = @ptrCast(own);
        const word = sys.mapWipedOnFork();
        const rc: i32 = if (word == null) -sys.ENOMEM else self.reactor.init(common, self.links);
        if (rc != 0) {
            sys.unmap(page, bell.PAGE_BYTES);
            sys.unmap(own, bell.PAGE_BYTES);
            if (word) |pages| sys.unmap(pages, 4096);
            return if (rc > 0) status.ERR_THREAD else status.ofErrno(rc);
        }
        self.alive = @ptrCast(word.?);
        self.alive.* = 1;
        common.spare_fd = sys.duplicate(common.bell.fd);
        return status.OK;
    }

    /// Join T1 and give everything back.
    pub fn destroy(self: *Bus) void {
        self.reactor.stopAndJoin();
        self.borrowing = false;
        for (self.links) |*one| {
            if (one.state != .free) one.releaseAll();
        }
        self.pool.deinit();
        self.closeFds();
        if (self.common.arms) |one| one.destroy();
        sys.unmap(@ptrCast(@alignCast(self.common.bell.page)), bell.PAGE_BYTES);
        sys.unmap(@ptrCast(@alignCast(self.common.reactor_bell.page)), bell.PAGE_BYTES);
        sys.unmap(@ptrCast(@alignCast(self.alive)), 4096);
        self.releaseMemory();
    }

    fn releaseMemory(self: *Bus) void {
        sys.unmap(@ptrCast(@alignCast(self)), bytesFor(@intCast(self.links.len)));
    }

    fn closeFds(self: *Bus) void {
        self.reactor.closeFds();
        sys.closeAt(&self.common.bell.fd);
        sys.closeAt(&self.common.reactor_bell.fd);
        sys.closeAt(&self.common.page_fd);
        sys.closeAt(&self.common.spare_fd);
        if (self.common.arms) |one| sys.closeAt(&one.timer);
    }

    /// T1 must not be in the middle of something, nor T0 of another thread, when the memory is copied. Bodies that are
    /// lent become this process's own.
    pub fn beforeFork(self: *Bus) void {
        self.reactor.lock.lock();
        for (self.links) |*one| {
            if (one.state != .free) one.carriage.shelf.detachLent();
        }
    }

    /// Go on.
    pub fn afterForkParent(self: *Bus) void {
        self.reactor.lock.unlock();
    }

    /// Close what was inherited. Closing takes nothing out of the parent's epoll set, which watches the open files, not
    /// our numbers.
    pub fn afterForkChild(self: *Bus) void {
        for (self.links) |*one| {
            if (one.state != .free) one.closeFds();
        }
        self.pool.closeFds();
        self.closeFds();
        self.reactor.lock.unlock();
    }

    /// Obey the table of planned faults behind `fd`. Returns a status.
    pub fn armFaults(self: *Bus, fd: i32, secret: u64) i32 {
        if (self.common.arms != null) return status.ERR_STATE;
        var rc: i32 = 0;
        const made = arms.Arms.create(self.common.epoch, self.links.len, fd, secret, &rc) orelse
            return if (rc == -sys.EINVAL) status.ERR_ARGUMENT else status.ofErrno(rc);
        rc = self.reactor.arm(made);
        if (rc < 0) {
            made.destroy();
            return status.ofErrno(rc);
        }
        self.common.arms = made;
        self.pool.arms = made;
        for (self.links, 0..) |*one, i| {
            if (one.state != .free) one.gate = made.gateOf(@intCast(i), one.rx.cursor);
        }
        return status.OK;
    }

    /// Whether this is a forked child of the process that made the bus.
    pub fn isForked(self: *const Bus) bool {
        return @atomicLoad(u32, self.alive, .monotonic) != 1;
    }

    // ---- links ----

    /// The link of a handle, unless it was freed.
    pub fn find(self: *Bus, id: u32) ?*Link {
        const slot = id & 0xFFFF;
        if (slot >= self.links.len) return null;
        const one = &self.links[slot];
        if (one.state == .free or one.state == .zombie or one.id() != id) return null;
        return one;
    }

    fn freeSlot(self: *const Bus) ?u32 {
        for (self.used, 0..) |word, i| {
            const slot = i * 64 + @ctz(~word);
            if (word != std.math.maxInt(u64) and slot < self.links.len) return @intCast(slot);
        }
        return null;
    }

    /// Begin a link over `fd`, which is taken over on success. Returns a status.
    pub fn openLink(self: *Bus, fd: i32, kind: records.Kind, watched: Watched, epoch: u64, id_out: *u32) i32 {
        const slot = self.freeSlot() orelse return status.ERR_LIMIT;
        const one = &self.links[slot];
        self.generations[slot] +%= 1;
        const rc = one.open(&self.common, slot, self.generations[slot], kind, fd);
        if (rc < 0) return rc;
        one.peer_epoch_wanted = epoch;
        if (self.common.arms) |armed| one.gate = armed.gateOf(slot, 0);
        const adopted = self.reactor.adopt(one, watched);
        if (adopted < 0) {
            one.fd = -1; // stays the caller's
            one.releaseAll();
            return status.ofErrno(adopted);
        }
        self.used[slot / 64] |= bitOf(slot);
        self.markReady(slot); // the peer's hello may be there already: then the next poll brings the link up
        // The hello is flushed with the next tick at the latest; T1 has to be told of the one in a stream's ring.
        if (kind == .stream) self.common.reactor_bell.ring(slot);
        id_out.* = one.id();
        return status.OK;
    }

    /// Have T1 watch the process behind `pidfd` for a link. Returns a status.
    pub fn watch(self: *Bus, one: *Link, pidfd: i32) i32 {
        if (one.t1.pid_fd >= 0) return status.ERR_STATE;
        const rc = self.reactor.watchProcess(one, pidfd);
        return if (rc < 0) status.ofErrno(rc) else status.OK;
    }

    /// Say goodbye. Returns a status.
    pub fn closeLink(self: *Bus, one: *Link) i32 {
        const rc = one.sayBye();
        self.markReady(one.slot); // to report the end
        if (rc != status.OK) return rc;
        self.reactor.linger(one);
        self.markDirty(one);
        return rc;
    }

    /// End a link now; its slot can be used again when no view of it is borrowed.
    pub fn freeLink(self: *Bus, one: *Link) void {
        self.reactor.abandon(one);
        self.ready[one.slot / 64] &= ~bitOf(one.slot);
        if (one.borrowed) {
            one.state = .zombie; // BU-2
            return;
        }
        self.recycle(one);
    }

    fn recycle(self: *Bus, one: *Link) void {
        // What was sent goes out even if the link is freed before the flush: the peer is woken for it now.
        if (one.dirty) self.undirty(one);
        one.releaseAll();
        self.used[one.slot / 64] &= ~bitOf(one.slot);
    }

    fn bitOf(slot: u32) u64 {
        return @as(u64, 1) << @intCast(slot % 64);
    }

    /// Have the next poll look at a link, and see to it that there is one: the task that polls may sleep already.
    fn markReady(self: *Bus, slot: u32) void {
        self.common.bell.ring(slot);
    }

    // ---- sending ----

    /// Send all of a message that fits; see `tm_link_send`.
    pub fn send(self: *Bus, one: *Link, lane: frame.Lane, message: session.Message, cursor: *session.Cursor) i32 {
        const rc = one.send(lane, message, cursor);
        if (cursor.started != 0) self.published(one);
        if (rc == status.ERR_DOWN) self.markReady(one.slot);
        return rc;
    }

    /// A peer that looks is shown the first message at once; the others, and those who sleep, wait for the flush.
    fn published(self: *Bus, one: *Link) void {
        self.wait.busy_poll.traffic = true;
        if (!one.dirty and one.has_tx and one.peer_bell.isSpunOn()) {
            one.peer_bell.ring(one.peer_slot);
        } else {
            self.markDirty(one);
        }
    }

    fn markDirty(self: *Bus, one: *Link) void {
        if (one.dirty) return;
        one.dirty = true;
        self.dirty[self.dirty_count] = @intCast(one.slot);
        self.dirty_count += 1;
    }

    fn undirty(self: *Bus, one: *Link) void {
        const at = std.mem.indexOfScalar(u16, self.dirty[0..self.dirty_count], @intCast(one.slot)).?;
        self.dirty_count -= 1;
        self.dirty[at] = self.dirty[self.dirty_count];
        self.ringPeer(one);
    }

    fn ringPeer(_: *Bus, one: *Link) void {
        one.dirty = false;
        if (one.has_tx) one.peer_bell.ring(one.peer_slot);
    }

    /// Ring the bells of all that were written to.
    pub fn flush(self: *Bus) void {
        self.tellRetired();
        var left: u32 = 0; // those whose bodies could not be given back for want of room stay
        for (self.dirty[0..self.dirty_count]) |slot| {
            const one = &self.links[slot];
            const done = carriage.sendReturned(one);
            self.ringPeer(one);
            if (done) continue;
            one.dirty = true;
            self.dirty[left] = slot;
            left += 1;
        }
        self.dirty_count = left;
    }

    // ---- segments ----

    /// Lend the memory of a body. Null: the link has ended on it.
    pub fn takeBody(self: *Bus, one: *Link, word: u64) ?shelf.Lent {
        const lent = carriage.takeBody(one, word, &self.common.spare_fd);
        if (self.common.spare_fd < 0) self.common.spare_fd = sys.duplicate(self.common.bell.fd);
        if (lent == null) self.markReady(one.slot);
        return lent;
    }

    /// Take a body back; its memory is unmapped if the link is gone.
    pub fn giveBack(self: *Bus, id: u32, ref: body.Ref, pages: usize, bytes: u64) void {
        if (self.find(id)) |one| {
            if (one.carriage.shelf.giveBack(ref, pages)) return self.markDirty(one);
        }
        sys.unmap(@ptrFromInt(pages), @intCast(bytes));
    }

    /// Have peers unmap segments that are gone.
    fn tellRetired(self: *Bus) void {
        while (self.pool.nextRetired()) |one| {
            for (one.links, 0..) |word, i| {
                var left = word & self.used[i];
                while (left != 0) : (left &= left - 1) {
                    const peer = &self.links[i * 64 + @ctz(left)];
                    if (carriage.sendRetired(peer, one.ref)) self.markDirty(peer);
                }
            }
        }
    }

    // ---- receiving ----

    /// Fill `into` from the links that have something. Returns the number of records, or a status.
    pub fn poll(self: *Bus, into: []records.Record) i32 {
        if (self.borrowing) return status.ERR_STATE;
        self.wait.end(self.common.bell);
        return self.collect(into);
    }

    /// The same after a wait that `beforeWait` has prepared. Nothing while T0 is armed and the bell has not rung.
    pub fn afterWait(self: *Bus, into: []records.Record) i32 {
        if (self.borrowing) return status.ERR_STATE;
        return if (self.wait.endWith(self.common.bell)) self.collect(into) else 0;
    }

    /// Wait for the bell alone; see `Wait.pass`.
    pub fn waitFor(self: *Bus, poller: i32, most_ns: u64, into: []records.Record) i32 {
        if (self.borrowing) return status.ERR_STATE;
        self.flush();
        return if (self.wait.pass(self.common.bell, &self.ready, poller, most_ns)) self.collect(into) else 0;
    }

    /// Whether `afterWait` would look for anything.
    pub fn hasNews(self: *const Bus) bool {
        return self.wait.hasNews(self.common.bell, &self.ready);
    }

    fn collect(self: *Bus, into: []records.Record) i32 {
        _ = self.reactor.polls.fetchAdd(1, .release);
        _ = self.common.bell.take(&self.ready);
        self.borrowing = true;
        var count: u32 = 0;
        const words: u32 = @intCast(self.ready.len);
        for (0..words) |i| {
            const index = (self.turn + i) % words;
            self.ready[index] &= self.used[index]; // rings for links that are gone
            var left = self.ready[index];
            while (left != 0 and count < into.len) : (left &= left - 1) {
                const slot: u32 = @intCast(index * 64 + @ctz(left));
                const more = self.pollLink(&self.links[slot], into[count..], &count);
                if (!more) self.ready[index] &= ~bitOf(slot);
            }
        }
        self.turn = (self.turn + 1) % words;
        if (count > 0) self.wait.busy_poll.came(self.common.bell) else self.pollDone();
        return @intCast(count);
    }

    fn pollLink(self: *Bus, one: *Link, into: []records.Record, count: *u32) bool {
        var n: u32 = 0;
        const signals = one.signals.load(.acquire);
        if (one.state == .greeting and one.kind == .local) {
            if (self.greet(one, signals)) |record| {
                into[0] = record;
                n = 1;
            }
        }
        var more = n == into.len;
        if (!more) {
            var polled: u32 = 0;
            more = one.poll(signals, into[n..], &polled);
            n += polled;
        }
        if (n > 0 or one.rx.cursor != one.rx.tail) self.touch(one);
        if (one.gate != null and one.state != .down) self.common.arms.?.plan(one);
        count.* += n;
        return more;
    }

    fn greet(self: *Bus, one: *Link, signals: u32) ?records.Record {
        switch (one.greetLocal()) {
            .waiting => {
                if (signals & records.Signal.READABLE == 0) return null; // a look too early; T1 still watches
                _ = one.signals.fetchAnd(~records.Signal.READABLE, .acq_rel);
                self.reactor.greeted(one, false);
                return null;
            },
            .failed => return null,
            .up => {
                self.reactor.greeted(one, true);
                return one.nowUp();
            },
        }
    }

    fn touch(self: *Bus, one: *Link) void {
        if (one.borrowed) return;
        one.borrowed = true;
        self.touched[self.touched_count] = @intCast(one.slot);
        self.touched_count += 1;
    }

    /// Take the views of the batch back, and tell writers of the room.
    pub fn pollDone(self: *Bus) void {
        for (self.touched[0..self.touched_count]) |slot| {
            const one = &self.links[slot];
            one.borrowed = false;
            if (one.state == .zombie) {
                self.recycle(one);
            } else {
                one.release();
            }
        }
        self.touched_count = 0;
        self.borrowing = false;
    }

    /// True: something has come, do not sleep.
    pub fn arm(self: *Bus) bool {
        return self.wait.arm(self.common.bell, &self.ready);
    }

    /// T0 is about to wait for many things; see `Wait.begin`.
    pub fn beforeWait(self: *Bus, poller: i32) busy_poll.Seen {
        self.flush();
        return self.wait.begin(self.common.bell, &self.ready, poller);
    }
};
