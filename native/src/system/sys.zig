//! The operating system, apart from sockets (socket.zig) and other processes (process.zig): raw Linux calls with the
//! kernel's own numbers, the same on x86_64 and aarch64, and a few functions of libc. std.posix, std.Io and std.net
//! change with every release of Zig; these do not. No other file makes a call.
//!
//! Results are the kernel's: negative is -errno.

const std = @import("std");
const builtin = @import("builtin");
const linux = std.os.linux;
const limits = @import("../limits.zig");

comptime {
    if (builtin.os.tag != .linux) @compileError("trimesh runs on Linux only");
    if (builtin.cpu.arch != .x86_64 and builtin.cpu.arch != .aarch64)
        @compileError("trimesh runs on x86_64 and aarch64 only");
}

pub const EAGAIN = 11;
pub const EINTR = 4;
pub const ENOMEM = 12;
pub const EINVAL = 22;
pub const ENFILE = 23;
pub const EMFILE = 24;
pub const EPIPE = 32;
pub const ECONNRESET = 104;

/// A descriptor, or another signed number, as an argument of a call.
pub fn num(fd: i32) usize {
    return @bitCast(@as(isize, fd));
}

/// The result of a call that fits 32 bits.
pub fn res(rc: usize) i32 {
    return @intCast(@as(isize, @bitCast(rc)));
}

/// The result of a call.
pub fn big(rc: usize) i64 {
    return @as(isize, @bitCast(rc));
}

// ---- descriptors ----

/// Close a descriptor; none (-1) is fine.
pub fn close(fd: i32) void {
    if (fd < 0) return;
    _ = linux.syscall1(.close, num(fd)); // an error here has no remedy, and Linux frees the number in any case
}

/// Close and forget.
pub fn closeAt(fd: *i32) void {
    close(fd.*);
    fd.* = -1;
}

const F_DUPFD_CLOEXEC = 1030;
const F_GETFL = 3;
const F_SETFL = 4;
const O_NONBLOCK = 0o4000;

/// A second descriptor of the same file.
pub fn duplicate(fd: i32) i32 {
    return res(linux.syscall3(.fcntl, num(fd), F_DUPFD_CLOEXEC, 0));
}

/// Have calls on a descriptor return instead of wait.
pub fn setNonblocking(fd: i32) i32 {
    const flags = res(linux.syscall3(.fcntl, num(fd), F_GETFL, 0));
    if (flags < 0) return flags;
    return res(linux.syscall3(.fcntl, num(fd), F_SETFL, @intCast(flags | O_NONBLOCK)));
}

/// A new eventfd that does not block.
pub fn eventfd() i32 {
    const EFD_CLOEXEC = 0o2000000;
    return res(linux.syscall2(.eventfd2, 0, EFD_CLOEXEC | O_NONBLOCK));
}

/// Whether a descriptor that a peer sent is an eventfd. Without /proc there is no telling.
pub fn isEventfd(fd: i32) bool {
    const expected = "anon_inode:[eventfd]";
    var path: [32]u8 = undefined;
    const name = std.fmt.bufPrintZ(&path, "/proc/self/fd/{d}", .{fd}) catch unreachable; // at most 26 bytes
    var target: [64]u8 = undefined;
    const AT_FDCWD: usize = @bitCast(@as(isize, -100));
    const n = res(linux.syscall4(.readlinkat, AT_FDCWD, @intFromPtr(name.ptr), @intFromPtr(&target), target.len));
    return n < 0 or std.mem.eql(u8, target[0..@intCast(n)], expected);
}

/// Make an eventfd readable. EAGAIN (it is full) means that it is readable already.
pub fn eventfdSignal(fd: i32) void {
    var one: u64 = 1;
    _ = linux.syscall3(.write, num(fd), @intFromPtr(&one), 8);
}

/// Make an eventfd, or a timerfd, unreadable.
pub fn eventfdClear(fd: i32) void {
    var count: u64 = 0;
    _ = linux.syscall3(.read, num(fd), @intFromPtr(&count), 8);
}

/// A periodic timer that counts its expirations; `ms` is at least 1.
pub fn timerfd(ms: u32) i32 {
    const CLOCK_MONOTONIC = 1;
    const TFD_CLOEXEC = 0o2000000;
    const fd = res(linux.syscall2(.timerfd_create, CLOCK_MONOTONIC, TFD_CLOEXEC | O_NONBLOCK));
    if (fd < 0) return fd;
    const seconds: i64 = ms / 1000;
    const nanoseconds: i64 = @as(i64, ms % 1000) * 1_000_000;
    const spec = [4]i64{ seconds, nanoseconds, seconds, nanoseconds };
    const rc = res(linux.syscall4(.timerfd_settime, num(fd), 0, @intFromPtr(&spec), 0));
    if (rc < 0) {
        close(fd);
        return rc;
    }
    return fd;
}

