//! An attachment: one process's open view of another's home. A process of this host is attached to by opening its
//! ledger as /proc/PID/fd/N: it takes no part, and may end at any moment while that is done.
//!
//! AT-1 A home is believed only as far as it is found true: the start time of the process, asked for while a pidfd of
//! it shows no end; seals, size, head and epoch of the ledger. AT-2 What a ledger says of a block is held against the
//! block's own descriptor: inode, size, seals. After that no access to the mapping can fail. AT-3 A block stays mapped
//! while a transfer or view goes through it; otherwise as long as the ledger names it. AT-4 What is mapped outlives the
//! program of its owner: a process that calls exec goes on, and its ledger never changes again, but is closed.

const std = @import("std");
const assert = std.debug.assert;
const ledger = @import("ledger.zig");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const sys = @import("../system/sys.zig");

const Pages = [*]align(4096) u8;

pub const LOCAL: u32 = 1;
pub const SHM: u32 = 2;
pub const CMA: u32 = 4;
pub const TCP: u32 = 8;
pub const UCX: u32 = 16;
pub const ALL: u32 = 31;

/// How others reach a process. As in trimesh.h.
pub const Home = extern struct {
    epoch: u64,
    host: u64,
    started: u64,
    pid: u32,
    ledger: u32,
    port: u32,
    address_size: u32,
    address: [16]u8,
};

/// Why carriers do not work: "shm: ...; cma: ...".
pub const WhyNot = struct {
    text: [limits.WHY_NOT_BYTES:0]u8,
    size: u32,

    /// Say why one does not. What does not fit is cut off.
    pub fn add(self: *WhyNot, comptime format: []const u8, arguments: anytype) void {
        var line: [limits.WHY_NOT_BYTES]u8 = undefined;
        const said = std.fmt.bufPrint(&line, format, arguments) catch return;
        if (self.size > 0) self.append("; ");
        self.append(said);
    }

    fn append(self: *WhyNot, said: []const u8) void {
        assert(self.size <= limits.WHY_NOT_BYTES);
        const n = @min(said.len, limits.WHY_NOT_BYTES - self.size);
        @memcpy(self.text[self.size..][0..n], said[0..n]);
        self.size += @intCast(n);
        assert(self.size <= limits.WHY_NOT_BYTES); // the zero has its place behind them
        self.text[self.size] = 0;
    }
};

/// A block of the process that is attached to, mapped.
pub const Mapped = struct {
    /// Null: an empty place.
    pages: ?Pages,
    bytes: u64,
    inode: u64,
    /// Its number over there.
    block: u32,
    /// Transfers and views that go through it; atomic.
    uses: u32,
    stamp: u64,

    fn drop(self: *Mapped) void {
        assert(self.isIdle()); // AT-3
        assert(self.bytes > 0);
        sys.unmap(self.pages.?, @intCast(self.bytes));
        self.pages = null;
    }

    /// Whether it is mapped, and nothing goes through it.
    pub fn isIdle(self: *const Mapped) bool {
        return self.pages != null and @atomicLoad(u32, &self.uses, .acquire) == 0;
    }
};

pub const State = enum(u8) { free = 0, open, closed };

