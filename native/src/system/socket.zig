//! Sockets: bytes, and descriptors with credentials beside them. Results are the kernel's: negative is -errno.

const std = @import("std");
const linux = std.os.linux;
const sys = @import("sys.zig");

const big = sys.big;
const num = sys.num;
const res = sys.res;

const SOL_SOCKET = 1;
const SO_PASSCRED = 16;
const SCM_RIGHTS = 1;
const SCM_CREDENTIALS = 2;
const MSG_DONTWAIT = 0x40;
const MSG_NOSIGNAL = 0x4000;
const MSG_CMSG_CLOEXEC = 0x40000000;
const MSG_CTRUNC = 8;

/// Who sent a message, as the kernel saw it.
pub const Credentials = extern struct { pid: i32, uid: u32, gid: u32 };

const IoVector = extern struct { base: [*]u8, len: usize };

const MessageHeader = extern struct {
    name: usize = 0,
    name_len: u32 = 0,
    vectors: *IoVector,
    vectors_len: usize = 1,
    control: *anyopaque,
    control_len: usize,
    flags: u32 = 0,
};

const ControlHeader = extern struct { len: usize, level: i32, type: i32 };

/// Descriptors of one message.
pub const FDS_MAX = 3;

const Control = extern struct {
    rights: ControlHeader align(8),
    fds: [FDS_MAX + 1]i32, // one more than is used: control messages are aligned to 8 bytes
    creds: ControlHeader,
    who: Credentials,
    pad: u32 = 0,
};

comptime {
    std.debug.assert((16 + 4 * FDS_MAX + 7) / 8 * 8 == @offsetOf(Control, "creds"));
}

/// Have the kernel say who sent what comes over a unix socket.
pub fn passCredentials(fd: i32) i32 {
    var one: i32 = 1;
    return res(linux.syscall5(.setsockopt, num(fd), SOL_SOCKET, SO_PASSCRED, @intFromPtr(&one), 4));
}

/// Send `bytes` with three descriptors and our credentials over a unix socket.
pub fn sendWithRights(fd: i32, bytes: []const u8, fds: [FDS_MAX]i32) i32 {
    var control = Control{
        .rights = .{ .len = 16 + 4 * FDS_MAX, .level = SOL_SOCKET, .type = SCM_RIGHTS },
        .fds = .{ fds[0], fds[1], fds[2], 0 },
        .creds = .{ .len = 16 + @sizeOf(Credentials), .level = SOL_SOCKET, .type = SCM_CREDENTIALS },
        .who = .{ .pid = sys.getpid(), .uid = sys.geteuid(), .gid = @intCast(res(linux.syscall0(.getegid))) },
    };
    var vector = IoVector{ .base = @constCast(bytes.ptr), .len = bytes.len }; // only read from
    const message = MessageHeader{ .vectors = &vector, .control = &control, .control_len = @sizeOf(Control) };
    return res(linux.syscall3(.sendmsg, num(fd), @intFromPtr(&message), MSG_DONTWAIT | MSG_NOSIGNAL));
}

/// Send `bytes` with one descriptor over a unix socket.
pub fn sendDescriptor(fd: i32, bytes: []const u8, passed: i32) i32 {
    const Rights = extern struct { header: ControlHeader align(8), fd: i32, pad: u32 = 0 };
    var control = Rights{ .header = .{ .len = 16 + 4, .level = SOL_SOCKET, .type = SCM_RIGHTS }, .fd = passed };
    var vector = IoVector{ .base = @constCast(bytes.ptr), .len = bytes.len }; // only read from
    const message = MessageHeader{ .vectors = &vector, .control = &control, .control_len = @sizeOf(Rights) };
    return res(linux.syscall3(.sendmsg, num(fd), @intFromPtr(&message), MSG_DONTWAIT | MSG_NOSIGNAL));
}

/// What came beside the bytes of a message. The receiver owns the descriptors.
pub const Received = struct {
    n: i32 = 0,
    fds: [FDS_MAX]i32 = @splat(-1),
    fds_count: u32 = 0,
    who: ?Credentials = null,
    truncated: bool = false,
};

/// Receive at most `buffer.len` bytes with the descriptors and credentials beside them.
pub fn receiveWithRights(fd: i32, buffer: []u8) Received {
    var control: [128]u8 align(8) = undefined;
    var vector = IoVector{ .base = buffer.ptr, .len = buffer.len };
    var message = MessageHeader{ .vectors = &vector, .control = &control, .control_len = control.len };
    var got = Received{};
    got.n = res(linux.syscall3(.recvmsg, num(fd), @intFromPtr(&message), MSG_DONTWAIT | MSG_CMSG_CLOEXEC));
    if (got.n < 0) return got;
    got.truncated = (message.flags & MSG_CTRUNC) != 0;
    var at: usize = 0;
    while (at + @sizeOf(ControlHeader) <= message.control_len) {
        const header: *const ControlHeader = @ptrCast(@alignCast(&control[at]));
        if (header.len < @sizeOf(ControlHeader) or at + header.len > message.control_len) break;
        const data = control[at + @sizeOf(ControlHeader) .. at + header.len];
        if (header.level == SOL_SOCKET and header.type == SCM_RIGHTS) {
            takeFds(&got, data);
        } else if (header.level == SOL_SOCKET and header.type == SCM_CREDENTIALS and data.len >= 12) {
            got.who = std.mem.bytesToValue(Credentials, data[0..12]);
        }
        at += std.mem.alignForward(usize, header.len, 8);
    }
    return got;
}

