//! One transfer, and how it goes on a piece at a time. T0 carries what is small to its end in the call; what is large,
//! or has to wait for a lock, T2 carries, a piece of each in turn (copying/mover_thread.zig).
//!
//! TR-1 A transfer ends with the first thing that goes wrong, and then it has ended: nothing is written to its
//! destination after that. TR-2 Atomic operations take the grant's lock, whatever carries them.

const std = @import("std");
const carrier = @import("carrier.zig");
const grants = @import("../grants/grants.zig");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const attachment = @import("../grants/attachment.zig");
const Access = @import("../grants/access.zig").Access;

pub const Kind = enum(u32) {
    read = 1,
    write = 2,
    add = 3,
    swap = 4,

    /// Whether it is one operation on 8 bytes.
    pub fn isAtomic(self: Kind) bool {
        return self == .add or self == .swap;
    }

    /// What the grant must allow for it.
    pub fn rights(self: Kind) u32 {
        return switch (self) {
            .read => ledger.RIGHT_READ,
            .write => ledger.RIGHT_WRITE,
            .add, .swap => ledger.RIGHT_READ | ledger.RIGHT_WRITE,
        };
    }
};

/// As in trimesh.h.
pub const GrantName = extern struct { place: u32, generation: u32, secret: [16]u8 };

/// As in trimesh.h.
pub const Request = extern struct {
    attachment: u32,
    kind: u32,
    grant: GrantName,
    offset: u64,
    size: u64,
    local: ?[*]u8,
    operand: u64,
    expected: u64,
    exported: ?[*]const u8,
    exported_size: u32,
    carriers: u32,
    /// Which memory `local` is.
    memory: u32 = @intFromEnum(grants.Memory.host),
    reserved: u32 = 0,

    /// What the handle says to adapters.
    pub fn exportedBytes(self: *const Request) []const u8 {
        return if (self.exported) |bytes| bytes[0..self.exported_size] else &.{};
    }

    /// Carriers that can do it at all, as far as it alone says: adapters do no atomic operations, whose lock they could
    /// not take, and need to be told where the range is; nothing else reaches memory of a device.
    pub fn possible(self: *const Request) u32 {
        const by_adapter = self.exported_size > 0 and self.exported != null and !self.kindOf().isAtomic();
        const allowed = if (self.memoryOf() == .host) self.carriers else self.carriers & attachment.UCX;
        return if (by_adapter) allowed else allowed & ~attachment.UCX;
    }

    /// Checked when it came.
    pub fn memoryOf(self: *const Request) grants.Memory {
        return @enumFromInt(self.memory);
    }

    /// What is asked of the grant.
    pub fn wanted(self: *const Request) ledger.Wanted {
        return .{
            .place = self.grant.place,
            .generation = self.grant.generation,
            .secret = self.grant.secret,
            .rights = self.kindOf().rights(),
            .offset = self.offset,
            .size = self.size,
        };
    }

    /// Checked when it came.
    pub fn kindOf(self: *const Request) Kind {
        return @enumFromInt(self.kind);
    }

    /// The memory of this process that it is about; none for an atomic operation.
    pub fn ours(self: *const Request) []u8 {
        const bytes = self.local orelse return &.{};
        return bytes[0..@intCast(self.size)];
    }
};

/// As in trimesh.h.
pub const Done = extern struct { id: u64, status: i32, carrier: u32, value: u64 };

pub const State = enum(u8) { free = 0, queued, running, ended };

/// How a piece went: with `status.UNDER_WAY` there is more, with `LOCKED` the lock is taken, else it has ended.
pub const LOCKED: i32 = -999;

