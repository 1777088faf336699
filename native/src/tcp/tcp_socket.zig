//! TCP sockets: listening, connecting, and parts of two buffers in one call. Results are the kernel's: negative is
//! -errno. Bytes are read and written by system/socket.zig.

const std = @import("std");
const linux = std.os.linux;
const limits = @import("../limits.zig");
const socket = @import("../system/socket.zig");
const sys = @import("../system/sys.zig");

const big = sys.big;
const num = sys.num;
const res = sys.res;

const AF_INET = 2;
const AF_INET6 = 10;
const SOCK_STREAM_CLOEXEC_NONBLOCK = 0o2004001;
const SOL_SOCKET = 1;
const SO_ERROR = 4;
const SO_SNDBUF = 7;
const SO_RCVBUF = 8;
const SO_LINGER = 13;
const MSG_DONTWAIT = 0x40;
const MSG_NOSIGNAL = 0x4000;
const MSG_MORE = 0x8000;

pub const ECONNREFUSED = 111;
pub const EINPROGRESS = 115;

/// Where a process listens.
pub const Address = struct {
    /// In network order; 4 of them or 16.
    bytes: [16]u8,
    size: u32,
    port: u16,
};

/// As the kernel takes it: sockaddr_in or sockaddr_in6.
const Name = struct {
    bytes: [28]u8,
    len: u32,

    fn of(address: Address) Name {
        var name = Name{ .bytes = @splat(0), .len = if (address.size == 4) 16 else 28 };
        std.mem.writeInt(u16, name.bytes[0..2], if (address.size == 4) AF_INET else AF_INET6, .little);
        std.mem.writeInt(u16, name.bytes[2..4], address.port, .big);
        if (address.size == 4) {
            name.bytes[4..8].* = address.bytes[0..4].*;
        } else {
            std.debug.assert(address.size == 16);
            name.bytes[8..24].* = address.bytes;
        }
        return name;
    }
};

fn open(address: Address) i32 {
    const family: usize = if (address.size == 4) AF_INET else AF_INET6;
    const fd = res(linux.syscall3(.socket, family, SOCK_STREAM_CLOEXEC_NONBLOCK, 0));
    if (fd < 0) return fd;
    // Before the connection is made: the window that the two ends agree upon depends on it.
    setBuffers(fd, limits.TCP_SOCKET_BYTES);
    socket.setNoDelay(fd);
    return fd;
}

/// The size of the kernel's two buffers.
pub fn setBuffers(fd: i32, bytes: i32) void {
    for ([_]usize{ SO_SNDBUF, SO_RCVBUF }) |option| {
        _ = linux.syscall5(.setsockopt, num(fd), SOL_SOCKET, option, @intFromPtr(&bytes), 4);
    }
}

/// Listen at an address; the kernel chooses the port, which is written there.
pub fn listen(address: *Address) i32 {
    var name = Name.of(address.*);
    const fd = open(address.*);
    if (fd < 0) return fd;
    var rc = res(linux.syscall3(.bind, num(fd), @intFromPtr(&name.bytes), name.len));
    if (rc >= 0) rc = res(linux.syscall2(.listen, num(fd), limits.TCP_BACKLOG));
    if (rc >= 0) rc = res(linux.syscall3(.getsockname, num(fd), @intFromPtr(&name.bytes), @intFromPtr(&name.len)));
    if (rc < 0) {
        sys.close(fd);
        return rc;
    }
    address.port = std.mem.readInt(u16, name.bytes[2..4], .big);
    return fd;
}

/// Take a connection that waits. It has the buffers of the listening socket.
pub fn accept(fd: i32) i32 {
    const SOCK_CLOEXEC_NONBLOCK = 0o2004000;
    const rc = res(linux.syscall4(.accept4, num(fd), 0, 0, SOCK_CLOEXEC_NONBLOCK));
    if (rc >= 0) socket.setNoDelay(rc);
    return rc;
}