/// All zero is a free place, but for its generation.
pub const Attachment = struct {
    generation: u16,
    state: State,
    home: Home,
    /// Carriers that work.
    carriers: u32,
    gone: bool,
    why_not: WhyNot,
    pid_fd: i32,
    /// Null: it has none that can be opened. Our own for an attachment of this very process.
    table: ?*ledger.Table,
    /// Of the table's file; 0: a sandbox keeps it from us.
    inode: u64,
    /// Transfers under way and open views; atomic.
    uses: u32,
    blocks: [limits.ATTACHMENT_BLOCKS_MAX]Mapped,
    /// Places from here on were never used.
    blocks_used: u32,
    clock: u64,

    /// Begin: find out how the process can be reached, by any of the carriers `allowed`.
    pub fn open(self: *Attachment, home: *const Home, own: *const Home, own_table: *ledger.Table, allowed: u32) void {
        assert(self.state == .free);
        assert(self.generation > 0); // so that no handle is 0
        assert(allowed & ~ALL == 0);
        self.* = .{
            .generation = self.generation,
            .state = .open,
            .home = home.*,
            .carriers = 0,
            .gone = false,
            .why_not = .{ .text = undefined, .size = 0 },
            .pid_fd = -1,
            .table = null,
            .inode = 0,
            .uses = 0,
            .blocks = @splat(std.mem.zeroes(Mapped)),
            .blocks_used = 0,
            .clock = 0,
        };
        self.why_not.text[0] = 0;
        if (home.host != own.host) return self.why_not.add("shm, cma: the process is on another host", .{});
        if (home.epoch == own.epoch) {
            self.table = own_table;
            if (allowed & LOCAL != 0) self.carriers |= LOCAL else self.why_not.add("local: not allowed here", .{});
            return;
        }
        if (!self.watch()) return;
        if (allowed & (SHM | CMA) == 0) return self.why_not.add("shm, cma: not allowed here", .{});
        if (!self.openTable()) return;
        if (allowed & SHM != 0) self.carriers |= SHM else self.why_not.add("shm: not allowed here", .{});
        if (allowed & CMA != 0) self.probeMemory() else self.why_not.add("cma: not allowed here", .{});
        if (self.hasEnded()) self.carriers = 0; // whatever was found, it may be of another process
    }

    /// Whether the process is known to have ended.
    pub fn hasEnded(self: *Attachment) bool {
        if (!self.gone and self.pid_fd >= 0) self.gone = process.hasEnded(self.pid_fd);
        return self.gone;
    }

    /// Whether it has ended, or is about to: then it cannot be reached any more, a moment before it counts as ended.
    pub fn isEnding(self: *Attachment) bool {
        if (!self.hasEnded() and self.pid_fd >= 0) self.gone = process.isEnding(self.home.pid);
        return self.gone;
    }

    /// Whether it is still the program that has made the ledger: AT-4. In doubt it is.
    pub fn hasLedger(self: *const Attachment) bool {
        if (self.inode == 0) return true;
        var file: process.File = undefined;
        const rc = process.fileOfOther(self.home.pid, self.home.ledger, &file);
        return if (rc < 0) rc != -process.ENOENT else file.inode == self.inode;
    }

    fn watch(self: *Attachment) bool {
        assert(self.pid_fd < 0);
        const home = &self.home;
        if (home.pid == 0 or home.pid >= process.PID_MAX) return self.refuse("the home has no pid that can be", 0);
        self.pid_fd = process.open(home.pid);
        if (self.pid_fd == -process.ESRCH or self.pid_fd == -sys.EINVAL) {
            self.gone = true;
            return self.refuse("the process has ended", 0);
        }
        if (self.pid_fd < 0) return self.refuse("it cannot be watched", self.pid_fd);
        const started = process.startedAt(home.pid) orelse 0;
        if (self.hasEnded() or (started != 0 and started != home.started)) { // AT-1
            self.gone = true;
            return self.refuse("the process has ended", 0);
        }
        return started != 0 or self.refuse("/proc does not show the process", 0);
    }

    fn openTable(self: *Attachment) bool {
        assert(self.table == null);
        assert(self.pid_fd >= 0); // else the descriptor might be of another process: AT-1
        const home = &self.home;
        const fd = process.openDescriptor(home.pid, home.ledger);
        defer sys.close(fd);
        if (fd < 0) {
            if (self.hasEnded()) return self.refuse("the process has ended", 0);
            return self.refuse(switch (-fd) {
                process.EACCES, process.EPERM => "the process belongs to another user, or hides its memory",
                process.ENOENT => "the process has closed its ledger",
                else => "its ledger cannot be opened",
            }, fd);
        }
        if (!sys.memfdIsSound(fd, ledger.Table.BYTES)) return self.refuse("its ledger is not what it should be", 0);
        const pages = sys.mapLazily(fd, ledger.Table.BYTES, 0, true) orelse
            return self.refuse("there is no memory to map its ledger", 0);
        const table: *ledger.Table = @ptrCast(@alignCast(pages));
        if (!sys.keepFromChildren(pages, ledger.Table.BYTES) or !table.isOf(home.epoch)) {
            sys.unmap(pages, ledger.Table.BYTES);
            return self.refuse("its ledger is not what it should be", 0);
        }
        self.table = table;
        if (process.fileOf(fd)) |file| self.inode = file.inode;
        return true;
    }

    fn refuse(self: *Attachment, why: []const u8, rc: i32) bool {
        assert(why.len > 0);
        assert(rc <= 0);
        if (rc < 0) {
            self.why_not.add("shm, cma: {s} (errno {d})", .{ why, -rc });
        } else self.why_not.add("shm, cma: {s}", .{why});
        return false;
    }

    /// Read the head of the ledger through its memory. A sandbox may refuse writing alone: tried with no bytes.
    fn probeMemory(self: *Attachment) void {
        const said = self.table.?.head();
        var found: ledger.Table.Head = undefined;
        const theirs = process.Piece{ .address = said.address, .size = @sizeOf(ledger.Table.Head) };
        const ours = process.Piece.of(std.mem.asBytes(&found));
        const n = process.readMemory(self.home.pid, &.{ours}, &.{theirs});
        if (n < 0) return self.refuseMemory("read", "process_vm_readv", n);
        if (n != @sizeOf(ledger.Table.Head) or !std.meta.eql(found, said))
            return self.why_not.add("cma: the process's memory is not what its ledger says", .{});
        const wrote = process.writeMemory(self.home.pid, &.{}, &.{});
        if (wrote < 0) return self.refuseMemory("write", "process_vm_writev", wrote);
        self.carriers |= CMA;
    }

    fn refuseMemory(self: *Attachment, verb: []const u8, call: []const u8, rc: i64) void {
        assert(rc < 0);
        const errno = -rc;
        switch (errno) {
            process.EPERM => self.why_not.add("cma: this process may not {s} the other one's memory " ++
                "(yama's ptrace_scope or a sandbox, errno {d})", .{ verb, errno }),
            process.ENOSYS => self.why_not.add("cma: the kernel or a sandbox has no {s} (errno {d})", .{ call, errno }),
            else => self.why_not.add("cma: {s} fails (errno {d})", .{ call, errno }),
        }
    }

    // ---- blocks ----

    /// The mapping of a block, held until `letGo`. Null: it is not what the ledger says it is, or cannot be mapped.
    pub fn hold(self: *Attachment, number: u32) ?*Mapped {
        assert(self.state != .free);
        const table = self.table.?;
        if (number == 0 or number > limits.BLOCKS_MAX) return null;
        const said = @as(*const volatile ledger.BlockRow, &table.blocks[number]).*;
        if (said.inode == 0) return null;
        const one = self.find(number, said.inode) orelse self.map(number, said) orelse return null;
        assert(one.pages != null);
        assert(one.block == number);
        assert(one.inode == said.inode);
        self.clock += 1;
        one.stamp = self.clock;
        _ = @atomicRmw(u32, &one.uses, .Add, 1, .acquire);
        return one;
    }

    /// The mapping of a block, if there is one. What the ledger names no more is unmapped by the way: AT-3.
    fn find(self: *Attachment, number: u32, inode: u64) ?*Mapped {
        var found: ?*Mapped = null;
        for (self.blocks[0..self.blocks_used]) |*one| {
            if (one.pages == null) continue;
            if (one.block == number and one.inode == inode) {
                found = one;
            } else if (one.isIdle()) {
                const now = @atomicLoad(u64, &self.table.?.blocks[one.block].inode, .acquire);
                if (now != one.inode) one.drop();
            }
        }
        return found;
    }

    fn map(self: *Attachment, number: u32, said: ledger.BlockRow) ?*Mapped {
        const place = self.emptyPlace() orelse return null;
        assert(place.pages == null);
        const fd = self.openBlock(said) orelse return null;
        defer sys.close(fd);
        assert(said.bytes > 0);
        assert(said.bytes % 4096 == 0);
        const pages = sys.mapLazily(fd, @intCast(said.bytes), 0, true) orelse return null;
        _ = sys.keepFromChildren(pages, @intCast(said.bytes)); // a child that has it does no harm
        place.* = .{
            .pages = pages,
            .bytes = said.bytes,
            .inode = said.inode,
            .block = number,
            .uses = 0,
            .stamp = 0,
        };
        return place;
    }

    /// A descriptor of a block, found to be what the ledger says: AT-2.
    fn openBlock(self: *Attachment, said: ledger.BlockRow) ?i32 {
        if (said.bytes == 0 or said.bytes > 2 * limits.BLOCK_BYTES_MAX or said.bytes % 4096 != 0) return null;
        const fd = process.openDescriptor(self.home.pid, said.fd);
        if (fd < 0) return null;
        if (isBlock(fd, said)) return fd;
        sys.close(fd);
        return null;
    }

    fn isBlock(fd: i32, said: ledger.BlockRow) bool {
        const file = process.fileOf(fd) orelse return false;
        // All its pages are there: nothing faults for want of memory.
        return file.inode == said.inode and file.allocated >= said.bytes and sys.isSealed(fd, said.bytes);
    }

    /// Map a part of a block for a view of its own. `offset` and `bytes` are whole pages.
    pub fn mapPart(self: *Attachment, number: u32, offset: u64, bytes: u64, writable: bool) ?Pages {
        assert(bytes > 0);
        assert(bytes % 4096 == 0);
        assert(offset % 4096 == 0);
        if (number == 0 or number > limits.BLOCKS_MAX) return null;
        const said = @as(*const volatile ledger.BlockRow, &self.table.?.blocks[number]).*;
        if (said.inode == 0 or offset > said.bytes or bytes > said.bytes - offset) return null;
        const fd = self.openBlock(said) orelse return null;
        defer sys.close(fd);
        return sys.mapLazily(fd, @intCast(bytes), @intCast(offset), writable);
    }

    fn emptyPlace(self: *Attachment) ?*Mapped {
        assert(self.blocks_used <= limits.ATTACHMENT_BLOCKS_MAX);
        var oldest: ?*Mapped = null;
        for (self.blocks[0..self.blocks_used]) |*one| {
            if (one.pages == null) return one;
            if (one.isIdle() and (oldest == null or one.stamp < oldest.?.stamp)) oldest = one;
        }
        if (self.blocks_used < limits.ATTACHMENT_BLOCKS_MAX) {
            self.blocks_used += 1;
            return &self.blocks[self.blocks_used - 1];
        }
        if (oldest) |one| one.drop();
        return oldest;
    }

    /// What `hold` has given.
    pub fn letGo(one: *Mapped) void {
        const before = @atomicRmw(u32, &one.uses, .Sub, 1, .release);
        assert(before > 0);
    }

    // ---- the end ----

    /// Give everything back, but for blocks that an open view shows. No transfer may go through it any more.
    pub fn deinit(self: *Attachment, own_table: *const ledger.Table) void {
        assert(self.state != .free);
        for (self.blocks[0..self.blocks_used]) |*one| if (one.isIdle()) one.drop();
        if (self.table) |table| {
            if (table != own_table) sys.unmap(@ptrCast(@alignCast(table)), ledger.Table.BYTES);
        }
        self.table = null;
        self.closeFds();
        self.state = .free;
    }

    /// Close all descriptors; also what a forked child does.
    pub fn closeFds(self: *Attachment) void {
        if (self.state != .free) sys.closeAt(&self.pid_fd);
    }
};
