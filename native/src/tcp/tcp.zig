//! The carrier tcp, in T2: both sides of it behind one descriptor. It is readable when there is something to do; `turn`
//! does it, and `wait` says how long T2 may sleep at most.
//!
//! Only T2 calls it, or who knows that T2 does not run.

const std = @import("std");
const client = @import("client.zig");
const limits = @import("../limits.zig");
const server = @import("server.zig");
const sys = @import("../system/sys.zig");

/// Both sides, given what the server asks of grants and the client of owners.
pub fn Tcp(comptime Grants: type, comptime Owners: type) type {
    return struct {
        const Self = @This();

        epoll: i32,
        server: server.Server(Grants),
        client: client.Client(Owners),
        tick_at: u64,
        look_at: u64,

        /// Returns 0 or -errno.
        pub fn init(self: *Self, grants: *Grants, owners: *Owners, epoch: u64) i32 {
            self.epoll = sys.epollCreate();
            if (self.epoll < 0) return self.epoll;
            self.server.init(grants, epoch, self.epoll);
            self.client.init(owners, self.epoll);
            self.tick_at = 0;
            self.look_at = 0;
            return 0;
        }

        /// Close everything. T2 has ended, or this is a forked child.
        pub fn closeFds(self: *Self) void {
            self.server.closeFds();
            self.client.closeFds();
            sys.closeAt(&self.epoll);
        }

        /// Milliseconds until `turn` is to be called although nothing has come; -1 = for ever.
        pub fn wait(self: *const Self, now_ns: u64) i32 {
            var at: u64 = std.math.maxInt(u64);
            if (self.server.needsTicks() or self.client.needsTicks()) at = self.tick_at;
            if (self.client.needsLooks()) at = @min(at, self.look_at);
            if (self.server.needsTries()) at = @min(at, now_ns + limits.LOCK_AGAIN_MS * 1_000_000);
            if (at == std.math.maxInt(u64)) return -1;
            const ms = (at -| now_ns + 999_999) / 1_000_000;
            return @intCast(@min(ms, limits.TCP_TICK_MS));
        }

        /// Do what there is to do.
        pub fn turn(self: *Self, now_ns: u64) void {
            var events: [limits.EVENTS_MAX]sys.Event = undefined;
            const n = sys.epollWait(self.epoll, &events, 0);
            for (events[0..n]) |event| {
                const data = event.data.u64;
                switch (data & 0xFF << 56) {
                    server.LISTENER => self.server.onListener(),
                    server.CONNECTION => self.server.onConnection(data, event.events),
                    client.STREAM => self.client.onStream(data),
                    else => unreachable, // we made the data ourselves
                }
            }
            self.server.tryLocked();
            if (now_ns >= self.look_at) {
                self.look_at = now_ns + limits.TCP_POLL_MS * 1_000_000;
                self.client.lookAgain();
            }
            if (now_ns < self.tick_at) return;
            // One tick, however late it is: no peer is to blame for a stop of this process.
            self.tick_at = now_ns + limits.TCP_TICK_MS * 1_000_000;
            self.server.tick();
            self.client.tick();
        }
    };
}
