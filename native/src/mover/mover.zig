//! What one process grants to others, and how it reaches what they have granted: as T0 uses it.
//!
//! MO-1 After `create` nothing is allocated but what a block, a mapping or a view needs. MO-2 In a forked child every
//! call says so and touches nothing; blocks and views stay mapped there, and are shared. MO-3 An attachment that was
//! closed goes when the last transfer and the last view of it have ended. MO-4 T0 makes and closes descriptors under
//! `calling` only: another thread may fork meanwhile, and the child closes those that are in tables.

const std = @import("std");
const block = @import("../grants/block.zig");
const carrier = @import("../copying/carrier.zig");
const carrier_tcp = @import("../tcp/carrier_tcp.zig");
const grants = @import("../grants/grants.zig");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const access_file = @import("../grants/access.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const tcp_socket = @import("../tcp/tcp_socket.zig");
const transfer = @import("../copying/transfer.zig");
const views = @import("../grants/view.zig");
const attachment = @import("../grants/attachment.zig");
const Access = access_file.Access;
const Thread = @import("../copying/mover_thread.zig").Thread;
const Ucx = @import("../ucx/ucx.zig").Ucx;

const Attachment = attachment.Attachment;

pub const Options = struct {
    epoch: u64,
    host: u64,
    /// Carriers that may be used.
    carriers: u32,
    /// At which to listen; empty = not at all.
    address: []const u8,
    /// A library of UCX to look at after those of the system; empty = none.
    ucx: []const u8,
};

pub const Mover = struct {
    /// Held by T0 while descriptors come and go, and by whoever forks.
    calling: sys.Mutex,
    carriers: u32,
    home: attachment.Home,
    self: access_file.Self,
    table: *ledger.Table,
    table_fd: i32,
    grants: grants.Grants,
    blocks: block.Blocks,
    attachments: [limits.ATTACHMENTS_MAX]Attachment,
    /// Places from here on were never used.
    attachments_used: u32,
    /// Closed ones that are still in use: MO-3.
    attachments_closing: u32,
    views: views.Views,
    thread: Thread,
    tcp: carrier_tcp.TcpCarrier,
    /// Null: not allowed here.
    ucx: ?*Ucx,
    /// Others were allowed to trace this process.
    allows_tracers: bool,
    /// One word, 1 here and 0 in every forked child.
    alive: *u32,

    /// Make a mover in memory of its own. Returns a status.
    pub fn create(options: Options, out: *?*Mover) i32 {
        const memory = sys.mapPrivate(@sizeOf(Mover)) orelse return status.ofErrno(-sys.ENOMEM);
        const self: *Mover = @ptrCast(@alignCast(memory)); // zeroed: nothing is granted, attached to or under way
        const rc = self.start(options);
        if (rc < 0) {
            sys.unmap(memory, @sizeOf(Mover));
            return status.ofErrno(rc);
        }
        out.* = self;
        return status.OK;
    }

    /// 0 or -errno.
    fn start(self: *Mover, options: Options) i32 {
        self.carriers = options.carriers;
        self.self.pid = @intCast(sys.getpid());
        self.self.started = process.startedAt(self.self.pid) orelse 0; // no /proc: others cannot attach to it either
        self.table_fd = sys.memfd("trimesh-ledger", ledger.Table.BYTES);
        if (self.table_fd < 0) return self.table_fd;
        const rc = self.startMapped();
        if (rc < 0) {
            sys.closeAt(&self.table_fd);
            return rc;
        }
        self.table.init(options.epoch);
        self.grants.table = self.table;
        self.blocks.table = self.table;
        self.home = .{
            .epoch = options.epoch,
            .host = options.host,
            .started = self.self.started,
            .pid = self.self.pid,
            .ledger = @intCast(self.table_fd),
            .port = 0,
            .address_size = 0,
            .address = @splat(0),
        };
        const driven = self.startDrivers(options);
        if (driven >= 0) return 0;
        self.thread.stop();
        if (self.ucx) |ucx| ucx.destroy();
        self.giveBack();
        return driven;
    }

    /// Carriers that pend. 0 or -errno.
    fn startDrivers(self: *Mover, options: Options) i32 {
        if (options.carriers & attachment.UCX != 0)
            self.ucx = Ucx.create(&self.thread, options.ucx) orelse return -sys.ENOMEM;
        if (options.carriers & attachment.TCP == 0) return 0;
        if (options.address.len == 0) return self.tcp.start(&self.thread, &self.grants, self.self, options.epoch, null);
        var address = tcp_socket.Address{ .bytes = @splat(0), .size = @intCast(options.address.len), .port = 0 };
        @memcpy(address.bytes[0..options.address.len], options.address);
        const rc = self.tcp.start(&self.thread, &self.grants, self.self, options.epoch, &address);
        if (rc < 0) return rc;
        self.home.port = address.port;
        self.home.address_size = address.size;
        self.home.address = address.bytes;
        return if (self.thread.start() == status.OK) 0 else -sys.EAGAIN;
    }

    fn startMapped(self: *Mover) i32 {
        const pages = sys.mapLazily(self.table_fd, ledger.Table.BYTES, 0, true) orelse return -sys.ENOMEM;
        const word = sys.mapWipedOnFork();
        var rc: i32 = -sys.ENOMEM;
        if (word != null and sys.keepFromChildren(pages, ledger.Table.BYTES)) rc = self.thread.init();
        if (rc < 0) {
            sys.unmap(pages, ledger.Table.BYTES);
            if (word) |one| sys.unmap(one, 4096);
            return rc;
        }
        self.table = @ptrCast(@alignCast(pages));
        self.alive = @ptrCast(word.?);
        self.alive.* = 1;
        return 0;
    }

    /// Stop T2 and give everything back but the blocks that are in use.
    pub fn destroy(self: *Mover) void {
        self.thread.stop();
        if (self.ucx) |ucx| ucx.destroy();
        // Open views stay mapped, and their claims stay taken: whoever was lent them may look until the process ends.
        for (self.attachments[0..self.attachments_used]) |*one| {
            if (one.state != .free) one.deinit(self.table);
        }
        self.blocks.deinit();
        self.giveBack();
        sys.unmap(@ptrCast(@alignCast(self)), @sizeOf(Mover));
    }

    fn giveBack(self: *Mover) void {
        sys.unmap(@ptrCast(@alignCast(self.table)), ledger.Table.BYTES);
        sys.closeAt(&self.table_fd);
        sys.unmap(@ptrCast(@alignCast(self.alive)), 4096);
    }

    /// Whether this process is a child of the one that made it.
    pub fn isForked(self: *const Mover) bool {
        return @atomicLoad(u32, self.alive, .monotonic) != 1;
    }

    /// Neither T0 nor T2 must be in the middle of something when the memory is copied.
    pub fn beforeFork(self: *Mover) void {
        self.calling.lock();
        self.thread.driving.lock();
        self.thread.lock.lock();
    }

    /// Go on, and remember that a child has the blocks, too.
    pub fn afterForkParent(self: *Mover) void {
        self.blocks.markInherited();
        self.goOn();
    }

    /// Close every descriptor, touch nothing else.
    pub fn afterForkChild(self: *Mover) void {
        self.thread.forget();
        for (self.attachments[0..self.attachments_used]) |*one| one.closeFds();
        self.blocks.closeFds();
        sys.closeAt(&self.table_fd);
        self.goOn();
    }

    fn goOn(self: *Mover) void {
        self.thread.lock.unlock();
        self.thread.driving.unlock();
        self.calling.unlock();
    }

    // ---- granting ----

    /// Grant access to memory, which lies in a block, or in none (0). Returns a status.
    pub fn grant(self: *Mover, bytes: [*]u8, size: u64, rights: u32, number: u32, name: *transfer.GrantName) i32 {
        var terms = ledger.Terms{
            .address = @intFromPtr(bytes),
            .size = size,
            .block_offset = 0,
            .block = number,
            .rights = rights,
            .secret = name.secret,
        };
        if (terms.address +% size < terms.address) return status.ERR_ARGUMENT;
        if (number != 0) {
            const one = self.blocks.find(number) orelse return status.ERR_ARGUMENT;
            terms.block_offset = terms.address -% @intFromPtr(one.pages.?);
            if (terms.block_offset > one.bytes or size > one.bytes - terms.block_offset) return status.ERR_ARGUMENT;
        }
        if (!self.grants.add(terms, &name.place, &name.generation)) return status.ERR_LIMIT;
        if (number != 0) self.blocks.find(number).?.grants += 1;
        if (!self.allows_tracers and self.carriers & attachment.CMA != 0) {
            self.allows_tracers = true;
            process.allowTracers();
        }
        return status.OK;
    }

    /// Grant access to memory of a device, to adapters only. Returns a status.
    pub fn grantDevice(
        self: *Mover,
        bytes: [*]u8,
        size: u64,
        rights: u32,
        memory: grants.Memory,
        name: *transfer.GrantName,
    ) i32 {
        const range = grants.Range{ .memory = memory, .address = @intFromPtr(bytes), .size = size, .rights = rights };
        if (range.address +% size < range.address) return status.ERR_ARGUMENT;
        const is_added = self.grants.addDevice(range, name.secret, &name.place, &name.generation);
        return if (is_added) status.OK else status.ERR_LIMIT;
    }

    /// Let nothing new begin. Returns a status.
    pub fn revoke(self: *Mover, name: *const transfer.GrantName) i32 {
        self.calling.lock(); // holders of claims are looked at
        defer self.calling.unlock();
        _ = self.grants.find(name.place, name.generation) orelse return status.ERR_ARGUMENT;
        if (self.ucx) |ucx| ucx.revoke(name.place);
        if (!self.grants.revoke(name.place, name.generation)) return status.OK;
        if (self.carriers & attachment.TCP != 0) self.tcp.letGo();
        return status.FULL;
    }

    /// What the handle of a grant says to readers with an adapter: the number of bytes, or a negative status.
    pub fn exportGrant(self: *Mover, name: *const transfer.GrantName, into: []u8) i32 {
        const row = self.grants.find(name.place, name.generation) orelse return status.ERR_ARGUMENT;
        if (row.now() != ledger.wordOf(name.generation, .granted)) return status.ERR_REVOKED;
        const ucx = self.ucx orelse return 0;
        return ucx.exportGrant(.{
            .place = name.place,
            .generation = name.generation,
            .secret = row.terms.secret,
        }, row.range, into);
    }

    /// Forget a grant that was revoked. Returns a status.
    pub fn drop(self: *Mover, name: *const transfer.GrantName) i32 {
        self.calling.lock(); // holders of claims are looked at
        defer self.calling.unlock();
        const row = self.grants.find(name.place, name.generation) orelse return status.ERR_ARGUMENT;
        if (row.now() == ledger.wordOf(name.generation, .granted)) return status.ERR_STATE;
        const number = row.terms.block;
        const dropped = self.grants.drop(name.place, name.generation);
        if (self.blocks.find(number)) |one| {
            one.grants -= 1;
            if (dropped != .free) one.spoilt = true;
            if (dropped == .used_here) one.pinned = true;
        }
        return if (dropped == .free) status.OK else status.FULL;
    }

    /// A block of at least `size` bytes. Its number, or a negative status.
    pub fn takeBlock(self: *Mover, size: u64) i32 {
        self.calling.lock();
        defer self.calling.unlock();
        const rc = self.blocks.take(size);
        return if (rc > 0) rc else if (rc == 0) status.ERR_LIMIT else status.ofErrno(rc);
    }

    /// Take a block back. Returns a status.
    pub fn giveBackBlock(self: *Mover, number: u32) i32 {
        self.calling.lock();
        defer self.calling.unlock();
        const one = self.blocks.find(number) orelse return status.ERR_ARGUMENT;
        if (one.grants > 0) return status.ERR_STATE;
        self.blocks.giveBack(one);
        return status.OK;
    }

    // ---- attachments ----

    /// Attach to a process. Null: there are too many attachments.
    pub fn attach(self: *Mover, home: *const attachment.Home) ?u32 {
        self.calling.lock();
        defer self.calling.unlock();
        self.sweepClosed();
        const slot = self.freeAttachment() orelse return null;
        const one = &self.attachments[slot];
        one.generation +%= 1;
        if (one.generation == 0) one.generation = 1;
        one.open(home, &self.home, self.table, self.carriers);
        if (self.carriers & attachment.TCP == 0) one.why_not.add("tcp: not allowed here", .{});
        if (!one.gone) {
            for (self.thread.drivers) |place| if (place) |driver| {
                if (driver.reaches(driver.context, one)) one.carriers |= driver.carrier;
            };
        }
        return @as(u32, one.generation) << 16 | slot;
    }

    fn freeAttachment(self: *Mover) ?u32 {
        for (self.attachments[0..self.attachments_used], 0..) |*one, slot| {
            if (one.state == .free) return @intCast(slot);
        }
        if (self.attachments_used == limits.ATTACHMENTS_MAX) return null;
        self.attachments_used += 1;
        return self.attachments_used - 1;
    }

    /// The attachment of a handle, unless it was closed.
    pub fn findAttachment(self: *Mover, id: u32) ?*Attachment {
        const slot = id & 0xFFFF;
        if (slot >= self.attachments_used) return null;
        const one = &self.attachments[slot];
        return if (one.state == .open and one.generation == id >> 16) one else null;
    }

    /// End an attachment; what is under way is given up.
    pub fn detach(self: *Mover, one: *Attachment) void {
        one.state = .closed;
        self.attachments_closing += 1;
        self.thread.giveUpAttachment(one);
        self.sweep();
    }

    /// Give back what attachments hold that were closed and are not in use any more.
    fn sweep(self: *Mover) void {
        if (self.attachments_closing == 0) return;
        self.calling.lock();
        defer self.calling.unlock();
        self.sweepClosed();
    }

    fn sweepClosed(self: *Mover) void {
        if (self.attachments_closing == 0) return;
        for (self.attachments[0..self.attachments_used]) |*one| {
            if (one.state != .closed or @atomicLoad(u32, &one.uses, .acquire) > 0) continue;
            one.deinit(self.table);
            self.attachments_closing -= 1;
        }
    }

    // ---- transfers ----

    /// Begin a transfer. Returns a status: OK, and `done` says how it has ended; or UNDER_WAY; FULL; or an error.
    pub fn begin(self: *Mover, request: *const transfer.Request, one: *Attachment, done: *transfer.Done) i32 {
        self.calling.lock(); // a block may be opened
        defer self.calling.unlock();
        const allowed = request.possible() & one.carriers;
        if (one.hasEnded()) return ended(done, status.ERR_GONE);
        if (one.table != null and allowed & (attachment.LOCAL | attachment.SHM | attachment.CMA) != 0) {
            var why: i32 = 0;
            const wanted = request.wanted();
            if (Access.open(one, self.self, &self.grants, &wanted, &why)) |found| {
                var access = found;
                if (carrier.pick(&access, allowed)) |by| return self.carry(request, one, by, access, done);
                access.close();
            } else if (why != status.ERR_DEVICE or allowed & attachment.UCX == 0) return ended(done, why);
        }
        const unreachable_for = if (request.memoryOf() == .host) unreachableFor(one) else status.ERR_DEVICE;
        const by = carrier.pickPending(allowed) orelse return ended(done, unreachable_for);
        return self.submit(&.of(request, one, by, null), done);
    }

    fn unreachableFor(one: *Attachment) i32 {
        return if (one.isEnding()) status.ERR_GONE else status.ERR_UNREACHABLE;
    }

    fn ended(done: *transfer.Done, how: i32) i32 {
        done.status = how;
        return status.OK;
    }

    fn carry(
        self: *Mover,
        request: *const transfer.Request,
        one: *Attachment,
        by: *const carrier.Carrier,
        access: Access,
        done: *transfer.Done,
    ) i32 {
        var small = transfer.Transfer.of(request, one, by, access);
        const is_atomic = request.kindOf().isAtomic();
        if (is_atomic and !transfer.Transfer.isAligned(&access)) {
            small.close();
            return status.ERR_ARGUMENT;
        }
        if (request.size <= limits.INLINE_BYTES_MAX) {
            var how = small.step();
            var tries: u32 = 1;
            while (how == transfer.LOCKED and tries < limits.LOCK_TRIES) : (tries += 1) {
                if (tries % 20 == 0) sys.threadYield(); // to the holder, if it waits for this core
                how = small.step();
            }
            if (how != transfer.LOCKED) {
                small.close();
                small.status = how;
                done.* = small.done();
                return status.OK;
            }
        }
        const rc = self.submit(&small, done);
        if (rc != status.UNDER_WAY) small.close();
        return rc;
    }

    fn submit(self: *Mover, one: *const transfer.Transfer, done: *transfer.Done) i32 {
        const rc = self.thread.start();
        if (rc < 0) return rc;
        done.id = self.thread.submit(one) orelse return status.FULL;
        done.carrier = one.carrier.bit;
        return status.UNDER_WAY;
    }

    /// Take records of transfers that have ended.
    pub fn poll(self: *Mover, into: []transfer.Done) u32 {
        const n = self.thread.poll(into);
        self.sweep();
        return n;
    }

    // ---- views ----

    /// Look at granted memory where it lies. Returns a status.
    pub fn openView(
        self: *Mover,
        one: *Attachment,
        wanted: *const ledger.Wanted,
        mode: views.Mode,
        out: *views.Opened,
    ) i32 {
        self.calling.lock(); // a block is opened
        defer self.calling.unlock();
        if (one.table == null or one.carriers & (attachment.LOCAL | attachment.SHM) == 0)
            return unreachableFor(one);
        var why: i32 = 0;
        var access = Access.open(one, self.self, &self.grants, wanted, &why) orelse return why;
        const rc = self.views.open(&access, wanted.size, mode, &self.blocks, out);
        if (rc == status.OK) _ = @atomicRmw(u32, &one.uses, .Add, 1, .acquire) else access.close();
        return if (rc == status.ERR_UNREACHABLE) unreachableFor(one) else rc;
    }

    /// Look no more. False: there is no such view.
    pub fn closeView(self: *Mover, handle: u64) bool {
        const was_of = self.views.close(handle) orelse return false;
        _ = @atomicRmw(u32, &was_of.uses, .Sub, 1, .release);
        self.sweep();
        return true;
    }
};