/// A timer that is not set.
pub fn oneShot() i32 {
    const CLOCK_MONOTONIC = 1;
    const TFD_CLOEXEC = 0o2000000;
    return res(linux.syscall2(.timerfd_create, CLOCK_MONOTONIC, TFD_CLOEXEC | O_NONBLOCK));
}

/// Have a timer fire once, at a time of `monotonicNs`; a time that has passed fires at once.
pub fn timerSet(fd: i32, at_ns: u64) void {
    const TFD_TIMER_ABSTIME = 1;
    const spec = [4]i64{ 0, 0, @intCast(at_ns / 1_000_000_000), @intCast(at_ns % 1_000_000_000) };
    const rc = res(linux.syscall4(.timerfd_settime, num(fd), TFD_TIMER_ABSTIME, @intFromPtr(&spec), 0));
    std.debug.assert(rc == 0); // only a wrong descriptor or pointer fails
}

/// The clock that all processes of this machine share and that is never set.
pub fn monotonicNs() u64 {
    const CLOCK_MONOTONIC = 1;
    var now: [2]i64 = undefined;
    const rc = clock_gettime(CLOCK_MONOTONIC, &now); // of libc, which needs no system call
    std.debug.assert(rc == 0); // only a wrong pointer fails
    return @as(u64, @intCast(now[0])) * 1_000_000_000 + @as(u64, @intCast(now[1]));
}

/// Wait. Only where nothing else can be waited for.
pub fn sleepMs(ms: u32) void {
    const time = [2]i64{ ms / 1000, @as(i64, ms % 1000) * 1_000_000 };
    _ = linux.syscall2(.nanosleep, @intFromPtr(&time), 0); // a signal may cut it short
}

// ---- shared memory ----

const F_ADD_SEALS = 1033;
const F_GET_SEALS = 1034;
const F_SEAL_SEAL = 1;
const F_SEAL_SHRINK = 2;
const F_SEAL_GROW = 4;
const SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW;

