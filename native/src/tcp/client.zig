//! The reader's side of the carrier tcp, in T2: transfers are cut into requests, and these go over one connection to
//! the owner, or two for what is large. Has no lock: only T2 calls it.
//!
//! `Owners` says what else is known of a process that is reached: `hasEnded(id) ?bool` of the owner of what transfer
//! `id` moves, null where that cannot be known because it is on another host.
//!
//! TC-1 A transfer has ended when nothing of it is asked for any more: no byte is written to its memory afterwards. To
//! give one up is to ask for nothing more. TC-2 A connection that breaks takes along what was asked on it and nothing
//! else; nothing is asked twice, an ADD least of all. TC-3 Whoever owes us anything and has not moved a byte for
//! MOVER_SILENCE_MS is silent: that ends the connection. Silence is counted in ticks, as in reactor.zig. TC-4 Bytes of
//! a WRITE that was given up as silent, or lost, must not arrive after those of its repetition: a connection that
//! breaks is aborted here, and the owner does not touch what is left in one that its client has left.

const std = @import("std");
const asking = @import("asking.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const tcp = @import("tcp_socket.zig");
const wire = @import("wire.zig");

/// Tag of events; see tcp/tcp.zig.
pub const STREAM: u64 = 3 << 56;

/// A process that is reached.
pub const Target = struct {
    epoch: u64,
    address: tcp.Address,

    fn is(self: *const Target, other: *const Target) bool {
        return self.epoch == other.epoch and std.meta.eql(self.address, other.address);
    }
};

/// What is to be moved.
pub const Order = struct {
    /// Tells it from all others, and is the caller's.
    id: u64,
    target: Target,
    kind: wire.Kind,
    place: u32,
    generation: u32,
    secret: wire.Secret,
    offset: u64,
    size: u64,
    local: [*]u8,
    operand: u64,
    expected: u64,
};

/// How it ended.
pub const Done = struct { id: u64, status: i32, value: u64 };

/// The client, given what else is known of owners.
pub fn Client(comptime Owners: type) type {
    return struct {
        const Self = @This();

        const Job = struct {
            order: Order,
            in_use: bool = false,
            /// Bytes that were asked for; of an empty or an atomic one, whether.
            asked: u64 = 0,
            begun: bool = false,
            /// Requests that have no answer yet.
            open: u32 = 0,
            status: i32 = status.OK,
            value: u64 = 0,

            fn wants(self: *const Job) bool {
                return self.in_use and self.status == status.OK and (!self.begun or self.asked < self.order.size);
            }
        };

        const Stream = struct {
            fd: i32 = -1,
            machine: asking.Asking,
            target: Target,
            serial: u32 = 0,
            state: State = .free,
            events: u32 = 0,
            silent_ticks: u32 = 0,
            looks: u32 = 0,
            /// Why it failed.
            failure: i32 = status.OK,

            /// `again`: the owner had no room, try at the next tick. `failed`: has the owner ended?
            const State = enum { free, connecting, open, again, failed };

            /// Nothing is asked on it.
            fn isSpare(self: *const Stream) bool {
                return self.state == .open and self.machine.isIdle();
            }
        };

        owners: *Owners,
        epoll: i32,
        jobs: [limits.TRANSFERS_MAX]Job,
        job_count: u32 = 0,
        /// Jobs below this index may be in use.
        jobs_end: u32 = 0,
        streams: [limits.TCP_STREAMS_MAX]Stream,
        stream_count: u32 = 0,
        streams_end: u32 = 0,
        serial: u32 = 0,
        failed_count: u32 = 0,
        /// Where the search for the next piece of work begins.
        turn: u32 = 0,
        done: [limits.TRANSFERS_MAX]Done,
        done_count: u32 = 0,

        /// Nothing is begun.
        pub fn init(self: *Self, owners: *Owners, epoll: i32) void {
            self.owners = owners;
            self.epoll = epoll;
            self.job_count = 0;
            self.jobs_end = 0;
            self.stream_count = 0;
            self.streams_end = 0;
            self.serial = 0;
            self.failed_count = 0;
            self.turn = 0;
            self.done_count = 0;
        }

        /// Close everything. T2 has ended, or this is a forked child.
        pub fn closeFds(self: *Self) void {
            for (self.streams[0..self.streams_end]) |*one| sys.closeAt(&one.fd);
        }

        // ---- what is asked for ----

        /// Begin a transfer. False: there are too many.
        pub fn begin(self: *Self, order: Order) bool {
            // Those that wait in `done` count, so that it never overflows.
            if (self.job_count + self.done_count >= limits.TRANSFERS_MAX) return false;
            const job = self.freeJob();
            job.* = .{ .order = order, .in_use = true };
            self.job_count += 1;
            // Cut into requests, its parts would begin again at 0.
            if (order.offset +% order.size < order.offset) self.fail(job, status.ERR_DENIED) else self.advance(job);
            return true;
        }

        fn freeJob(self: *Self) *Job {
            for (self.jobs[0..self.jobs_end]) |*job| {
                if (!job.in_use) return job;
            }
            self.jobs_end += 1;
            return &self.jobs[self.jobs_end - 1];
        }

        /// Have a transfer end soon. TC-1
        pub fn giveUp(self: *Self, id: u64) void {
            for (self.jobs[0..self.jobs_end]) |*job| {
                if (job.in_use and job.order.id == id) return self.fail(job, status.ERR_CANCELLED);
            }
        }

        /// The next transfer that has ended.
        pub fn takeDone(self: *Self) ?Done {
            if (self.done_count == 0) return null;
            self.done_count -= 1;
            return self.done[self.done_count];
        }

        // ---- jobs ----

        fn fail(self: *Self, job: *Job, why: i32) void {
            if (job.status == status.OK) job.status = why;
            self.settle(job);
        }

        /// Tell of a job that has ended.
        fn settle(self: *Self, job: *Job) void {
            if (job.open > 0 or job.wants()) return; // TC-1
            self.done[self.done_count] = .{ .id = job.order.id, .status = job.status, .value = job.value };
            self.done_count += 1;
            job.in_use = false;
            self.job_count -= 1;
        }

        /// Have connections work on a job; make those that it lacks.
        fn advance(self: *Self, job: *Job) void {
            const wanted: u32 = if (job.order.size >= limits.TCP_SPLIT_BYTES) limits.TCP_STREAMS else 1;
            var found: u32 = 0;
            var doubtful = false;
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .free or !one.target.is(&job.order.target)) continue;
                found += 1;
                doubtful = doubtful or one.state == .failed or one.state == .again;
            }
            while (found < wanted and !doubtful) : (found += 1) { // first, what becomes of those
                const rc = self.open(job.order.target);
                if (rc >= 0) continue;
                if (found == 0) self.fail(job, status.ofErrno(rc));
                break;
            }
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .open and one.target.is(&job.order.target)) self.serve(one);
            }
        }

        /// The piece that a connection asks for next.
        fn nextJob(self: *Self, one: *const Stream) ?*Job {
            for (0..self.jobs_end) |i| {
                const job = &self.jobs[(self.turn + i) % self.jobs_end];
                if (!job.wants() or !job.order.target.is(&one.target)) continue;
                self.turn = (self.turn + @as(u32, @intCast(i)) + 1) % self.jobs_end;
                return job;
            }
            return null;
        }

        fn askMore(self: *Self, one: *Stream) void {
            while (one.machine.room() > 0) {
                const job = self.nextJob(one) orelse return;
                const order = &job.order;
                const size = @min(order.size - job.asked, limits.TCP_BODY_BYTES_MAX);
                one.machine.ask(.{
                    .kind = order.kind,
                    .place = order.place,
                    .generation = order.generation,
                    .counter = 0, // of the machine
                    .offset = order.offset + job.asked,
                    .size = size,
                    .operand = order.operand,
                    .expected = order.expected,
                }, &order.secret, self.indexOf(job), job.asked);
                job.asked += size;
                job.begun = true;
                job.open += 1;
            }
        }

        fn indexOf(self: *const Self, job: *const Job) u32 {
            return @intCast((@intFromPtr(job) - @intFromPtr(&self.jobs)) / @sizeOf(Job));
        }

        fn memoryOf(self: *Self, span: asking.Span) []u8 {
            const job = &self.jobs[span.about];
            std.debug.assert(job.in_use and job.open > 0);
            return job.order.local[@intCast(span.local)..][0..@intCast(span.size)];
        }

        // ---- connections ----

        fn dataOf(self: *const Self, one: *const Stream) u64 {
            const slot = (@intFromPtr(one) - @intFromPtr(&self.streams)) / @sizeOf(Stream);
            return STREAM | @as(u64, one.serial) << 16 | slot;
        }

        fn place(self: *Self) ?*Stream {
            var spare: ?*Stream = null;
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .free) return one;
                if (one.isSpare() and (spare == null or one.silent_ticks > spare.?.silent_ticks)) spare = one;
            }
            if (self.streams_end < self.streams.len) {
                self.streams_end += 1;
                self.streams[self.streams_end - 1].state = .free;
                return &self.streams[self.streams_end - 1];
            }
            if (spare) |one| self.drop(one);
            return spare;
        }

        /// Returns 0 or -errno.
        fn open(self: *Self, target: Target) i32 {
            const one = self.place() orelse return -sys.EMFILE;
            self.serial +%= 1;
            one.* = .{ .machine = .init(target.epoch), .target = target, .serial = self.serial };
            const rc = self.connect(one);
            if (rc >= 0) self.stream_count += 1;
            return rc;
        }

        fn connect(self: *Self, one: *Stream) i32 {
            const fd = tcp.connect(one.target.address);
            if (fd < 0) return fd;
            const rc = sys.epollAdd(self.epoll, fd, sys.OUT, self.dataOf(one));
            if (rc < 0) {
                sys.close(fd);
                return rc;
            }
            one.fd = fd;
            one.machine = .init(one.target.epoch);
            one.events = sys.OUT;
            one.state = .connecting;
            return 0;
        }

        /// Close a connection on which nothing is asked.
        fn drop(self: *Self, one: *Stream) void {
            if (one.state == .failed) self.failed_count -= 1;
            sys.closeAt(&one.fd);
            one.state = .free;
            self.stream_count -= 1;
        }

        /// A connection is of no use any more. TC-2
        fn breakOff(self: *Self, one: *Stream, why: i32) void {
            tcp.abort(&one.fd); // TC-4
            // An owner whose table is full closes at once.
            if (why == RESET and one.state == .open and !one.machine.greeted) {
                one.state = .again;
                return;
            }
            // No transfer is concerned: the next one connects anew, and hears of it then.
            if (one.machine.greeted and one.machine.isSettled()) return self.bury(one, why);
            const ended = self.hasEnded(one) orelse return self.bury(one, why);
            if (ended) return self.bury(one, status.ERR_GONE);
            if (why == status.ERR_GONE or why == status.ERR_SILENT) return self.bury(one, why);
            // Sockets are closed a moment before the process counts as ended: wait for that moment, then say why.
            one.failure = why;
            one.looks = 0;
            one.state = .failed;
            self.failed_count += 1;
            self.look(one);
        }

        /// Whether the owner has ended, if a transfer that wants something from it can tell.
        fn hasEnded(self: *Self, one: *const Stream) ?bool {
            for (self.jobs[0..self.jobs_end]) |*job| {
                if (job.in_use and job.order.target.is(&one.target)) return self.owners.hasEnded(job.order.id);
            }
            return null;
        }

        fn look(self: *Self, one: *Stream) void {
            const ended = self.hasEnded(one) orelse false;
            one.looks += 1;
            if (ended) return self.bury(one, status.ERR_GONE);
            if (one.looks > limits.TCP_END_POLLS) self.bury(one, one.failure);
        }

        fn bury(self: *Self, one: *Stream, why: i32) void {
            const machine = &one.machine;
            const target = one.target;
            const greeted = machine.greeted;
            var n = machine.answered;
            self.drop(one);
            while (n < machine.asked) : (n += 1) {
                const job = &self.jobs[machine.pendings[n % limits.TCP_WINDOW_REQUESTS].about];
                job.open -= 1;
                self.fail(job, why);
            }
            for (self.jobs[0..self.jobs_end]) |*job| {
                if (!job.wants() or !job.order.target.is(&target)) continue;
                // Not all of it was asked for: another connection may do, if this one was closed for being idle.
                if (greeted and why == RESET) self.advance(job) else if (!self.hasOpen(&target)) self.fail(job, why);
            }
        }

        fn hasOpen(self: *const Self, target: *const Target) bool {
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .open and one.target.is(target)) return true;
            }
            return false;
        }

        fn watch(self: *Self, one: *Stream, events: u32) void {
            if (one.events == events) return;
            one.events = events;
            const rc = sys.epollModify(self.epoll, one.fd, events, self.dataOf(one));
            std.debug.assert(rc == 0); // the descriptor is in the set
        }

        // ---- moving ----

        /// Something happened on a connection.
        pub fn onStream(self: *Self, data: u64) void {
            const slot: u16 = @truncate(data);
            const one = &self.streams[slot];
            if (one.fd < 0 or self.dataOf(one) != data) return; // of one that has ended meanwhile
            if (one.state == .connecting) {
                const rc = tcp.outcome(one.fd);
                if (rc < 0) return self.breakOff(one, status.ofErrno(rc));
                one.state = .open;
            }
            self.serve(one);
        }

        /// Move what can be moved, at most the share of one turn.
        fn serve(self: *Self, one: *Stream) void {
            const serial = one.serial;
            // First what has come: a connection that has ended meanwhile is not asked anything.
            self.receive(one) catch return self.breakOff(one, one.failure);
            self.send(one) catch return self.breakOff(one, one.failure);
            if (one.serial != serial or one.state != .open) return;
            self.watch(one, if (one.machine.toSend() == .nothing) sys.IN else sys.IN | sys.OUT);
        }

        const Error = error{Broken};
        const RESET = status.ofErrno(-sys.ECONNRESET);

        fn broken(one: *Stream, rc: i64) Error {
            one.failure = status.ofErrno(if (rc == 0) -sys.ECONNRESET else @intCast(rc));
            return error.Broken;
        }

        fn send(self: *Self, one: *Stream) Error!void {
            var left: u64 = limits.TCP_TURN_BYTES;
            while (left > 0) {
                self.askMore(one);
                const n = switch (one.machine.toSend()) {
                    .nothing => return,
                    .head => |head| tcp.send(one.fd, head.bytes, "", head.more),
                    .body => |span| tcp.send(one.fd, self.memoryOf(span), "", false),
                };
                if (n == -sys.EAGAIN) return;
                if (n == -sys.EPIPE or n == -sys.ECONNRESET) return; // what came before the end is still to be heard
                if (n < 0) return broken(one, n);
                if (one.machine.greeted) one.silent_ticks = 0;
                one.machine.sent(@intCast(n));
                left -|= @intCast(n);
            }
        }

        fn receive(self: *Self, one: *Stream) Error!void {
            var left: u64 = limits.TCP_TURN_BYTES;
            while (left > 0) {
                const n = switch (one.machine.toReceive()) {
                    .head => |into| tcp.receive(one.fd, into),
                    .body => |span| tcp.receive(one.fd, self.memoryOf(span)),
                };
                if (n == -sys.EAGAIN) return;
                if (n <= 0) return broken(one, n);
                one.silent_ticks = 0;
                left -|= @intCast(n);
                const event = one.machine.received(@intCast(n)) catch {
                    one.failure = status.ERR_PEER;
                    return error.Broken;
                };
                switch (event) {
                    .none => {},
                    .greeted => try self.send(one),
                    .stranger => {
                        one.failure = status.ERR_GONE;
                        return error.Broken;
                    },
                    .ended => |ended| {
                        self.onAnswer(&self.jobs[ended.about], ended.status, ended.value);
                        if (one.machine.room() >= limits.TCP_WINDOW_REQUESTS / 2) try self.send(one);
                    },
                }
            }
        }

        fn onAnswer(self: *Self, job: *Job, how: i32, value: u64) void {
            job.open -= 1;
            job.value = value;
            if (how != status.OK) return self.fail(job, how);
            self.settle(job);
        }

        // ---- time ----

        /// Whether `tick` has anything to do.
        pub fn needsTicks(self: *const Self) bool {
            return self.stream_count > 0;
        }

        /// Whether `lookAgain` is to be called soon.
        pub fn needsLooks(self: *const Self) bool {
            return self.failed_count > 0;
        }

        /// Whether the owners of connections that have failed have ended by now.
        pub fn lookAgain(self: *Self) void {
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .failed) self.look(one);
            }
        }

        /// Some time has passed.
        pub fn tick(self: *Self) void {
            for (self.streams[0..self.streams_end]) |*one| {
                if (one.state == .free or one.state == .failed) continue;
                one.silent_ticks +|= 1;
                if (one.isSpare()) {
                    if (one.silent_ticks >= limits.TCP_IDLE_TICKS) self.drop(one);
                } else if (one.silent_ticks >= limits.TCP_SILENCE_TICKS) {
                    self.breakOff(one, status.ERR_SILENT); // TC-3
                } else if (one.state == .again) {
                    const rc = self.connect(one);
                    if (rc < 0) self.breakOff(one, status.ofErrno(rc));
                }
            }
        }
    };
}
