//! The carrier `tcp`, as the driver of T2 that it is: which grants its server serves, which transfers its client
//! carries. The protocol is in tcp/wire.zig, the sockets are in tcp/server.zig and tcp/client.zig.
//!
//! CT-1 What is granted is asked of this process's own copy, and of the ledger only the lock of atomic operations,
//! which all carriers take. CT-2 Who shows no secret is never counted as being at a grant: no stranger can
//! keep a place from being used again.

const std = @import("std");
const client = @import("client.zig");
const grants_file = @import("../grants/grants.zig");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const mover_thread = @import("../copying/mover_thread.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const tcp = @import("tcp.zig");
const transfer = @import("../copying/transfer.zig");
const attachment = @import("../grants/attachment.zig");
const wire = @import("wire.zig");
const Address = @import("tcp_socket.zig").Address;
const Self = @import("../grants/access.zig").Self;
const Transfer = transfer.Transfer;

/// What this process has granted, as its server asks for it.
const Granted = struct {
    grants: *grants_file.Grants,
    self: Self,

    fn rowOf(self: *const Granted, place: u32) *grants_file.Grant {
        return &self.grants.rows[place];
    }

    /// The secret of a grant, in force or not; null: none is known.
    pub fn secretOf(self: *Granted, place: u32, generation: u32) ?wire.Secret {
        return self.grants.secretOf(place, generation);
    }

    /// Be at what a request asks for. A status; `bytes_out` is where it begins.
    pub fn enter(self: *Granted, request: *const wire.Request, bytes_out: *[*]u8) i32 {
        if (!self.isCurrent(request.place, request.generation)) return status.ERR_REVOKED;
        const kind: transfer.Kind = @enumFromInt(@intFromEnum(request.kind));
        var why: i32 = 0;
        const entered = self.grants.enter(&.{
            .place = request.place,
            .generation = request.generation,
            .secret = self.rowOf(request.place).terms.secret, // its sender has shown that it knows that
            .rights = kind.rights(),
            .offset = request.offset,
            .size = request.size,
        }, &why) orelse return why;
        bytes_out.* = @ptrFromInt(@as(usize, @intCast(entered.terms.address + request.offset)));
        return status.OK;
    }

    /// Be there no more.
    pub fn leave(self: *Granted, place: u32) void {
        self.rowOf(place).leave();
    }

    /// Whether a grant is in force.
    pub fn isCurrent(self: *Granted, place: u32, generation: u32) bool {
        return self.rowOf(place).now() == ledger.wordOf(generation, .granted);
    }

    /// An atomic operation. A status; null: the lock is taken.
    pub fn change(self: *Granted, request: *const wire.Request, bytes: [*]u8, value_out: *u64) ?i32 {
        if (@intFromPtr(bytes) % wire.WORD_BYTES != 0) return status.ERR_ARGUMENT;
        const row = &self.grants.table.rows[request.place];
        const claim = ledger.Claim{ .pid = self.self.pid, .started = self.self.started, .place = request.place };
        var tries: u32 = limits.LOCK_TRIES;
        while (!row.tryLock(claim)) { // CT-1
            tries -= 1;
            if (tries == 1) row.breakLock();
            if (tries == 0) return null;
        }
        defer row.unlock(claim);
        if (!self.isCurrent(request.place, request.generation)) return status.ERR_REVOKED;
        const old = self.load(bytes) orelse return wire.NOT_THERE;
        value_out.* = old;
        const new = switch (request.kind) {
            .add => old +% request.operand,
            .swap => if (old == request.expected) request.operand else return status.OK,
            .read, .write => unreachable, // not asked for by the server
        };
        return if (self.store(bytes, new)) status.OK else wire.NOT_THERE;
    }

    /// The word at an address. Null: there is no memory; a mistake of this process, but not one to end by when others
    /// say so. Where the kernel does not allow to ask, it is believed to be there.
    fn load(self: *const Granted, at: [*]u8) ?u64 {
        var word: u64 = 0;
        const n = process.readMemory(self.self.pid, &.{process.Piece.of(std.mem.asBytes(&word))}, &.{wordAt(at)});
        if (n == wire.WORD_BYTES) return word;
        return if (n == -process.EFAULT) null else @atomicLoad(u64, @as(*u64, @ptrCast(@alignCast(at))), .seq_cst);
    }

    fn store(self: *const Granted, at: [*]u8, value: u64) bool {
        var word = value;
        const n = process.writeMemory(self.self.pid, &.{process.Piece.of(std.mem.asBytes(&word))}, &.{wordAt(at)});
        if (n == wire.WORD_BYTES) return true;
        if (n == -process.EFAULT) return false;
        @atomicStore(u64, @as(*u64, @ptrCast(@alignCast(at))), value, .seq_cst);
        return true;
    }

    fn wordAt(at: [*]u8) process.Piece {
        return .{ .address = @intFromPtr(at), .size = wire.WORD_BYTES };
    }
};

/// The owners of what is being moved.
const Owners = struct {
    thread: *mover_thread.Thread,

    /// Whether the owner of what a transfer moves has ended; null: it is on another host.
    pub fn hasEnded(self: *Owners, id: u64) ?bool {
        const pid_fd = self.thread.transferOf(id).attachment.pid_fd;
        return if (pid_fd < 0) null else process.hasEnded(pid_fd);
    }
};

/// All zero is one that was not started.
pub const TcpCarrier = struct {
    granted: Granted,
    owners: Owners,
    both: tcp.Tcp(Granted, Owners),
    thread: *mover_thread.Thread,
    /// T0 has revoked what T2 may be at.
    revoked: bool,

    /// Become a driver, before T2 is started; `address` null: do not listen. Returns 0 or -errno.
    pub fn start(
        self: *TcpCarrier,
        thread: *mover_thread.Thread,
        grants: *grants_file.Grants,
        own: Self,
        epoch: u64,
        address: ?*Address,
    ) i32 {
        self.thread = thread;
        self.granted = .{ .grants = grants, .self = own };
        self.owners = .{ .thread = thread };
        self.revoked = false;
        var rc = self.both.init(&self.granted, &self.owners, epoch);
        if (rc < 0) return rc;
        if (address) |one| rc = self.both.server.listen(one);
        if (rc >= 0) rc = sys.epollAdd(thread.epoll, self.both.epoll, sys.IN, mover_thread.dataOf(.tcp, 0));
        if (rc < 0) {
            self.both.closeFds();
            return rc;
        }
        thread.addDriver(.{
            .tag = .tcp,
            .carrier = attachment.TCP,
            .context = self,
            .reaches = reaches,
            .begin = begin,
            .giveUp = giveUp,
            .ready = ready,
            .turn = turn,
            .close = close,
            .forget = close,
        });
        return 0;
    }

    fn of(context: *anyopaque) *TcpCarrier {
        return @ptrCast(@alignCast(context));
    }

    /// T0: a grant was revoked, and this process is still at it.
    pub fn letGo(self: *TcpCarrier) void {
        @atomicStore(bool, &self.revoked, true, .seq_cst);
        self.thread.nudge();
    }

    fn reaches(_: *anyopaque, one: *attachment.Attachment) bool {
        const home = &one.home;
        const listens = home.port > 0 and home.port <= std.math.maxInt(u16);
        if (listens and (home.address_size == 4 or home.address_size == 16)) return true;
        one.why_not.add("tcp: the process does not listen", .{});
        return false;
    }

    fn begin(context: *anyopaque, one: *Transfer) void {
        const self = of(context);
        const request = &one.request;
        const home = &one.attachment.home;
        const begun = self.both.client.begin(.{
            .id = one.id,
            .target = .{
                .epoch = home.epoch,
                .address = .{
                    .bytes = home.address,
                    .size = home.address_size,
                    .port = @intCast(home.port), // checked by `reaches`
                },
            },
            .kind = @enumFromInt(request.kind),
            .place = request.grant.place,
            .generation = request.grant.generation,
            .secret = request.grant.secret,
            .offset = request.offset,
            .size = request.size,
            .local = request.local orelse undefined, // of an atomic operation, which touches none
            .operand = request.operand,
            .expected = request.expected,
        });
        std.debug.assert(begun); // it has a place for each transfer
        self.tell();
    }

    fn giveUp(context: *anyopaque, one: *Transfer) void {
        const self = of(context);
        self.both.client.giveUp(one.id);
        self.tell();
    }

    /// The descriptor stands for all of its own, which `turn` looks at.
    fn ready(_: *anyopaque, _: u56, _: u32) void {}

    fn turn(context: *anyopaque) i32 {
        const self = of(context);
        if (@atomicRmw(bool, &self.revoked, .Xchg, false, .seq_cst)) self.both.server.onRevoked();
        self.both.turn(sys.monotonicNs());
        self.tell();
        return self.both.wait(sys.monotonicNs());
    }

    /// Pass on what has ended.
    fn tell(self: *TcpCarrier) void {
        while (self.both.client.takeDone()) |done| {
            const one = self.thread.transferOf(done.id);
            one.value = done.value;
            self.thread.finish(one, done.status);
        }
    }

    fn close(context: *anyopaque) void {
        of(context).both.closeFds();
    }
};
