//! The local end of one channel: a stream socket, and what has come for it and has no room in it yet.
//!
//! LK-1 What waits is no more than the channel's window, in order. LK-2 Whose socket is broken is read to its end all
//! the same; what comes for it is for nothing.

const std = @import("std");
const assert = std.debug.assert;
const limits = @import("../limits.zig");
const socket = @import("../system/socket.zig");
const sys = @import("../system/sys.zig");

const ENDLESS = std.math.maxInt(usize);

pub const Local = struct {
    fd: i32 = -1,
    is_writable: bool = false,
    is_broken: bool = false,
    /// The peer sends no more, and the socket has been told so.
    is_shut: bool = false,
    /// The owner has heard of it, and has not answered yet.
    is_asked: bool = false,
    /// Bytes that may still be read; set when the session is being closed, however much is written meanwhile.
    left: usize = ENDLESS,
    memory: ?[*]align(4096) u8 = null,
    first: usize = 0,
    waiting: usize = 0,

    /// What is so between two calls: LK-1.
    fn check(self: *const Local) void {
        assert(self.first < limits.HOST_WINDOW_BYTES);
        assert(self.waiting <= limits.HOST_WINDOW_BYTES);
        assert(self.waiting == 0 or self.memory != null);
        assert(self.waiting > 0 or self.first == 0);
        assert(!self.is_shut or self.waiting == 0); // the end is said behind all that came
    }

    /// Read no more than is there now.
    pub fn readLast(self: *Local) void {
        self.left = socket.readable(self.fd);
    }

    /// Read into memory. Bytes read, 0 at the end, or -errno.
    pub fn read(self: *Local, to: []u8) i64 {
        assert(to.len > 0); // of no bytes the system says that the end has come
        if (self.left == 0) return -sys.EAGAIN;
        const n = socket.receive(self.fd, to[0..@min(to.len, self.left)]);
        if (n > 0 and self.left != ENDLESS) self.left -= @intCast(n);
        return n;
    }

    /// Deliver bytes. How many were taken now; the others wait. Null: there is no memory for them.
    pub fn deliver(self: *Local, bytes: []const u8) ?usize {
        self.check();
        assert(!self.is_shut);
        var taken: usize = 0;
        if (self.waiting == 0) taken = self.write(bytes);
        return if (self.keep(bytes[taken..])) taken else null;
    }

    /// Write what waits. How many bytes were taken.
    pub fn flush(self: *Local) usize {
        var taken: usize = 0;
        while (self.waiting > 0) {
            const piece = @min(self.waiting, limits.HOST_WINDOW_BYTES - self.first);
            assert(piece > 0);
            const n = self.write(self.memory.?[self.first..][0..piece]);
            assert(n <= piece);
            if (n == 0) break;
            taken += n;
            self.waiting -= n;
            self.first = if (self.waiting == 0) 0 else (self.first + n) % limits.HOST_WINDOW_BYTES;
        }
        self.check();
        return taken;
    }

    fn write(self: *Local, bytes: []const u8) usize {
        if (self.is_broken) return bytes.len;
        var taken: usize = 0;
        while (self.is_writable and taken < bytes.len) {
            const n = socket.send(self.fd, bytes[taken..]);
            if (n == -sys.EINTR) continue;
            if (n == -sys.EAGAIN) {
                self.is_writable = false;
            } else if (n < 0) {
                self.is_broken = true;
                return bytes.len;
            } else taken += @intCast(n);
        }
        return taken;
    }

    fn keep(self: *Local, bytes: []const u8) bool {
        if (bytes.len == 0) return true;
        if (self.memory == null) self.memory = sys.mapPrivate(limits.HOST_WINDOW_BYTES) orelse return false;
        assert(self.waiting + bytes.len <= limits.HOST_WINDOW_BYTES); // LK-1
        const at = (self.first + self.waiting) % limits.HOST_WINDOW_BYTES;
        const piece = @min(bytes.len, limits.HOST_WINDOW_BYTES - at);
        @memcpy(self.memory.?[at..][0..piece], bytes[0..piece]);
        @memcpy(self.memory.?[0 .. bytes.len - piece], bytes[piece..]);
        self.waiting += bytes.len;
        self.check();
        return true;
    }

    /// The peer sends no more: say so, behind all that came. Whether that was done.
    pub fn shut(self: *Local) bool {
        if (self.waiting > 0 or (self.fd < 0 and !self.is_broken)) return false;
        if (!self.is_shut and self.fd >= 0) socket.shutdownWrite(self.fd);
        self.is_shut = true;
        return true;
    }

    /// Close the socket, and forget what waits.
    pub fn close(self: *Local, epoll: i32) void {
        if (self.fd >= 0) sys.epollRemove(epoll, self.fd); // others may hold the same socket
        sys.closeAt(&self.fd);
        if (self.memory) |pages| sys.unmap(pages, limits.HOST_WINDOW_BYTES);
        self.* = .{};
    }
};

test "what has no room waits, and leaves in order" {
    const pair = socket.socketPair();
    defer sys.close(pair[1]);
    var one = Local{ .fd = pair[0], .is_writable = true };
    defer one.close(-1);
    const bytes = try std.testing.allocator.alloc(u8, limits.HOST_WINDOW_BYTES);
    defer std.testing.allocator.free(bytes);
    var sent: u64 = 0;
    var got: u64 = 0;
    var window: u64 = 0; // taken by the socket
    var random = std.Random.DefaultPrng.init(3);
    for (0..400) |_| {
        const n: usize = @intCast(random.random().uintAtMost(u64, limits.HOST_WINDOW_BYTES - (sent - window)));
        for (bytes[0..n], 0..) |*byte, i| byte.* = @truncate((sent + i) * 7 / 3);
        window += one.deliver(bytes[0..n]).?;
        sent += n;
        for (0..random.random().uintLessThan(u8, 4)) |_| {
            const m = socket.receive(pair[1], bytes[0 .. random.random().uintAtMost(u16, 65_534) + 1]);
            if (m < 0) break;
            for (bytes[0..@intCast(m)], 0..) |byte, i| {
                try std.testing.expectEqual(@as(u8, @truncate((got + i) * 7 / 3)), byte);
            }
            got += @intCast(m);
        }
        one.is_writable = true;
        window += one.flush();
        try std.testing.expectEqual(sent - window, one.waiting);
    }
    try std.testing.expect(got > 0);
    one.is_broken = true; // LK-2
    _ = one.flush();
    try std.testing.expectEqual(0, one.waiting);
}

test "what is written after the last look is not read" {
    const pair = socket.socketPair();
    defer sys.close(pair[1]);
    var one = Local{ .fd = pair[0], .is_writable = true };
    defer one.close(-1);
    var to: [8]u8 = undefined;
    try std.testing.expectEqual(5, socket.send(pair[1], "12345"));
    try std.testing.expectEqual(2, one.read(to[0..2]));
    one.readLast();
    try std.testing.expectEqual(3, socket.send(pair[1], "678"));
    try std.testing.expectEqual(3, one.read(&to));
    try std.testing.expectEqualSlices(u8, "345", to[0..3]);
    try std.testing.expectEqual(-sys.EAGAIN, one.read(&to));
}
