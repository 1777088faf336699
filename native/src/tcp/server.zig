//! The owner's side of the carrier tcp, in T2: takes connections, and moves bytes straight between them and granted
//! memory. Has no lock: only T2 calls it.
//!
//! `Grants` is the owner's own copy of what it has granted; nothing here looks at the ledger that others can write to:
//!
//!     secretOf(place, generation) ?Secret  of a grant in force or revoked; null: there is none
//!     enter(request, bytes_out) status     OK: T2 is at the range from now on, which begins at `bytes_out`
//!     leave(place)                         T2 is at it no more
//!     isCurrent(place, generation) bool    it has not been revoked
//!     change(request, bytes, value_out)    ADD or SWAP under the lock that all carriers take: a status; null: not now
//!
//! TV-1 A connection is at a grant exactly while a request of it is under way, and looks at the grant before and after
//! each piece; when it was revoked meanwhile the machine is spoiled, and T2 is at it no more. TV-2 What a client does,
//! or does not do, costs a place in the table for a bounded time; who has shown no secret yet (a stranger) makes way
//! for others, and strangers have a share of the process's descriptors only.
//! TV-3 What is left in a connection that its client has left is not looked at: it was given up, and may have come
//! again.

const std = @import("std");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const serving = @import("serving.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const tcp = @import("tcp_socket.zig");
const wire = @import("wire.zig");

/// What is sent in place of bytes that must not be.
var zeros: [limits.TCP_SCRAP_BYTES]u8 = @splat(0);

/// Tags of events; see tcp/tcp.zig.
pub const LISTENER: u64 = 1 << 56;
pub const CONNECTION: u64 = 2 << 56;

/// The server, given what it asks of grants.
pub fn Server(comptime Grants: type) type {
    return struct {
        const Self = @This();

        const Connection = struct {
            fd: i32,
            machine: serving.Serving,
            /// Counts all connections ever: tells an event of one that has ended meanwhile.
            serial: u32,
            /// What epoll watches it for.
            events: u32,
            /// Ticks without a byte.
            silent_ticks: u32,
            /// It has shown a secret.
            known: bool,
            /// The granted range that it is at, of the request that is under way.
            at: ?[*]u8,
            /// The lock that the request needs is taken.
            locked: bool,
        };

        grants: *Grants,
        epoch: u64,
        epoll: i32,
        listener: i32 = -1,
        /// Not watched until the next tick: the process is out of descriptors.
        paused: bool = false,
        connections: [limits.TCP_CONNECTIONS_MAX]Connection,
        /// Places from here on were never used.
        connections_end: u32 = 0,
        count: u32 = 0,
        /// Those that have shown no secret.
        stranger_count: u32 = 0,
        locked_count: u32 = 0,
        serial: u32 = 0,
        /// What requests for grants that do not exist are compared with.
        decoy: wire.Secret,
        /// Where bytes go that are not wanted.
        scrap: [limits.TCP_SCRAP_BYTES]u8,

        /// Not listening yet.
        pub fn init(self: *Self, grants: *Grants, epoch: u64, epoll: i32) void {
            self.grants = grants;
            self.epoch = epoch;
            self.epoll = epoll;
            self.listener = -1;
            self.paused = false;
            self.count = 0;
            self.stranger_count = 0;
            self.serial = 0;
            self.connections_end = 0;
            self.locked_count = 0;
            sys.random(&self.decoy);
        }

        /// Listen; the port is written to the address. Returns 0 or -errno.
        pub fn listen(self: *Self, address: *tcp.Address) i32 {
            std.debug.assert(self.listener < 0);
            const fd = tcp.listen(address);
            if (fd < 0) return fd;
            const rc = sys.epollAdd(self.epoll, fd, sys.IN, LISTENER);
            if (rc < 0) {
                sys.close(fd);
                return rc;
            }
            self.listener = fd;
            return 0;
        }

        /// Close everything. T2 has ended, or this is a forked child.
        pub fn closeFds(self: *Self) void {
            sys.closeAt(&self.listener);
            for (self.connections[0..self.connections_end]) |*one| sys.closeAt(&one.fd);
        }

        // ---- connections ----

        fn dataOf(self: *Self, one: *const Connection) u64 {
            const slot = (@intFromPtr(one) - @intFromPtr(&self.connections)) / @sizeOf(Connection);
            return CONNECTION | @as(u64, one.serial) << 16 | slot;
        }

        /// Take connections that wait.
        pub fn onListener(self: *Self) void {
            for (0..limits.TCP_ACCEPTS) |_| {
                const fd = tcp.accept(self.listener);
                if (fd == -sys.EAGAIN) return;
                if (fd == -sys.EMFILE or fd == -sys.ENFILE) return self.pause();
                if (fd < 0) continue; // it went away before it was taken
                self.adopt(fd);
            }
        }

        /// Take nothing until the next tick: without a descriptor nothing can be, and epoll would say so without end.
        pub fn pause(self: *Self) void {
            sys.epollRemove(self.epoll, self.listener);
            self.paused = true;
        }

        fn adopt(self: *Self, fd: i32) void {
            const one = self.place() orelse return sys.close(fd); // its client tries again
            var nonce: wire.Nonce = undefined;
            sys.random(&nonce);
            self.serial +%= 1;
            one.* = .{
                .fd = fd,
                .machine = .init(self.epoch, nonce),
                .serial = self.serial,
                .events = sys.IN,
                .silent_ticks = 0,
                .known = false,
                .at = null,
                .locked = false,
            };
            if (sys.epollAdd(self.epoll, fd, sys.IN | sys.RDHUP, self.dataOf(one)) < 0) {
                sys.closeAt(&one.fd);
                return;
            }
            self.count += 1;
            self.stranger_count += 1;
        }

        /// Room for a connection. TV-2
        fn place(self: *Self) ?*Connection {
            const strangers_max = strangersMax();
            while (self.stranger_count >= strangers_max) self.end(self.oldest(isStranger).?);
            for (self.connections[0..self.connections_end]) |*one| {
                if (one.fd < 0) return one;
            }
            if (self.connections_end < self.connections.len) {
                self.connections_end += 1;
                return &self.connections[self.connections_end - 1];
            }
            const victim = self.oldest(isDispensable);
            if (victim) |one| self.end(one);
            return victim;
        }

        /// How many strangers there may be. Asked of the kernel each time: the program may change its limit.
        pub fn strangersMax() u32 {
            const share = process.descriptorsMax() / limits.TCP_STRANGERS_SHARE;
            return @intCast(std.math.clamp(share, limits.TCP_STRANGERS_MIN, limits.TCP_CONNECTIONS_MAX));
        }

        fn isStranger(one: *const Connection) bool {
            return !one.known;
        }

        fn isDispensable(one: *const Connection) bool {
            // A client closes what it has not used for long itself: this one's is gone without a word.
            return !one.known or (one.machine.isIdle() and one.silent_ticks > 2 * limits.TCP_IDLE_TICKS);
        }

        fn oldest(self: *Self, comptime isMeant: fn (*const Connection) bool) ?*Connection {
            var found: ?*Connection = null;
            for (self.connections[0..self.connections_end]) |*one| {
                if (one.fd < 0 or !isMeant(one)) continue;
                if (found == null or self.serial -% one.serial > self.serial -% found.?.serial) found = one;
            }
            return found;
        }

        fn end(self: *Self, one: *Connection) void {
            self.depart(one);
            self.setLocked(one, false);
            sys.closeAt(&one.fd); // out of the epoll set, too
            self.count -= 1;
            if (!one.known) self.stranger_count -= 1;
        }

        /// T2 is no more at the grant that the connection was at.
        fn depart(self: *Self, one: *Connection) void {
            if (one.at == null) return;
            one.at = null;
            self.grants.leave(one.machine.request.place);
        }

        fn watch(self: *Self, one: *Connection, events: u32) void {
            if (one.events == events) return;
            one.events = events;
            const rc = sys.epollModify(self.epoll, one.fd, events | sys.RDHUP, self.dataOf(one));
            std.debug.assert(rc == 0); // the descriptor is in the set
        }

        // ---- moving ----

        /// Something happened on a connection.
        pub fn onConnection(self: *Self, data: u64, events: u32) void {
            const slot: u16 = @truncate(data);
            const one = &self.connections[slot];
            if (one.fd < 0 or self.dataOf(one) != data) return; // of one that has ended meanwhile
            if (events & (sys.RDHUP | sys.HUP | sys.ERR) != 0) return self.end(one); // TV-3
            self.serve(one);
        }

        /// Move what can be moved, at most the share of one turn.
        fn serve(self: *Self, one: *Connection) void {
            var left: u64 = limits.TCP_TURN_BYTES;
            while (left > 0) {
                const want = one.machine.want();
                const n: i64 = switch (want) {
                    .verdict => {
                        self.judge(one);
                        if (one.locked) return self.watch(one, 0);
                        left -|= wire.Request.BYTES; // those that move nothing must not go on for ever either
                        continue;
                    },
                    .end => return self.end(one),
                    .receive => |into| tcp.receive(one.fd, into),
                    .discard => |size| tcp.receive(one.fd, self.scrap[0..@min(size, self.scrap.len)]),
                    .padding => |size| tcp.send(one.fd, zeros[0..@min(size, zeros.len)], "", true),
                    .body_in => |span| self.move(one, span, .in) orelse continue,
                    .body_out => |span| self.move(one, span, .{ .out = "" }) orelse continue,
                    .send => |head| self.sendHead(one, head.bytes, head.more) orelse continue,
                };
                const receives = switch (want) {
                    .receive, .discard, .body_in => true,
                    else => false,
                };
                if (n == -sys.EAGAIN) return self.watch(one, if (receives) sys.IN else sys.OUT);
                if (n < 0 or (n == 0 and receives)) return self.end(one);
                one.silent_ticks = 0;
                if (receives) one.machine.received(@intCast(n)) else one.machine.sent(@intCast(n));
                self.look(one); // TV-1: after
                left -|= @intCast(n);
            }
            // The rest in the next turn: the socket is ready, so epoll comes back at once, after the others.
            self.watch(one, switch (one.machine.want()) {
                .receive, .discard, .body_in => sys.IN,
                else => sys.OUT,
            });
        }

        /// TV-1. Also departs when the request is over.
        fn look(self: *Self, one: *Connection) void {
            if (one.at == null) return;
            const machine = &one.machine;
            switch (machine.state) {
                .body_in, .beginning, .body_out => if (!self.isCurrent(one)) {
                    machine.spoil(status.ERR_REVOKED);
                    self.depart(one);
                },
                else => {
                    // The last piece may have been moved after the revocation.
                    if (!self.isCurrent(one)) machine.amend(status.ERR_REVOKED);
                    self.depart(one);
                },
            }
        }

        fn isCurrent(self: *Self, one: *const Connection) bool {
            return self.grants.isCurrent(one.machine.request.place, one.machine.request.generation);
        }

        const Way = union(enum) { in, out: []const u8 };

        /// Move a piece of granted memory. Null: the grant was revoked, the machine wants something else now.
        fn move(self: *Self, one: *Connection, span: serving.Span, way: Way) ?i64 {
            self.look(one); // TV-1: before
            const into: usize = @intCast(span.offset - one.machine.request.offset);
            const bytes = (one.at orelse return null)[into..][0..@intCast(span.size)];
            const n = switch (way) {
                .in => tcp.receive(one.fd, bytes),
                .out => |head| tcp.send(one.fd, head, bytes, true),
            };
            if (n != -process.EFAULT) return n;
            one.machine.spoil(wire.NOT_THERE); // a mistake of its owner
            self.depart(one);
            return null;
        }

        /// Send a head, and with it the body that follows, in one packet if it is small.
        fn sendHead(self: *Self, one: *Connection, bytes: []const u8, more: bool) ?i64 {
            if (!more) return tcp.send(one.fd, bytes, "", false);
            const body = one.machine.following() orelse return tcp.send(one.fd, bytes, "", true);
            return self.move(one, body, .{ .out = bytes });
        }

        // ---- verdicts ----

        fn judge(self: *Self, one: *Connection) void {
            const machine = &one.machine;
            const request = machine.request;
            const secret = self.grants.secretOf(request.place, request.generation);
            const authentic = machine.isAuthentic(&(secret orelse self.decoy)); // TW-1: also where there is none
            if (secret == null or !authentic) return machine.conclude(status.ERR_DENIED, 0);
            self.recognize(one);
            var bytes: [*]u8 = undefined;
            const verdict = self.grants.enter(&request, &bytes);
            if (verdict != status.OK) return machine.conclude(verdict, 0);
            one.at = bytes;
            switch (request.kind) {
                .read, .write => {
                    machine.admit();
                    self.look(one); // an empty body is over already
                },
                .add, .swap => self.change(one, bytes),
            }
        }

        fn recognize(self: *Self, one: *Connection) void {
            if (one.known) return;
            one.known = true;
            self.stranger_count -= 1;
        }

        fn change(self: *Self, one: *Connection, bytes: [*]u8) void {
            var value: u64 = 0;
            const how = self.grants.change(&one.machine.request, bytes, &value);
            self.depart(one);
            self.setLocked(one, how == null);
            if (how) |verdict| one.machine.conclude(verdict, value);
        }

        /// A lock has been held for as long as silence is borne.
        fn despair(self: *Self, one: *Connection) void {
            self.setLocked(one, false);
            one.silent_ticks = 0;
            one.machine.conclude(status.ERR_SILENT, 0);
            self.serve(one);
        }

        // ---- what does not come from a socket ----

        /// A grant was revoked: let go of it, whatever clients do.
        pub fn onRevoked(self: *Self) void {
            for (self.connections[0..self.connections_end]) |*one| {
                if (one.fd >= 0) self.look(one);
            }
        }

        fn setLocked(self: *Self, one: *Connection, locked: bool) void {
            if (one.locked == locked) return;
            one.locked = locked;
            if (locked) self.locked_count += 1 else self.locked_count -= 1;
        }

        /// Whether `tryLocked` is to be called soon.
        pub fn needsTries(self: *const Self) bool {
            return self.locked_count > 0;
        }

        /// Try again what could not be done for a lock. `tick` ends it after a while.
        pub fn tryLocked(self: *Self) void {
            if (self.locked_count == 0) return;
            for (self.connections[0..self.connections_end]) |*one| {
                if (one.fd >= 0 and one.locked) self.serve(one);
            }
        }

        /// Whether `tick` has anything to do.
        pub fn needsTicks(self: *const Self) bool {
            return self.count > 0 or self.paused;
        }

        /// Some time has passed.
        pub fn tick(self: *Self) void {
            for (self.connections[0..self.connections_end]) |*one| {
                if (one.fd < 0) continue;
                one.silent_ticks +|= 1;
                const patience: u32 = if (one.known and one.machine.isIdle())
                    limits.TCP_FORGOTTEN_TICKS
                else
                    limits.TCP_SILENCE_TICKS;
                if (one.silent_ticks < patience) continue;
                if (one.locked) self.despair(one) else self.end(one);
            }
            if (!self.paused) return;
            if (sys.epollAdd(self.epoll, self.listener, sys.IN, LISTENER) == 0) self.paused = false;
        }
    };
}