/// A memfd of exactly `bytes`, all of it allocated (no SIGBUS later for want of memory), its size sealed.
pub fn memfd(name: [*:0]const u8, bytes: u64) i32 {
    const MFD_CLOEXEC = 1;
    const MFD_ALLOW_SEALING = 2;
    const fd = res(linux.syscall2(.memfd_create, @intFromPtr(name), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd < 0) return fd;
    var rc = res(linux.syscall2(.ftruncate, num(fd), bytes));
    if (rc >= 0) rc = res(linux.syscall4(.fallocate, num(fd), 0, 0, bytes));
    if (rc >= 0) rc = res(linux.syscall3(.fcntl, num(fd), F_ADD_SEALS, SEALS));
    if (rc < 0) {
        close(fd);
        return rc;
    }
    return fd;
}

/// Whether a memfd has this size for good.
pub fn isSealed(fd: i32, bytes: u64) bool {
    const seals = res(linux.syscall3(.fcntl, num(fd), F_GET_SEALS, 0));
    if (seals < 0 or (seals & SEALS) != SEALS) return false;
    const SEEK_END = 2;
    return big(linux.syscall3(.lseek, num(fd), 0, SEEK_END)) == @as(i64, @intCast(bytes));
}

/// Whether a memfd that a peer sent is what `memfd` makes: our size, sealed. Its pages are allocated here if the peer
/// did not do it.
pub fn memfdIsSound(fd: i32, bytes: u64) bool {
    if (!isSealed(fd, bytes)) return false;
    return res(linux.syscall4(.fallocate, num(fd), 0, 0, bytes)) >= 0;
}

const PROT_READ = 1;
const PROT_READ_WRITE = 3;
const MAP_SHARED = 1;
const MAP_PRIVATE = 2;
const MAP_FIXED = 0x10;
const MAP_ANONYMOUS = 0x20;
const MAP_NORESERVE = 0x4000;
const MAP_POPULATE = 0x8000;
const MADV_DONTNEED = 4;
const MADV_DONTFORK = 10;
const MADV_WIPEONFORK = 18;
const MADV_POPULATE_WRITE = 23;

const Pages = [*]align(4096) u8;

fn map(address: usize, bytes: usize, protection: usize, flags: usize, fd: i32, offset: usize) i64 {
    return big(linux.syscall6(.mmap, address, bytes, protection, flags, num(fd), offset));
}

/// Give mapped pages back.
pub fn unmap(pages: Pages, bytes: usize) void {
    const rc = res(linux.syscall2(.munmap, @intFromPtr(pages), bytes));
    std.debug.assert(rc == 0); // only a wrong address or size fails
}

/// Zeroed memory of this process alone.
pub fn mapPrivate(bytes: usize) ?Pages {
    const rc = map(0, bytes, PROT_READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return if (rc < 0) null else @ptrFromInt(@as(usize, @intCast(rc)));
}

/// One page that a forked child finds zeroed, however it was forked.
pub fn mapWipedOnFork() ?Pages {
    const pages = mapPrivate(4096) orelse return null;
    if (res(linux.syscall3(.madvise, @intFromPtr(pages), 4096, MADV_WIPEONFORK)) < 0) {
        unmap(pages, 4096);
        return null;
    }
    return pages;
}

/// A shared mapping that forked children do not inherit.
pub fn mapShared(fd: i32, bytes: usize) ?Pages {
    const rc = map(0, bytes, PROT_READ_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (rc < 0) return null;
    const pages: Pages = @ptrFromInt(@as(usize, @intCast(rc)));
    if (res(linux.syscall3(.madvise, @intFromPtr(pages), bytes, MADV_DONTFORK)) < 0) {
        unmap(pages, bytes);
        return null;
    }
    return pages;
}

/// A shared mapping whose pages come when they are touched.
pub fn mapLazily(fd: i32, bytes: usize, offset: usize, writable: bool) ?Pages {
    const rc = map(0, bytes, if (writable) PROT_READ_WRITE else PROT_READ, MAP_SHARED, fd, offset);
    return if (rc < 0) null else @ptrFromInt(@as(usize, @intCast(rc)));
}

/// A shared mapping that forked children inherit, and share.
pub fn mapInherited(fd: i32, bytes: usize) ?Pages {
    const rc = map(0, bytes, PROT_READ_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    return if (rc < 0) null else @ptrFromInt(@as(usize, @intCast(rc)));
}

/// Have forked children not inherit a mapping.
pub fn keepFromChildren(pages: Pages, bytes: usize) bool {
    return res(linux.syscall3(.madvise, @intFromPtr(pages), bytes, MADV_DONTFORK)) >= 0;
}

/// Map `header` bytes and after them `data` bytes twice, so that a piece of data that runs over the end goes on at the
/// start without a seam. To be unmapped as header + 2 * data bytes.
pub fn mapSharedTwice(fd: i32, header: usize, data: usize) ?Pages {
    const total = header + 2 * data;
    const place = map(0, total, 0, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place < 0) return null;
    const base: usize = @intCast(place);
    const flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
    const ok = map(base, header + data, PROT_READ_WRITE, flags, fd, 0) >= 0 and
        map(base + header + data, data, PROT_READ_WRITE, flags, fd, header) >= 0 and
        res(linux.syscall3(.madvise, base, total, MADV_DONTFORK)) >= 0;
    const pages: Pages = @ptrFromInt(base);
    if (!ok) {
        unmap(pages, total);
        return null;
    }
    return pages;
}

/// A mapping of what others write to, of which this process may write a copy of its own.
pub fn mapCopy(fd: i32, bytes: usize) ?Pages {
    const rc = map(0, bytes, PROT_READ_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, 0);
    return if (rc < 0) null else @ptrFromInt(@as(usize, @intCast(rc)));
}

/// Throw away what was written into a `mapCopy`.
pub fn dropPrivate(pages: Pages, bytes: usize) void {
    const rc = res(linux.syscall3(.madvise, @intFromPtr(pages), bytes, MADV_DONTNEED));
    std.debug.assert(rc == 0); // only a wrong address or size fails
}

/// What the kernel knows of this process's pages, one word each.
pub fn openPagemap() i32 {
    const AT_FDCWD = -100;
    const O_CLOEXEC = 0o2000000;
    return res(linux.syscall4(.openat, num(AT_FDCWD), @intFromPtr("/proc/self/pagemap"), O_CLOEXEC, 0));
}

/// Read at an offset. The number of bytes, or -errno.
pub fn readAt(fd: i32, into: []u8, offset: usize) i64 {
    return big(linux.syscall4(.pread64, num(fd), @intFromPtr(into.ptr), into.len, offset));
}

/// Give every page of a `mapCopy` a copy of its own, as if it had been written to.
pub fn makePrivate(pages: Pages, bytes: usize) void {
    if (res(linux.syscall3(.madvise, @intFromPtr(pages), bytes, MADV_POPULATE_WRITE)) != -EINVAL) return;
    var at: usize = 0; // a kernel before 5.14
    while (at < bytes) : (at += 4096) _ = @atomicRmw(u8, &pages[at], .Or, 0, .monotonic);
}

// ---- epoll ----

pub const Event = linux.epoll_event;
pub const IN: u32 = 1;
pub const OUT: u32 = 4;
pub const ERR: u32 = 8;
pub const HUP: u32 = 0x10;
pub const RDHUP: u32 = 0x2000;
/// Each time that it becomes ready, not while it is.
pub const ET: u32 = 0x8000_0000;

/// A new epoll set.
pub fn epollCreate() i32 {
    const EPOLL_CLOEXEC = 0o2000000;
    return res(linux.syscall1(.epoll_create1, EPOLL_CLOEXEC));
}

/// Watch a descriptor.
pub fn epollAdd(epoll: i32, fd: i32, events: u32, data: u64) i32 {
    return epollControl(epoll, 1, fd, events, data);
}

/// Watch it for other events.
pub fn epollModify(epoll: i32, fd: i32, events: u32, data: u64) i32 {
    return epollControl(epoll, 3, fd, events, data);
}

/// Watch it no more.
pub fn epollRemove(epoll: i32, fd: i32) void {
    _ = epollControl(epoll, 2, fd, 0, 0);
}

fn epollControl(epoll: i32, operation: usize, fd: i32, events: u32, data: u64) i32 {
    var event = Event{ .events = events, .data = .{ .u64 = data } };
    return res(linux.syscall4(.epoll_ctl, num(epoll), operation, num(fd), @intFromPtr(&event)));
}

/// Wait for events; `timeout_ms` -1 = for ever. A signal counts as no event.
pub fn epollWait(epoll: i32, events: []Event, timeout_ms: i32) u32 {
    const into = @intFromPtr(events.ptr);
    const rc = res(linux.syscall6(.epoll_pwait, num(epoll), into, events.len, num(timeout_ms), 0, 8));
    if (rc < 0) {
        std.debug.assert(rc == -EINTR); // anything else is a bug of ours: bad descriptor, bad pointer
        return 0;
    }
    return @intCast(rc);
}

/// Whether a descriptor is readable in this time; an epoll set is when it has an event, which stays there.
pub fn isReadableWithin(fd: i32, most_ns: u64) bool {
    var one = linux.pollfd{ .fd = fd, .events = @intCast(IN), .revents = 0 };
    const span = [2]i64{ @intCast(most_ns / 1_000_000_000), @intCast(most_ns % 1_000_000_000) };
    return res(linux.syscall5(.ppoll, @intFromPtr(&one), 1, @intFromPtr(&span), 0, 8)) > 0;
}

// ---- processes ----

/// This process.
pub fn getpid() i32 {
    return res(linux.syscall0(.getpid));
}

/// The user it acts for.
pub fn geteuid() u32 {
    return @intCast(res(linux.syscall0(.geteuid)));
}

/// Whether a debugger is attached to a process.
pub fn isTraced(pid: u32) bool {
    const AT_FDCWD = -100;
    const O_CLOEXEC = 0o2000000;
    var path: [32]u8 = undefined;
    const name = std.fmt.bufPrintZ(&path, "/proc/{d}/status", .{pid}) catch unreachable; // ten digits at most
    const fd = res(linux.syscall4(.openat, num(AT_FDCWD), @intFromPtr(name.ptr), O_CLOEXEC, 0));
    if (fd < 0) return false;
    defer close(fd);
    var text: [1024]u8 = undefined; // the line is among the first ten
    const n = big(linux.syscall3(.read, num(fd), @intFromPtr(&text), text.len));
    if (n <= 0) return false;
    const key = "\nTracerPid:\t";
    const at = std.mem.indexOf(u8, text[0..@intCast(n)], key) orelse return false;
    return at + key.len < n and text[at + key.len] != '0';
}

/// Fill with bytes that cannot be foretold.
pub fn random(into: []u8) void {
    const rc = res(linux.syscall3(.getrandom, @intFromPtr(into.ptr), into.len, 0));
    std.debug.assert(rc == into.len); // up to 256 bytes come at once
}

/// End this process, and every process of its group if it leads one. Does not return, takes no lock, allocates nothing.
pub fn killOwnGroup() noreturn {
    const SIGKILL = 9;
    const group = res(linux.syscall1(.getpgid, 0));
    // A process that leads no group shares one with its starter: killing that would take the wrong ones along.
    if (group == getpid()) _ = linux.syscall2(.kill, 0, SIGKILL);
    _ = linux.syscall1(.exit_group, 137);
    unreachable; // exit_group does not return
}

// ---- threads ----

const Main = *const fn (?*anyopaque) callconv(.c) ?*anyopaque;
const Hook = *const fn () callconv(.c) void;

/// `sigset_t`, 128 bytes in every libc of Linux.
const SignalSet = extern struct { words: [16]u64 };

extern "c" fn clock_gettime(clock: c_int, time: *[2]i64) c_int;
extern "c" fn pthread_create(thread: *usize, attributes: ?*anyopaque, main: Main, argument: ?*anyopaque) c_int;
extern "c" fn pthread_sigmask(how: c_int, set: ?*const SignalSet, before: ?*SignalSet) c_int;
extern "c" fn sigfillset(set: *SignalSet) c_int;
extern "c" fn pthread_join(thread: usize, result: ?*?*anyopaque) c_int;
extern "c" fn pthread_atfork(prepare: Hook, parent: Hook, child: Hook) c_int;

pub const Thread = usize;

/// Start a thread that gets no signals: they belong to the main thread, where Python handles them. libc's own functions
/// say which signals these are: it keeps some to itself, by which `setuid` and its like reach every thread, and wait.
pub fn threadStart(main: Main, argument: ?*anyopaque) ?Thread {
    const SIG_SETMASK = 2;
    var all: SignalSet = undefined;
    var before: SignalSet = undefined;
    if (sigfillset(&all) != 0 or pthread_sigmask(SIG_SETMASK, &all, &before) != 0) return null;
    defer _ = pthread_sigmask(SIG_SETMASK, &before, null);
    var thread: usize = 0;
    return if (pthread_create(&thread, null, main, argument) == 0) thread else null;
}

/// Wait for a thread to end.
pub fn threadJoin(thread: Thread) void {
    const rc = pthread_join(thread, null);
    std.debug.assert(rc == 0);
}

/// Let another thread run that is ready to.
pub fn threadYield() void {
    _ = linux.syscall0(.sched_yield);
}

/// Give the calling thread a name for ps and gdb; at most 15 bytes.
pub fn threadName(name: [*:0]const u8) void {
    const PR_SET_NAME = 15;
    _ = linux.syscall2(.prctl, PR_SET_NAME, @intFromPtr(name));
}

/// Have three functions called around every fork that goes through libc.
pub fn atFork(prepare: Hook, parent: Hook, child: Hook) bool {
    return pthread_atfork(prepare, parent, child) == 0;
}

/// A lock of one word. Held for microseconds, and never by a thread that sleeps on anything else.
pub const Mutex = struct {
    /// 0 free, 1 held, 2 held and waited for.
    state: std.atomic.Value(u32) = .init(0),

    const FUTEX_WAIT_PRIVATE = 128;
    const FUTEX_WAKE_PRIVATE = 129;

    /// Wait until the lock is ours.
    pub fn lock(self: *Mutex) void {
        if (self.state.cmpxchgStrong(0, 1, .acquire, .monotonic) == null) return;
        while (self.state.swap(2, .acquire) != 0) {
            _ = linux.syscall4(.futex, @intFromPtr(&self.state.raw), FUTEX_WAIT_PRIVATE, 2, 0);
        }
    }

    /// Give it to the next.
    pub fn unlock(self: *Mutex) void {
        if (self.state.swap(0, .release) == 2) {
            _ = linux.syscall3(.futex, @intFromPtr(&self.state.raw), FUTEX_WAKE_PRIVATE, 1);
        }
    }
};

/// Write a last word to standard error; for panics only.
pub fn complain(text: []const u8) void {
    _ = linux.syscall3(.write, 2, @intFromPtr(text.ptr), text.len);
}

test "memory mapped twice has no seam" {
    const fd = memfd("test", 4096 + 8192);
    defer close(fd);
    try std.testing.expect(fd >= 0);
    try std.testing.expect(memfdIsSound(fd, 4096 + 8192));
    try std.testing.expect(!memfdIsSound(fd, 4096));
    const pages = mapSharedTwice(fd, 4096, 8192).?;
    defer unmap(pages, 4096 + 2 * 8192);

    @memcpy(pages[4096 + 8190 ..][0..4], "seam");

    try std.testing.expectEqualStrings("am", pages[4096..][0..2]);
}
