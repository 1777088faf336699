//! The carrier ucx: RDMA adapters (InfiniBand, RoCE, EFA) by UCX; both sides of it, and its place in T2.
//!
//! UX-1 UCX is looked for when it is first needed: loading it takes as long as starting an interpreter. UX-2 T0 looks,
//! registers and revokes, T2 does the rest; one lock is around every call of UCX. UX-3 A forked child leaves UCX alone.

const std = @import("std");
const exporting = @import("export.zig");
const grants = @import("../grants/grants.zig");
const library_file = @import("library.zig");
const limits = @import("../limits.zig");
const loading = @import("../system/loading.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const thread_file = @import("../copying/mover_thread.zig");
const transfer = @import("../copying/transfer.zig");
const attachment = @import("../grants/attachment.zig");
const worker_file = @import("worker.zig");
const Client = @import("client.zig").Client;
const Owner = @import("owner.zig").Owner;

const Text = library_file.Text;
const Thread = thread_file.Thread;
const Transfer = transfer.Transfer;

const ADAPTERS = "/sys/class/infiniband";

const NO_CUDA = "UCX {s} ({s}) knows no memory of CUDA devices: it was built without CUDA, finds no driver, or " ++
    "UCX_TLS leaves out cuda_copy. The UCX of HPC-X and of DOCA has both CUDA and verbs; " ++ library_file.VARIABLE ++
    " names the folder of one";
const NEEDS = "Adapters need the open kernel modules of the CUDA driver, which export such memory as a dma-buf, or " ++
    "the kernel module nvidia_peermem";
const REFUSED = "UCX {s} ({s}) has not registered memory of a CUDA device: status {d}, {s}. " ++ NEEDS;
const NO_ADAPTER = "UCX {s} ({s}) has registered memory of a CUDA device, but not with an adapter. " ++ NEEDS;

pub const Ucx = struct {
    lock: sys.Mutex,
    thread: *Thread,
    state: enum(u8) { unknown = 0, missing, open, stuck },
    library: library_file.Library,
    worker: worker_file.Worker,
    owner: Owner,
    client: Client,
    tick_at: u64,
    /// A library to look at after those of the system; "" = none.
    extra: [limits.PATH_BYTES]u8,
    /// Which library it is and what it drives, or why there is none.
    about: Text,
    /// Why memory of devices is not reached, as T0 has told it last.
    why_no_device: Text,

    const BYTES = std.mem.alignForward(usize, @sizeOf(Ucx), 4096);

    /// Make it, and have T2 look after it. Null: there is no memory.
    pub fn create(thread: *Thread, extra: []const u8) ?*Ucx {
        const pages = sys.mapPrivate(BYTES) orelse return null;
        const self: *Ucx = @ptrCast(pages); // zeroed
        self.thread = thread;
        const n = @min(extra.len, limits.PATH_BYTES - 1);
        @memcpy(self.extra[0..n], extra[0..n]);
        thread.addDriver(.{
            .tag = .ucx,
            .carrier = attachment.UCX,
            .context = self,
            .reaches = reaches,
            .begin = begin,
            .giveUp = giveUp,
            .ready = ready,
            .turn = turn,
            .close = close,
            .forget = forget,
        });
        return self;
    }

    // ---- T0 ----

    /// Whether this machine has an adapter and a UCX that drives it: UX-1.
    pub fn isOpen(self: *Ucx) bool {
        if (self.state == .unknown) {
            self.lock.lock();
            defer self.lock.unlock();
            const found = self.find();
            @atomicStore(@TypeOf(self.state), &self.state, if (found) .open else .missing, .release);
        }
        return self.state == .open;
    }

    fn find(self: *Ucx) bool {
        if (!loading.hasEntries(ADAPTERS) and loading.variable(library_file.VARIABLE) == null)
            return self.lacks("this machine has no RDMA adapter", .{});
        const extra: [*:0]const u8 = @ptrCast(&self.extra);
        self.library = library_file.Library.find(if (extra[0] == 0) null else extra, &self.about) orelse return false;
        const which = .{ self.library.version, self.library.path };
        self.worker = worker_file.Worker.open(&self.library) catch
            return self.lacks("UCX {s} ({s}) drives no adapter of this machine", which);
        self.owner.init(&self.worker) catch {
            self.worker.close();
            return self.lacks("UCX {s} ({s}) may not register memory: see `ulimit -l`", which);
        };
        if (sys.epollAdd(self.thread.epoll, self.worker.bell, sys.IN, thread_file.dataOf(.ucx, 0)) < 0) {
            self.owner.deinit();
            self.worker.close();
            return self.lacks("its descriptor cannot be waited for", .{});
        }
        self.client.init(&self.worker);
        var names: [limits.UCX_TEXT_BYTES]u8 = undefined;
        self.about = .{};
        self.about.add("UCX {s} ({s}): {s}", which ++ .{self.worker.transports(&names)});
        return true;
    }

    fn lacks(self: *Ucx, comptime format: []const u8, arguments: anytype) bool {
        self.about.add(format, arguments);
        return false;
    }

    /// What the handle of a grant says to readers with an adapter, written to `into`: as many bytes, 0 if this process
    /// has none; or a negative status. From now on T2 is there for them.
    pub fn exportGrant(self: *Ucx, name: exporting.Name, range: grants.Range, into: []u8) i32 {
        if (!self.isOpen()) return 0;
        const rc = self.thread.start();
        if (rc < 0) return rc;
        defer self.thread.nudge(); // it may sleep without an end in sight
        self.lock.lock();
        defer self.lock.unlock();
        const written = self.owner.exportGrant(name, range, into) catch |problem| switch (problem) {
            error.Refused => return 0, // the limit of what may be pinned, say: other carriers are left
            error.NoRoom => return status.ERR_TOO_LARGE,
        };
        return @intCast(written.len);
    }

    /// Kinds of memory that UCX knows, a mask by `grants.Memory`; 0 if there is none.
    pub fn memory(self: *Ucx) u32 {
        if (!self.isOpen()) return 0;
        const HOST = 1 << @intFromEnum(grants.Memory.host);
        const CUDA = 1 << @intFromEnum(grants.Memory.cuda);
        return if (self.worker.kinds >> library_file.MEMORY_CUDA & 1 != 0) HOST | CUDA else HOST;
    }

    /// Why memory of devices is not reached, or was not when last tried; "" = it was, or may be.
    pub fn whyNoDevice(self: *Ucx) [:0]const u8 {
        if (!self.isOpen()) return self.about.get();
        self.lock.lock();
        defer self.lock.unlock();
        const text = &self.why_no_device;
        text.* = .{};
        const which = .{ self.library.version, self.library.path };
        switch (self.worker.trouble) {
            .none => {},
            .unknown_kind => text.add(NO_CUDA, which),
            .refused => {
                const status_of = self.worker.refusal;
                text.add(REFUSED, which ++ .{ status_of, library_file.describe(status_of) });
            },
            .no_adapter => text.add(NO_ADAPTER, which),
        }
        return text.get();
    }

    /// Let no access to a grant stay open.
    pub fn revoke(self: *Ucx, place: u32) void {
        if (self.state != .open) return;
        self.lock.lock();
        defer self.lock.unlock();
        self.owner.revoke(place);
    }

    /// Give the memory back. T2 has ended, and `close` was called.
    pub fn destroy(self: *Ucx) void {
        if (self.state == .stuck) return; // its worker is left to the end of the process
        sys.unmap(@ptrCast(@alignCast(self)), BYTES);
    }

    fn of(context: *anyopaque) *Ucx {
        return @ptrCast(@alignCast(context));
    }

    fn reaches(context: *anyopaque, one: *attachment.Attachment) bool {
        const self = of(context);
        if (self.isOpen()) return true; // whether the owner is reached, too, the handle of each grant says
        one.why_not.add("ucx: {s}", .{self.about.get()});
        return false;
    }

    fn close(context: *anyopaque) void {
        const self = of(context);
        if (self.state != .open) return;
        var rounds: u32 = 0;
        while (self.client.shut() and rounds < limits.UCX_SHUT_ROUNDS) : (rounds += 1) {
            while (self.client.takeDone() != null) {} // without records
            self.worker.progress();
            if (rounds > limits.UCX_PROGRESS_ROUNDS) sys.sleepMs(1);
        }
        self.owner.deinit();
        self.state = if (self.client.isShut()) .missing else .stuck; // UC-5 of ucx/client.zig
        if (self.state == .missing) self.worker.close();
    }

    fn forget(context: *anyopaque) void {
        _ = context; // UX-3
    }

    // ---- T2 ----

    fn begin(context: *anyopaque, one: *Transfer) void {
        const self = of(context);
        const grant = &one.request.grant;
        self.lock.lock();
        const rc = self.client.begin(.{
            .caller = one,
            .epoch = one.attachment.home.epoch,
            .pid_fd = one.attachment.pid_fd,
            .kind = if (one.request.kindOf() == .read) .read else .write,
            .name = .{ .place = grant.place, .generation = grant.generation, .secret = grant.secret },
            .offset = one.request.offset,
            .size = one.request.size,
            .local = one.request.local.?,
            .memory = one.request.memoryOf(),
            .exported = one.request.exportedBytes(),
        });
        self.lock.unlock();
        if (rc != status.OK) self.thread.finish(one, if (rc == status.FULL) status.ERR_LIMIT else rc);
    }

    fn giveUp(context: *anyopaque, one: *Transfer) void {
        of(context).client.giveUp(one);
    }

    fn ready(context: *anyopaque, about: u56, events: u32) void {
        _ = .{ context, about, events }; // there is a turn in each round
    }

    fn turn(context: *anyopaque) i32 {
        const self = of(context);
        if (@atomicLoad(@TypeOf(self.state), &self.state, .acquire) != .open) return -1;
        const has_moved = self.move();
        while (self.client.takeDone()) |done| self.thread.finish(@ptrCast(@alignCast(done.caller)), done.status);
        self.lock.lock();
        defer self.lock.unlock();
        if (has_moved or !self.worker.arm()) return 0; // others of T2 have their turn first
        if (self.client.isBusy()) return limits.UCX_POLL_MS;
        return if (self.owner.count > 0 or self.client.isOpen()) limits.UCX_IDLE_POLL_MS else -1;
    }

    fn move(self: *Ucx) bool {
        self.lock.lock();
        defer self.lock.unlock();
        self.worker.progress();
        const now = sys.monotonicNs();
        if (now >= self.tick_at) {
            self.tick_at = now + limits.UCX_TICK_MS * 1_000_000; // one tick, however late it is
            self.client.tick();
        }
        return self.client.turn();
    }
};