/// Begin to connect. When the socket is writable, `outcome` says how it went.
pub fn connect(address: Address) i32 {
    const name = Name.of(address);
    const fd = open(address);
    if (fd < 0) return fd;
    const rc = res(linux.syscall3(.connect, num(fd), @intFromPtr(&name.bytes), name.len));
    if (rc < 0 and rc != -EINPROGRESS and rc != -sys.EINTR) {
        sys.close(fd);
        return rc;
    }
    return fd;
}

/// Close a connection so that nothing of what was sent and has not arrived arrives later.
pub fn abort(fd: *i32) void {
    const seconds = [2]i32{ 1, 0 }; // do linger, for no time
    _ = linux.syscall5(.setsockopt, num(fd.*), SOL_SOCKET, SO_LINGER, @intFromPtr(&seconds), 8);
    sys.closeAt(fd);
}

/// Why a socket has failed, as -errno; 0: it has not.
pub fn outcome(fd: i32) i32 {
    var code: i32 = 0;
    var size: u32 = 4;
    const rc = res(linux.syscall5(.getsockopt, num(fd), SOL_SOCKET, SO_ERROR, @intFromPtr(&code), @intFromPtr(&size)));
    return if (rc < 0) rc else -code;
}

const Vector = extern struct { base: [*]const u8, len: usize };

const MessageHeader = extern struct {
    name: usize = 0,
    name_len: u32 = 0,
    vectors: *const [2]Vector,
    vectors_len: usize = 2,
    control: usize = 0,
    control_len: usize = 0,
    flags: u32 = 0,
};

/// Send what fits of two pieces. `more`: there is going to be another, wait for it before a packet leaves.
pub fn send(fd: i32, head: []const u8, body: []const u8, more: bool) i64 {
    const vectors = [2]Vector{ .{ .base = head.ptr, .len = head.len }, .{ .base = body.ptr, .len = body.len } };
    const message = MessageHeader{ .vectors = &vectors };
    const flags = MSG_DONTWAIT | MSG_NOSIGNAL | @as(usize, if (more) MSG_MORE else 0);
    const rc = big(linux.syscall3(.sendmsg, num(fd), @intFromPtr(&message), flags));
    return if (rc == -sys.EINTR) -sys.EAGAIN else rc;
}

/// Read what is there. 0 = end of stream.
pub fn receive(fd: i32, into: []u8) i64 {
    return (socket.Stream{ .fd = fd }).read(into);
}

test "both families listen and connect, and a closed port refuses" {
    const loopback4 = Address{ .bytes = .{ 127, 0, 0, 1 } ++ .{0} ** 12, .size = 4, .port = 0 };
    const loopback6 = Address{ .bytes = .{0} ** 15 ++ .{1}, .size = 16, .port = 0 };
    for ([_]Address{ loopback4, loopback6 }) |wanted| {
        var address = wanted;
        const listening = listen(&address);
        if (listening < 0 and wanted.size == 16) continue; // no IPv6 here
        try std.testing.expect(listening >= 0 and address.port != 0);

        const client = connect(address);
        defer sys.close(client);
        try waitFor(client, sys.OUT);
        try std.testing.expectEqual(0, outcome(client));
        const server = accept(listening);
        defer sys.close(server);
        try std.testing.expectEqual(5, send(client, "he", "llo", false));
        try waitFor(server, sys.IN);
        var buffer: [8]u8 = undefined;
        try std.testing.expectEqual(5, receive(server, &buffer));
        try std.testing.expectEqualStrings("hello", buffer[0..5]);

        sys.close(listening);
        const refused = connect(address);
        if (refused < 0) {
            try std.testing.expectEqual(-ECONNREFUSED, refused);
            continue;
        }
        defer sys.close(refused);
        try waitFor(refused, sys.ERR);
        try std.testing.expectEqual(-ECONNREFUSED, outcome(refused));
    }
}

fn waitFor(fd: i32, events: u32) !void {
    const epoll = sys.epollCreate();
    defer sys.close(epoll);
    _ = sys.epollAdd(epoll, fd, events, 0);
    var got: [1]sys.Event = undefined;
    try std.testing.expectEqual(1, sys.epollWait(epoll, &got, 5_000));
}
