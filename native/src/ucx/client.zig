//! The reader's side of the carrier ucx, in T2. Used under the lock of ucx/ucx.zig.
//!
//!     begin -> look -> move -> (flush) -> check -> end
//!       ^        |       |        |         |
//!       |        v       v        v         v
//!       +------------- broken, once                 and from there: begin -> verdict -> end
//!
//! Before anything is moved the owner's row is read, and again after it. If an operation fails, the endpoint is lost
//! with all that was on it: a new one reads the row once more, and that is the verdict: was the grant revoked
//! meanwhile?
//!
//! UC-1 A transfer ends when UCX holds no operation of it any more: nothing writes to its memory afterwards. UC-2 To
//! give one up is to begin no more pieces of it. UC-3 An endpoint on which nothing has ended for UCX_QUIET_MS is
//! closed, which ends all operations; adapters do not always say that a registration was taken back while they read.
//! Who then gets no verdict either has been silent for MOVER_SILENCE_MS. UC-4 Nothing is done twice but reading rows.
//! UC-5 An endpoint that never found its peer cannot be closed: UCX 1.13 aborts the process, also after it has given up
//! looking. A transfer on it waits for nothing but a row, so its end is told when it is due; the rest of it stays until
//! UCX has given up, 30 s later, and the endpoint for good. UC-6 Memory of a device is moved by an adapter, or not at
//! all: who asks has better ways to copy it than UCX's software.

const std = @import("std");
const exporting = @import("export.zig");
const grants = @import("../grants/grants.zig");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const ucx = @import("library.zig");
const worker_file = @import("worker.zig");

const Endpoint = worker_file.Endpoint;
const Operation = worker_file.Operation;
const Registration = worker_file.Registration;
const Worker = worker_file.Worker;

const EIO = 5;
const QUIET_TICKS = limits.UCX_QUIET_MS / limits.UCX_TICK_MS;
const SILENCE_TICKS = limits.MOVER_SILENCE_MS / limits.UCX_TICK_MS;
const VERDICT_TICKS = (limits.MOVER_SILENCE_MS - limits.UCX_QUIET_MS) / limits.UCX_TICK_MS;
const IDLE_TICKS = limits.UCX_IDLE_MS / limits.UCX_TICK_MS;

pub const Kind = enum { read, write };

/// What is to be moved.
pub const Order = struct {
    /// The caller's, for whom it ends.
    caller: *anyopaque,
    /// Whose memory it is.
    epoch: u64,
    /// Readable when that process has ended; -1 = it is of another host.
    pid_fd: i32,
    kind: Kind,
    name: exporting.Name,
    offset: u64,
    size: u64,
    /// Both stay until it has ended.
    local: [*]u8,
    /// Which memory `local` is.
    memory: grants.Memory,
    /// What the handle says: see ucx/export.zig.
    exported: []const u8,

    fn told(self: *const Order) ?exporting.Export {
        return exporting.Export.decode(&self.name.secret, self.exported);
    }

    fn hasEnded(self: *const Order) bool {
        return self.pid_fd >= 0 and process.hasEnded(self.pid_fd);
    }
};

/// How it ended.
pub const Done = struct { caller: *anyopaque, status: i32 };

/// One process that is reached.
const Target = struct {
    state: enum { none, open, closing } = .none,
    endpoint: Endpoint = undefined,
    closing: Operation = undefined,
    epoch: u64 = 0,
    /// Transfers that are not at their end.
    jobs: u32 = 0,
    /// Since an operation has ended.
    quiet_ticks: u32 = 0,
    /// How often it was opened: keys and operations belong to one of these.
    opened: u32 = 0,
    /// Whether an operation has ended well since then.
    is_proven: bool = false,

    /// Close it, unless it never found its peer: UC-5.
    fn close(self: *Target) void {
        if (self.state != .open or !self.is_proven) return;
        self.closing = self.endpoint.close();
        self.state = .closing;
        self.quiet_ticks = 0;
    }

    fn isLooking(self: *const Target) bool {
        return self.state == .open and !self.is_proven and self.endpoint.lost == ucx.OK;
    }
};

const Phase = enum { begin, look, move, flush, check, verdict };