pub const Transfer = struct {
    /// Atomic.
    state: State,
    id: u64,
    request: Request,
    attachment: *attachment.Attachment,
    carrier: *const carrier.Carrier,
    /// Of carriers that copy; null once it is closed.
    access: ?Access,
    moved: u64,
    /// When the lock was first found taken; 0 = it was not.
    locked_ns: u64,
    /// It is to end soon; atomic.
    given_up: bool,
    /// T2's: its driver has heard of that.
    is_told: bool,
    status: i32,
    value: u64,
    /// The driver's, of carriers that pend.
    driver_word: u64,

    /// A transfer that has not begun.
    pub fn of(
        request: *const Request,
        one: *attachment.Attachment,
        by: *const carrier.Carrier,
        access: ?Access,
    ) Transfer {
        return .{
            .state = .free,
            .id = 0,
            .request = request.*,
            .attachment = one,
            .carrier = by,
            .access = access,
            .moved = 0,
            .locked_ns = 0,
            .given_up = false,
            .is_told = false,
            .status = status.OK,
            .value = 0,
            .driver_word = 0,
        };
    }

    /// Take over all of another one but its state.
    pub fn become(self: *Transfer, other: *const Transfer) void {
        inline for (@typeInfo(Transfer).@"struct".fields) |field| {
            if (comptime !std.mem.eql(u8, field.name, "state")) @field(self, field.name) = @field(other, field.name);
        }
    }

    /// What is said of it when it has ended.
    pub fn done(self: *const Transfer) Done {
        return .{ .id = self.id, .status = self.status, .carrier = self.carrier.bit, .value = self.value };
    }

    /// Whether it is to end soon.
    pub fn isGivenUp(self: *const Transfer) bool {
        return @atomicLoad(bool, &self.given_up, .acquire);
    }

    /// Give back what it holds: the way to the range, and its place in the attachment.
    pub fn close(self: *Transfer) void {
        if (self.access) |*access| access.close();
        self.access = null;
    }

    /// Carry one piece. Of carriers that copy.
    pub fn step(self: *Transfer) i32 {
        const kind = self.request.kindOf();
        return if (kind.isAtomic()) self.exchange(kind) else self.copy(kind);
    }

    fn copy(self: *Transfer, kind: Kind) i32 {
        const access = &self.access.?;
        const ours = self.request.ours()[@intCast(self.moved)..];
        const piece = ours[0..@min(ours.len, limits.TRANSFER_CHUNK_BYTES)];
        const copier = self.carrier.how.copies;
        const moved = switch (kind) {
            .read => copier.get(access, self.moved, piece),
            .write => copier.put(access, self.moved, piece),
            .add, .swap => unreachable,
        };
        if (moved != status.OK) return moved;
        self.moved += piece.len;
        const now = access.look();
        if (now != status.OK) return now;
        return if (piece.len == ours.len) status.OK else status.UNDER_WAY;
    }

    fn exchange(self: *Transfer, kind: Kind) i32 {
        const access = &self.access.?;
        if (!access.tryLock()) { // TR-2
            if (self.locked_ns == 0) self.locked_ns = sys.monotonicNs();
            return LOCKED;
        }
        defer access.unlock();
        const now = access.look(); // the lock may have been waited for
        if (now != status.OK) return now;
        const old = self.load() catch |problem| return self.failed(problem);
        self.value = old;
        switch (kind) {
            .add => self.store(old +% self.request.operand) catch |problem| return self.failed(problem),
            .swap => if (old == self.request.expected)
                self.store(self.request.operand) catch |problem| return self.failed(problem),
            .read, .write => unreachable,
        }
        return access.look();
    }

    /// The status is in `self.status`.
    const Refused = error{Refused};

    fn failed(self: *Transfer, problem: Refused) i32 {
        return switch (problem) {
            error.Refused => self.status,
        };
    }

    fn load(self: *Transfer) Refused!u64 {
        const access = &self.access.?;
        if (access.here) |here| return @atomicLoad(u64, @as(*u64, @ptrCast(@alignCast(here))), .seq_cst);
        var bytes: [8]u8 align(8) = undefined;
        self.status = self.carrier.how.copies.get(access, 0, &bytes);
        return if (self.status == status.OK) @bitCast(bytes) else error.Refused;
    }

    fn store(self: *Transfer, value: u64) Refused!void {
        const access = &self.access.?;
        if (access.here) |here| return @atomicStore(u64, @as(*u64, @ptrCast(@alignCast(here))), value, .seq_cst);
        var bytes: [8]u8 align(8) = @bitCast(value);
        self.status = self.carrier.how.copies.put(access, 0, &bytes);
        if (self.status != status.OK) return error.Refused;
    }

    /// Whether the 8 bytes of an atomic operation lie as they must, here and over there.
    pub fn isAligned(access: *const Access) bool {
        const here = if (access.here) |one| @intFromPtr(one) else 0;
        return access.address() % 8 == 0 and here % 8 == 0;
    }

    /// The lock was found taken again. LOCKED, or the status that this has gone on for too long.
    pub fn stillLocked(self: *Transfer) i32 {
        self.access.?.breakLock();
        const since_ms = (sys.monotonicNs() -| self.locked_ns) / 1_000_000;
        if (since_ms >= limits.MOVER_SILENCE_MS) return status.ERR_SILENT;
        const now = self.access.?.look();
        return if (now != status.OK) now else LOCKED;
    }
};

comptime {
    std.debug.assert(@sizeOf(GrantName) == 24 and @sizeOf(Request) == 96 and @sizeOf(Done) == 24);
}
