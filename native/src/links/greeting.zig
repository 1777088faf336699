//! How two processes of one host meet over a connected unix socket: each sends a hello, and beside it the memory that
//! it reads from (its inbound ring), the page of its bell, and the bell itself. Nothing that comes is believed before
//! it is checked: who sent it (the kernel says), sizes and seals of the memory.

const std = @import("std");
const bell = @import("../rings/bell.zig");
const frame = @import("../protocol/frame.zig");
const ring = @import("../rings/ring.zig");
const socket = @import("../system/socket.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

/// What `Inbox.receive` says when the kernel could not give a descriptor.
pub const NO_DESCRIPTOR = "a hello for which this process has no descriptor left (see ulimit -n)";

/// Make an inbound ring and tell the peer of it. Returns a status.
pub fn send(fd: i32, hello: frame.Hello, epoch: u64, page_fd: i32, bell_fd: i32, ring_out: *ring.Map) i32 {
    const rc = socket.passCredentials(fd);
    if (rc < 0) return status.ofErrno(rc);
    const ring_fd = sys.memfd("trimesh-ring", ring.Map.fileBytes(hello.ring_bytes));
    if (ring_fd < 0) return status.ofErrno(ring_fd);
    defer sys.close(ring_fd);
    var map = ring.Map.init(ring_fd, hello.ring_bytes) orelse return status.ofErrno(-sys.ENOMEM);
    var bytes: [frame.Hello.FRAME_BYTES]u8 = undefined;
    hello.encodeFrame(epoch, &bytes);
    const sent = socket.sendWithRights(fd, &bytes, .{ ring_fd, page_fd, bell_fd });
    // A socket whose peer is gone takes nothing; that is found out, and reported, as for any other link.
    if (sent == bytes.len or sent == -sys.EPIPE or sent == -sys.ECONNRESET) {
        ring_out.* = map;
        return status.OK;
    }
    map.deinit();
    return status.ofErrno(if (sent < 0) sent else -sys.EAGAIN);
}

/// A peer's hello on its way in. It comes in one piece unless the peer means ill; parts are put together here.
pub const Inbox = struct {
    bytes: [frame.Hello.FRAME_BYTES]u8 = undefined,
    have: u32 = 0,
    fds: [socket.FDS_MAX]i32 = @splat(-1),
    who: ?socket.Credentials = null,
    /// Why a step failed; completes "the peer sent".
    problem: []const u8 = "",

    const Error = error{Refused};

    fn refuse(self: *Inbox, problem: []const u8) Error {
        self.problem = problem;
        return error.Refused;
    }

    /// Read what is there. True: the hello is complete.
    pub fn receive(self: *Inbox, fd: i32) Error!bool {
        while (self.have < self.bytes.len) { // bounded: each turn reads a byte at least
            const got = socket.receiveWithRights(fd, self.bytes[self.have..]);
            if (got.truncated and got.fds_count < socket.FDS_MAX) { // the kernel could not install them all here
                for (got.fds) |one| sys.close(one);
                return self.refuse(NO_DESCRIPTOR);
            }
            if (got.fds_count > 0) {
                if (got.truncated or got.fds_count != socket.FDS_MAX or self.fds[0] >= 0) {
                    for (got.fds) |one| sys.close(one);
                    return self.refuse("a hello with the wrong number of descriptors");
                }
                self.fds = got.fds;
            }
            if (got.who) |who| self.who = who;
            if (got.n <= 0) return false; // nothing yet; the end of the stream is T1's to report
            self.have += @intCast(got.n);
        }
        return true;
    }

    /// The process that the kernel says sent it; it must be of our user.
    pub fn sender(self: *Inbox) Error!u32 {
        const who = self.who orelse return self.refuse("a hello without credentials");
        if (who.uid != sys.geteuid()) return self.refuse("a hello of another user");
        return @intCast(@max(0, who.pid));
    }

    pub const Adopted = struct { ring: ring.Map, bell: bell.Bell };

    /// Map what came with a complete hello. The bell's descriptor and page are the caller's afterwards.
    pub fn adopt(self: *Inbox, ring_bytes: u32) Error!Adopted {
        const ring_fd = self.fds[0];
        const page_fd = self.fds[1];
        const bell_fd = self.fds[2];
        if (ring_fd < 0 or !sys.memfdIsSound(ring_fd, ring.Map.fileBytes(ring_bytes)) or
            !sys.memfdIsSound(page_fd, bell.PAGE_BYTES))
        {
            return self.refuse("a hello whose shared memory is not what it should be");
        }
        // Writing to anything else could make T0 wait.
        if (!sys.isEventfd(bell_fd) or sys.setNonblocking(bell_fd) < 0)
            return self.refuse("a hello whose bell is not what it should be");
        var map = ring.Map.init(ring_fd, ring_bytes) orelse return self.refuse("memory that cannot be mapped here");
        const page = sys.mapShared(page_fd, bell.PAGE_BYTES) orelse {
            map.deinit();
            return self.refuse("memory that cannot be mapped here");
        };
        const adopted = Adopted{ .ring = map, .bell = .{ .page = @ptrCast(page), .fd = bell_fd } };
        self.fds[2] = -1;
        self.closeFds();
        return adopted;
    }

    /// Close what was not adopted.
    pub fn closeFds(self: *Inbox) void {
        for (&self.fds) |*fd| sys.closeAt(fd);
    }
};

test "a hello that comes in two parts is put together" {
    const pair = socket.socketPair();
    defer for (pair) |fd| sys.close(fd);
    _ = socket.passCredentials(pair[1]);
    const hello = frame.Hello{ .slot = 1, .pid = 2, .ring_bytes = 1 << 18, .host = 3, .beat_ms = 4, .lease_ms = 5 };
    var bytes: [frame.Hello.FRAME_BYTES]u8 = undefined;
    hello.encodeFrame(9, &bytes);
    var inbox = Inbox{};
    defer inbox.closeFds();

    try std.testing.expect(!try inbox.receive(pair[1]));
    const fd = sys.eventfd();
    defer sys.close(fd);
    _ = socket.sendWithRights(pair[0], bytes[0..5], .{ fd, fd, fd });
    try std.testing.expect(!try inbox.receive(pair[1]));
    _ = socket.send(pair[0], bytes[5..]);

    try std.testing.expect(try inbox.receive(pair[1]));
    try std.testing.expectEqualSlices(u8, &bytes, &inbox.bytes);
    try std.testing.expectEqual(@as(u32, @intCast(sys.getpid())), try inbox.sender());
    try std.testing.expectError(error.Refused, inbox.adopt(1 << 18)); // eventfds are no memory
}