const Job = struct {
    row: exporting.Row,
    order: Order,
    target: u32,
    phase: Phase,
    /// Which opening of the target it is on.
    opened: u32,
    keys: ?Keys,
    memory: ?Registration,
    operations: [limits.UCX_PIECES]?Operation,
    /// Bytes of which the moving has begun.
    begun: u64,
    is_given_up: bool,
    /// An operation has failed; no more are begun.
    is_broken: bool,
    /// It is about the verdict only.
    is_judged: bool,
    /// Its end was told; what is left is an operation on `row`: UC-5.
    is_told: bool,
    /// Since it has begun to wait for that.
    ticks: u32,
};

const Keys = struct { row: *ucx.Key, range: *ucx.Key };

pub const Client = struct {
    worker: *Worker,
    targets: [limits.ATTACHMENTS_MAX]Target,
    jobs: [limits.TRANSFERS_MAX]Job,
    /// The jobs in use: the first `active_count` entries. The others are free.
    active: [limits.TRANSFERS_MAX]u32,
    active_count: u32,
    done: [limits.TRANSFERS_MAX]Done,
    done_count: u32,
    /// Endpoints that stay for good: UC-5.
    abandoned: u32,

    /// With nothing under way.
    pub fn init(self: *Client, worker: *Worker) void {
        self.worker = worker;
        self.targets = @splat(.{});
        for (&self.active, 0..) |*entry, index| entry.* = @intCast(index);
        self.active_count = 0;
        self.done_count = 0;
        self.abandoned = 0;
    }

    // ---- what is asked for ----

    /// Begin a transfer: a status. What it says of the owner may be anything.
    pub fn begin(self: *Client, order: Order) i32 {
        if (order.told() == null) return status.ERR_DENIED;
        if (self.active_count + self.done_count == limits.TRANSFERS_MAX) return status.FULL;
        const target = self.targetOf(order.epoch) orelse return status.FULL;
        const job = &self.jobs[self.active[self.active_count]];
        self.active_count += 1;
        self.targets[target].jobs += 1;
        job.order = order;
        job.target = target;
        job.phase = .begin;
        job.opened = 0;
        job.keys = null;
        job.memory = null;
        job.operations = @splat(null);
        job.begun = 0;
        job.is_given_up = false;
        job.is_broken = false;
        job.is_judged = false;
        job.is_told = false;
        return status.OK;
    }

    fn targetOf(self: *Client, epoch: u64) ?u32 {
        var free: ?u32 = null;
        for (&self.targets, 0..) |*target, index| {
            const is_used = target.state != .none or target.jobs > 0;
            if (is_used and target.epoch == epoch) return @intCast(index);
            if (!is_used and free == null) free = @intCast(index);
        }
        const index = free orelse return null;
        self.targets[index].epoch = epoch;
        return index;
    }

    /// Have a transfer end soon: UC-2.
    pub fn giveUp(self: *Client, caller: *anyopaque) void {
        for (self.active[0..self.active_count]) |index| {
            const job = &self.jobs[index];
            if (job.order.caller == caller and !job.is_told) job.is_given_up = true;
        }
    }

    /// The next transfer that has ended.
    pub fn takeDone(self: *Client) ?Done {
        if (self.done_count == 0) return null;
        self.done_count -= 1;
        return self.done[self.done_count];
    }

    /// Whether anything is under way.
    pub fn isBusy(self: *const Client) bool {
        return self.active_count > 0;
    }

    /// Whether any process is reached.
    pub fn isOpen(self: *const Client) bool {
        for (&self.targets) |*target| if (target.state != .none) return true;
        return false;
    }

    // ---- moving ----

    /// Carry on with whatever can be, after UCX has made progress. Whether anything was.
    pub fn turn(self: *Client) bool {
        var moved = false;
        for (&self.targets) |*target| {
            if (target.state != .closing) continue;
            _ = target.closing.take() orelse continue;
            target.state = .none;
            moved = true;
        }
        var n: u32 = 0;
        while (n < self.active_count) {
            const job = &self.jobs[self.active[n]];
            const target = &self.targets[job.target];
            while (self.advance(job, target)) |ended| {
                moved = true;
                target.quiet_ticks = 0;
                if (!ended) continue;
                self.active_count -= 1;
                std.mem.swap(u32, &self.active[n], &self.active[self.active_count]);
                break;
            } else n += 1;
        }
        return moved;
    }

    /// One step of a transfer: null = none can be done, true = it has ended.
    fn advance(self: *Client, job: *Job, target: *Target) ?bool {
        if (job.phase == .begin) return self.start(job, target);
        var some = false;
        var open: u32 = 0;
        for (&job.operations) |*slot| {
            if (slot.* == null) continue;
            if (slot.*.?.take()) |result| {
                slot.* = null;
                some = true;
                if (result != ucx.OK) job.is_broken = true;
                if (result == ucx.OK and target.opened == job.opened) target.is_proven = true;
            } else open += 1;
        }
        if (job.is_told) return if (open == 0) self.leave(job, target) else null;
        if (target.state != .open or target.opened != job.opened) job.is_broken = true;
        if (job.is_broken) return if (open == 0) self.broken(job, target) else if (some) false else null;
        if (job.is_given_up) return if (open == 0) self.end(job, status.ERR_CANCELLED) else null;
        if (job.phase == .move and self.beginPieces(job, target)) return false;
        if (open > 0) return if (some) false else null;
        return self.next(job, target);
    }

    /// All operations of a phase have ended well.
    fn next(self: *Client, job: *Job, target: *Target) bool {
        const order = &job.order;
        switch (job.phase) {
            .begin => unreachable, // has none
            .look => {
                const right: u32 = if (order.kind == .read) exporting.RIGHT_READ else exporting.RIGHT_WRITE;
                const judged = job.row.judge(order.name, right, order.offset, order.size);
                if (judged != status.OK) return self.end(job, judged);
                const ours = order.local[0..@intCast(order.size)];
                if (order.size > 0) job.memory = switch (order.memory) {
                    // Refused (it is read-only, or there is a limit): UCX then copies by memory of its own.
                    .host => self.worker.register(ours, order.kind == .read) catch null,
                    // That of a device it would copy by its software: UC-6.
                    .cuda => self.worker.registerDevice(ours, order.kind == .read, .cuda) catch
                        return self.end(job, status.ERR_DEVICE),
                };
                job.phase = .move;
            },
            .move => if (order.kind == .write) {
                job.operations[0] = target.endpoint.flush();
                job.phase = .flush;
            } else self.readRow(job, target, .check),
            .flush => self.readRow(job, target, .check),
            .check, .verdict => {
                if (order.hasEnded()) return self.end(job, status.ERR_GONE);
                const judged = job.row.judge(order.name, 0, 0, 0);
                if (judged != status.OK) return self.end(job, status.ERR_REVOKED);
                // Granted all the same, and it failed: the adapter, or the memory behind the grant, is at fault.
                return self.end(job, if (job.phase == .verdict) status.ofErrno(-EIO) else status.OK);
            },
        }
        return false;
    }

    fn start(self: *Client, job: *Job, target: *Target) ?bool {
        if (job.is_given_up) return self.end(job, status.ERR_CANCELLED);
        if (target.state == .closing) return null;
        const told = job.order.told().?; // as `begin` has found
        const missing = if (job.is_judged) status.ERR_SILENT else status.ERR_UNREACHABLE;
        if (target.state == .none) {
            target.quiet_ticks = 0;
            target.endpoint.open(self.worker, told.worker) catch return self.end(job, missing);
            target.state = .open;
            target.opened +%= 1;
            target.is_proven = false;
        }
        job.opened = target.opened;
        const row = target.endpoint.unpack(told.row_key) catch return self.end(job, missing);
        const range = target.endpoint.unpack(told.key) catch {
            target.endpoint.forget(row);
            return self.end(job, missing);
        };
        job.keys = .{ .row = row, .range = range };
        self.readRow(job, target, if (job.is_judged) .verdict else .look);
        return false;
    }

    fn readRow(self: *Client, job: *Job, target: *Target, phase: Phase) void {
        _ = self;
        job.phase = phase;
        job.ticks = 0;
        const told = job.order.told().?;
        job.row = .{};
        job.operations[0] = target.endpoint.get(std.mem.asBytes(&job.row), told.row, job.keys.?.row, null);
    }

    fn beginPieces(self: *Client, job: *Job, target: *Target) bool {
        _ = self;
        const order = &job.order;
        var some = false;
        for (&job.operations) |*slot| {
            if (slot.* != null or job.begun == order.size) continue;
            const n: usize = @intCast(@min(limits.UCX_PIECE_BYTES, order.size - job.begun));
            const ours = order.local[@intCast(job.begun)..][0..n];
            const theirs = job.row.address + order.offset + job.begun;
            slot.* = switch (order.kind) {
                .read => target.endpoint.get(ours, theirs, job.keys.?.range, job.memory),
                .write => target.endpoint.put(ours, theirs, job.keys.?.range, job.memory),
            };
            job.begun += n;
            some = true;
        }
        return some;
    }

    /// An operation failed, and none is left.
    fn broken(self: *Client, job: *Job, target: *Target) bool {
        if (target.opened == job.opened) target.close();
        self.closeLost(target, job.opened);
        self.release(job, target);
        if (job.is_given_up) return self.end(job, status.ERR_CANCELLED);
        if (job.order.hasEnded()) return self.end(job, status.ERR_GONE);
        if (job.is_judged) return self.end(job, status.ERR_SILENT);
        job.is_judged = true;
        job.is_broken = false;
        job.phase = .begin;
        return false;
    }

    /// What it held of UCX.
    fn release(self: *Client, job: *Job, target: *Target) void {
        _ = self;
        if (job.keys) |keys| {
            target.endpoint.forget(keys.row);
            target.endpoint.forget(keys.range);
            job.keys = null;
        }
        if (job.memory) |memory| memory.end();
        job.memory = null;
    }

    fn end(self: *Client, job: *Job, result: i32) bool {
        self.tell(job, result);
        return self.leave(job, &self.targets[job.target]);
    }

    fn tell(self: *Client, job: *Job, result: i32) void {
        const is_cancelled = job.is_given_up and result != status.OK;
        const how = if (is_cancelled) status.ERR_CANCELLED else result;
        self.done[self.done_count] = .{ .caller = job.order.caller, .status = how };
        self.done_count += 1;
        job.is_told = true;
    }

    fn leave(self: *Client, job: *Job, target: *Target) bool {
        self.release(job, target);
        target.jobs -= 1;
        if (target.jobs == 0) target.quiet_ticks = 0;
        self.closeLost(target, job.opened);
        return true;
    }

    /// A target that is lost is opened anew by whoever needs it next.
    fn closeLost(self: *Client, target: *Target, opened: u32) void {
        if (target.state != .open or target.opened != opened or target.endpoint.lost == ucx.OK) return;
        target.close();
        if (target.state != .open) return;
        target.state = .none; // UC-5
        self.abandoned += 1;
    }

    // ---- time ----

    /// UCX_TICK_MS have passed.
    pub fn tick(self: *Client) void {
        for (&self.targets) |*target| {
            if (target.state == .none) continue;
            target.quiet_ticks += 1;
            const most: u32 = if (target.state == .open and target.jobs == 0) IDLE_TICKS else QUIET_TICKS;
            if (target.quiet_ticks < most) continue;
            if (target.state == .closing) target.state = .none; // it will not end; neither does what waits for it
            target.close(); // UC-3
        }
        for (self.active[0..self.active_count]) |index| {
            const job = &self.jobs[index];
            if (job.phase == .begin or job.is_told) continue;
            const target = &self.targets[job.target];
            const has_ended = job.order.hasEnded();
            if (has_ended) target.close();
            if (!target.isLooking() or target.opened != job.opened) continue;
            job.ticks += 1;
            const most: u32 = if (job.phase == .verdict) VERDICT_TICKS else SILENCE_TICKS;
            if (has_ended) self.tell(job, status.ERR_GONE) else if (job.is_given_up or job.ticks >= most)
                self.tell(job, status.ERR_SILENT); // UC-5
        }
    }

    /// End everything. Whether UCX still has to make progress for that: then to be called again.
    pub fn shut(self: *Client) bool {
        for (self.active[0..self.active_count]) |index| self.jobs[index].is_given_up = true;
        for (&self.targets) |*target| target.close();
        _ = self.turn();
        return !self.isShut();
    }

    /// Whether nothing is left that UCX would have to end.
    pub fn isShut(self: *const Client) bool {
        return self.active_count == 0 and !self.isOpen() and self.abandoned == 0;
    }
};
