//! One connection of a session of hosts: a socket, the TLS session over it, and the bytes on their way through both.
//!
//! CN-1 Plain bytes are encrypted where they lie and decrypted to where frames are read from; nothing is copied
//! besides. CN-2 What waits is bounded by limit HOST_WIRE_BYTES each way and two frames. CN-3 After the first problem,
//! which has words, nothing is read any more.

const std = @import("std");
const assert = std.debug.assert;
const frames = @import("frame.zig");
const limits = @import("../limits.zig");
const session = @import("../tls/session.zig");
const socket = @import("../system/socket.zig");
const sys = @import("../system/sys.zig");
const Held = @import("../tls/tls.zig").Held;

/// Room for a frame that has not come as a whole, and for one more.
pub const PLAIN_BYTES = 2 * frames.BYTES_MAX;

/// All zeros but for `fd` is none.
pub const Connection = struct {
    fd: i32,
    /// Null: bytes pass as they are; a test's.
    tls: ?*Held,
    is_readable: bool,
    is_writable: bool,
    /// Something was read, made or written in the last round.
    has_moved: bool,
    in_first: usize,
    in_last: usize,
    out_first: usize,
    out_last: usize,
    plain_first: usize,
    plain_last: usize,
    problem_bytes: usize,
    problem: [limits.DETAIL_BYTES]u8,
    wire_in: [limits.HOST_WIRE_BYTES]u8,
    wire_out: [limits.HOST_WIRE_BYTES]u8,
    plain: [PLAIN_BYTES]u8,

    /// Begin with a socket and an open session, which are taken over, and with what has come already.
    pub fn open(self: *Connection, fd: i32, tls: ?*Held, wire: []const u8, plain: []const u8) void {
        assert(self.fd < 0);
        assert(fd >= 0);
        assert(wire.len <= self.wire_in.len);
        assert(plain.len <= self.plain.len);
        socket.setNoDelay(fd);
        socket.setUnsentMax(fd, limits.HOST_UNSENT_BYTES);
        self.fd = fd;
        self.tls = tls;
        self.is_readable = true;
        self.is_writable = true;
        self.out_first = 0;
        self.out_last = 0;
        self.in_first = 0;
        self.in_last = wire.len;
        self.plain_first = 0;
        self.plain_last = plain.len;
        self.problem_bytes = 0;
        @memcpy(self.wire_in[0..wire.len], wire);
        @memcpy(self.plain[0..plain.len], plain);
        self.check();
    }

    /// What is so between two calls: CN-2.
    fn check(self: *const Connection) void {
        assert(self.in_first <= self.in_last);
        assert(self.in_last <= self.wire_in.len);
        assert(self.out_first <= self.out_last);
        assert(self.out_last <= self.wire_out.len);
        assert(self.plain_first <= self.plain_last);
        assert(self.plain_last <= self.plain.len);
        assert(self.problem_bytes <= self.problem.len);
    }

    /// Close the socket, and forget the session and its keys.
    pub fn close(self: *Connection, epoll: i32) void {
        if (self.fd < 0) return;
        sys.epollRemove(epoll, self.fd);
        sys.closeAt(&self.fd);
        if (self.tls) |held| held.release();
        self.tls = null;
    }

    /// Why nothing comes any more; "" = it does.
    pub fn why(self: *const Connection) []const u8 {
        return self.problem[0..self.problem_bytes];
    }

    fn fail(self: *Connection, words: []const u8) void {
        assert(words.len > 0); // "" would say that there is no problem
        if (self.problem_bytes > 0) return; // CN-3
        self.problem_bytes = @min(words.len, self.problem.len);
        @memcpy(self.problem[0..self.problem_bytes], words[0..self.problem_bytes]);
    }

    fn failBy(self: *Connection, errno: i64) void {
        assert(errno < 0);
        var text: [64]u8 = undefined;
        self.fail(switch (-errno) {
            sys.ECONNRESET => "the connection was reset",
            sys.EPIPE => "the connection is broken",
            else => |number| std.fmt.bufPrint(&text, "the connection has failed with error {d}", .{number}) catch
                unreachable, // 64 bytes hold it
        });
    }

    /// Plain bytes that have come.
    pub fn received(self: *const Connection) []const u8 {
        return self.plain[self.plain_first..self.plain_last];
    }

    /// So many of them were read.
    pub fn consume(self: *Connection, bytes: usize) void {
        assert(bytes <= self.plain_last - self.plain_first);
        self.plain_first += bytes;
    }

    /// Whether all that was encrypted has left.
    pub fn isFlushed(self: *const Connection) bool {
        return self.out_first == self.out_last;
    }

    /// Read what has come, encrypt `out`, write. How much of `out` was taken.
    pub fn round(self: *Connection, out: []const u8, may_read: bool) usize {
        assert(self.fd >= 0);
        self.check();
        self.has_moved = false;
        if (may_read) self.read();
        const taken = self.convert(out);
        assert(taken <= out.len);
        self.write();
        self.check();
        return taken;
    }

    fn read(self: *Connection) void {
        if (self.in_first > 0) {
            const rest = self.in_last - self.in_first;
            @memmove(self.wire_in[0..rest], self.wire_in[self.in_first..self.in_last]);
            self.in_first = 0;
            self.in_last = rest;
        }
        if (!self.is_readable or self.in_last == self.wire_in.len) return;
        const n = socket.receive(self.fd, self.wire_in[self.in_last..]);
        if (n == -sys.EINTR) {
            self.has_moved = true; // once more
        } else if (n == -sys.EAGAIN) {
            self.is_readable = false;
        } else if (n < 0) {
            self.is_readable = false;
            self.failBy(n);
        } else if (n == 0) {
            self.is_readable = false;
            self.fail("the peer has closed the connection");
        } else {
            self.in_last += @intCast(n);
            self.has_moved = true;
        }
    }

    fn convert(self: *Connection, out: []const u8) usize {
        if (self.plain_first > 0) {
            const rest = self.plain_last - self.plain_first;
            @memmove(self.plain[0..rest], self.plain[self.plain_first..self.plain_last]);
            self.plain_first = 0;
            self.plain_last = rest;
        }
        if (self.out_first == self.out_last) {
            self.out_first = 0;
            self.out_last = 0;
        }
        const wire_in = self.wire_in[self.in_first..self.in_last];
        const wire_out = self.wire_out[self.out_last..];
        const plain = self.plain[self.plain_last..];
        var io = session.Io{
            .wire_in = wire_in.ptr,
            .wire_in_size = wire_in.len,
            .wire_out = wire_out.ptr,
            .wire_out_size = wire_out.len,
            .plain_in = out.ptr,
            .plain_in_size = out.len,
            .plain_out = plain.ptr,
            .plain_out_size = plain.len,
        };
        if (self.tls) |held| {
            held.session.step(&io);
            if (held.session.state == .failed) {
                self.fail(std.mem.sliceTo(&held.session.detail, 0));
            } else if (held.session.state != .open) self.fail("the peer has closed the connection");
        } else pass(&io, wire_in, wire_out, out, plain);
        assert(io.wire_taken <= wire_in.len);
        assert(io.wire_made <= wire_out.len);
        assert(io.plain_made <= plain.len);
        self.in_first += @intCast(io.wire_taken);
        self.out_last += @intCast(io.wire_made);
        self.plain_last += @intCast(io.plain_made);
        if (io.wire_taken + io.wire_made + io.plain_taken + io.plain_made > 0) self.has_moved = true;
        return @intCast(io.plain_taken);
    }

    fn pass(io: *session.Io, wire_in: []const u8, wire_out: []u8, plain_in: []const u8, plain_out: []u8) void {
        io.wire_taken = @min(wire_in.len, plain_out.len);
        io.plain_made = io.wire_taken;
        @memcpy(plain_out[0..io.plain_made], wire_in[0..io.wire_taken]);
        io.plain_taken = @min(plain_in.len, wire_out.len);
        io.wire_made = io.plain_taken;
        @memcpy(wire_out[0..io.wire_made], plain_in[0..io.plain_taken]);
    }

    fn write(self: *Connection) void {
        while (self.is_writable and self.out_first < self.out_last) {
            const n = socket.send(self.fd, self.wire_out[self.out_first..self.out_last]);
            if (n == -sys.EINTR) continue;
            if (n == -sys.EAGAIN) {
                self.is_writable = false;
            } else if (n < 0) {
                self.is_writable = false;
                // What the peer sent before it went away is still to be read; its end is seen there.
                if (!self.is_readable) self.failBy(n);
            } else {
                self.out_first += @intCast(n);
                self.has_moved = true;
            }
        }
    }
};