fn takeFds(got: *Received, data: []const u8) void {
    var at: usize = 0;
    while (at + 4 <= data.len) : (at += 4) {
        const fd = std.mem.bytesToValue(i32, data[at..][0..4]);
        if (got.fds_count < FDS_MAX) {
            got.fds[got.fds_count] = fd;
        } else {
            sys.close(fd); // more than the protocol ever sends: a broken peer must not fill our table
            got.truncated = true;
        }
        got.fds_count +|= 1;
    }
}

/// The I/O of a pump.
pub const Stream = struct {
    fd: i32,

    /// Bytes read; 0 = end of stream, negative = -errno.
    pub fn read(self: Stream, buffer: []u8) i64 {
        return retry(receive(self.fd, buffer));
    }

    /// Bytes written, or -errno.
    pub fn write(self: Stream, bytes: []const u8) i64 {
        return retry(send(self.fd, bytes));
    }

    /// A stop and continue interrupts system calls even where signals are blocked.
    fn retry(rc: i64) i64 {
        return if (rc == -sys.EINTR) -sys.EAGAIN else rc;
    }
};

/// Read what is there. 0 = end of stream.
pub fn receive(fd: i32, buffer: []u8) i64 {
    return big(linux.syscall6(.recvfrom, num(fd), @intFromPtr(buffer.ptr), buffer.len, MSG_DONTWAIT, 0, 0));
}

/// Return how many bytes there are to read.
pub fn readable(fd: i32) usize {
    const FIONREAD = 0x541B;
    var bytes: i32 = 0;
    return if (res(linux.syscall3(.ioctl, num(fd), FIONREAD, @intFromPtr(&bytes))) < 0) 0 else @intCast(bytes);
}

/// Write what fits.
pub fn send(fd: i32, bytes: []const u8) i64 {
    const flags = MSG_DONTWAIT | MSG_NOSIGNAL;
    return big(linux.syscall6(.sendto, num(fd), @intFromPtr(bytes.ptr), bytes.len, flags, 0, 0));
}

/// Say that nothing more will be sent.
pub fn shutdownWrite(fd: i32) void {
    _ = linux.syscall2(.shutdown, num(fd), 1);
}

/// Turn Nagle's delay off; other socket families refuse, which is fine.
pub fn setNoDelay(fd: i32) void {
    const IPPROTO_TCP = 6;
    const TCP_NODELAY = 1;
    var one: i32 = 1;
    _ = linux.syscall5(.setsockopt, num(fd), IPPROTO_TCP, TCP_NODELAY, @intFromPtr(&one), 4);
}

/// Take no more bytes than this before any of them has left; other socket families refuse, which is fine.
pub fn setUnsentMax(fd: i32, bytes: i32) void {
    const IPPROTO_TCP = 6;
    const TCP_NOTSENT_LOWAT = 25;
    _ = linux.syscall5(.setsockopt, num(fd), IPPROTO_TCP, TCP_NOTSENT_LOWAT, @intFromPtr(&bytes), 4);
}

/// A connected pair, for tests.
pub fn socketPair() [2]i32 {
    var fds: [2]i32 = undefined;
    const AF_UNIX = 1;
    const SOCK_STREAM_CLOEXEC = 0o2000001;
    const rc = res(linux.syscall4(.socketpair, AF_UNIX, SOCK_STREAM_CLOEXEC, 0, @intFromPtr(&fds)));
    std.debug.assert(rc == 0);
    return fds;
}

test "rights and credentials travel with the bytes" {
    const pair = socketPair();
    defer for (pair) |fd| sys.close(fd);
    try std.testing.expectEqual(0, passCredentials(pair[1]));
    const fd = sys.eventfd();
    defer sys.close(fd);

    try std.testing.expectEqual(5, sendWithRights(pair[0], "hello", .{ fd, fd, fd }));
    var buffer: [8]u8 = undefined;
    const got = receiveWithRights(pair[1], &buffer);

    try std.testing.expectEqual(5, got.n);
    try std.testing.expectEqual(3, got.fds_count);
    try std.testing.expectEqual(sys.getpid(), got.who.?.pid);
    for (got.fds) |one| sys.close(one);
}
