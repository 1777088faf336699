//! What a bus has when a test has armed it: the table of planned faults, a gate for each link, and a timer of T1 for
//! what is late. Without it a bus has null here, and one branch a frame.
//!
//! AR-1 A bus is armed once, and for good. AR-2 T1 reads the table and the bits, and nothing of the gates.

const std = @import("std");
const assert = std.debug.assert;
const bell = @import("bell.zig");
const faults = @import("../protocol/faults.zig");
const gate = @import("gate.zig");
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

pub const ENOSPC = 28;
pub const EMFILE = 24;

pub const Arms = struct {
    table: *faults.Table,
    epoch: u64,
    /// In T1's epoll set.
    timer: i32,
    /// When it fires, as T0 has set it.
    timer_at: u64,
    /// Links that are to be looked at when it does.
    waiting: bell.Bits,
    gates: []gate.Gate,

    fn bytesFor(links: usize) usize {
        assert(links <= limits.LINKS_MAX);
        return std.mem.alignForward(usize, @sizeOf(Arms), 4096) + links * @sizeOf(gate.Gate);
    }

    /// Take up arms by the table behind `fd`, which stays the caller's. `errno_out` says why not; EINVAL: it is none.
    pub fn create(epoch: u64, links: usize, fd: i32, secret: u64, errno_out: *i32) ?*Arms {
        errno_out.* = -sys.EINVAL;
        if (!sys.memfdIsSound(fd, faults.Table.BYTES)) return null;
        errno_out.* = -sys.ENOMEM;
        const shared = sys.mapShared(fd, faults.Table.BYTES) orelse return null;
        const table: *faults.Table = @ptrCast(@alignCast(shared));
        errno_out.* = -sys.EINVAL;
        if (table.magic == faults.Table.MAGIC and table.secret == secret) {
            errno_out.* = sys.oneShot();
            if (errno_out.* >= 0) {
                const timer = errno_out.*;
                if (sys.mapPrivate(bytesFor(links))) |memory| { // zeroed, and touched only as far as it is used
                    const self: *Arms = @ptrCast(@alignCast(memory));
                    const gates: [*]gate.Gate = @ptrCast(@alignCast(memory + bytesFor(0)));
                    self.* = .{
                        .table = table,
                        .epoch = epoch,
                        .timer = timer,
                        .timer_at = 0,
                        .waiting = @splat(0),
                        .gates = gates[0..links],
                    };
                    return self;
                }
                sys.close(timer);
                errno_out.* = -sys.ENOMEM;
            }
        }
        sys.unmap(shared, faults.Table.BYTES);
        return null;
    }

    /// Give everything back. T1 must have ended.
    pub fn destroy(self: *Arms) void {
        sys.closeAt(&self.timer);
        sys.unmap(@ptrCast(@alignCast(self.table)), faults.Table.BYTES);
        sys.unmap(@ptrCast(@alignCast(self)), bytesFor(self.gates.len));
    }

    // ---- links ----

    /// The gate of a link, which begins at `cursor`.
    pub fn gateOf(self: *Arms, slot: u32, cursor: u64) *gate.Gate {
        const one = &self.gates[slot];
        one.reset(cursor);
        return one;
    }

    /// Have T1 ring for a link when something of it is due.
    pub fn plan(self: *Arms, link: anytype) void {
        assert(link.gate.? == &self.gates[link.slot]);
        const now = sys.monotonicNs();
        const at = link.gate.?.wakeAt(link, now) orelse return;
        const bit = @as(u64, 1) << @intCast(link.slot % 64);
        _ = @atomicRmw(u64, &self.waiting[link.slot / 64], .Or, bit, .seq_cst);
        if (self.timer_at > now and self.timer_at <= at) return;
        self.timer_at = @max(at, now + 1);
        assert(self.timer_at > now); // a timer of the past, or of 0, would never fire
        sys.timerSet(self.timer, self.timer_at);
    }

    /// T1: the timer has fired.
    pub fn ringAll(self: *Arms, t0: bell.Bell) void {
        sys.eventfdClear(self.timer);
        for (&self.waiting, 0..) |*word, i| {
            var left = @atomicRmw(u64, word, .Xchg, 0, .seq_cst);
            while (left != 0) : (left &= left - 1) t0.ring(@intCast(i * 64 + @ctz(left)));
        }
    }

    // ---- calls of the system ----

    /// Memory for a ring or a segment is about to be made. -errno if it is to fail, else 0.
    pub fn refusesMemory(self: *Arms) i32 {
        return -self.table.refuses(self.epoch, &.{ ENOSPC, EMFILE }, sys.monotonicNs());
    }

    /// A descriptor is about to be taken. -errno if that is to fail, else 0.
    pub fn refusesDescriptor(self: *Arms) i32 {
        return -self.table.refuses(self.epoch, &.{EMFILE}, sys.monotonicNs());
    }
};

/// Make a table. Its descriptor is the caller's; negative is -errno.
pub fn newTable(secret: u64) i32 {
    const fd = sys.memfd("trimesh-faults", faults.Table.BYTES);
    if (fd < 0) return fd;
    const shared = sys.mapShared(fd, faults.Table.BYTES) orelse {
        sys.close(fd);
        return -sys.ENOMEM;
    };
    const table: *faults.Table = @ptrCast(@alignCast(shared));
    table.magic = faults.Table.MAGIC;
    table.secret = secret;
    sys.unmap(shared, faults.Table.BYTES);
    return fd;
}
