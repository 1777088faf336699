//! Other processes of this host: whether they live, what they have open, and their memory. Raw Linux calls, as in
//! system/sys.zig; processes are named by pid and told apart by the time they started at.

const std = @import("std");
const linux = std.os.linux;
const sys = @import("sys.zig");

pub const EPERM = 1;
pub const ENOENT = 2;
pub const ESRCH = 3;
pub const EACCES = 13;
pub const EFAULT = 14;
pub const ENOSYS = 38;

const AT_FDCWD: usize = @bitCast(@as(isize, -100));
const O_RDWR = 2;
const O_NOCTTY = 0o400;
const O_NONBLOCK = 0o4000;
const O_CLOEXEC = 0o2000000;

/// Pids are less than this on every Linux.
pub const PID_MAX = 1 << 22;

/// A descriptor of a process, readable once it has ended. Or -errno.
pub fn open(pid: u32) i32 {
    return sys.res(linux.syscall2(.pidfd_open, pid, 0));
}

/// Whether the process behind a pidfd has ended.
pub fn hasEnded(pidfd: i32) bool {
    const POLLIN = 1;
    var one = extern struct { fd: i32, events: i16, revents: i16 }{ .fd = pidfd, .events = POLLIN, .revents = 0 };
    const now = [2]i64{ 0, 0 };
    const n = sys.res(linux.syscall5(.ppoll, @intFromPtr(&one), 1, @intFromPtr(&now), 0, 8));
    return n > 0 and one.revents & POLLIN != 0;
}

/// When a process has started, in ticks since boot. Null: there is none of that pid, or /proc does not say.
pub fn startedAt(pid: u32) ?u64 {
    return fieldOf(pid, START);
}

/// Whether a process is about to end: it has closed what it had open, and may already have no memory.
pub fn isEnding(pid: u32) bool {
    const PF_EXITING = 4;
    return (fieldOf(pid, FLAGS) orelse return false) & PF_EXITING != 0;
}

// Numbers in /proc/PID/stat, counted from the state, which follows the name.
const FLAGS = 6;
const START = 19;

fn fieldOf(pid: u32, number: usize) ?u64 {
    var path: [32]u8 = undefined;
    const name = std.fmt.bufPrintZ(&path, "/proc/{d}/stat", .{pid}) catch unreachable; // ten digits at most
    const fd = sys.res(linux.syscall4(.openat, AT_FDCWD, @intFromPtr(name.ptr), O_CLOEXEC, 0));
    if (fd < 0) return null;
    defer sys.close(fd);
    var text: [1024]u8 = undefined;
    const n = sys.readAt(fd, &text, 0);
    return if (n <= 0) null else fieldIn(text[0..@intCast(n)], number);
}

/// A field of a line of /proc/PID/stat. The name may hold anything.
fn fieldIn(line: []const u8, number: usize) ?u64 {
    const name_end = std.mem.lastIndexOfScalar(u8, line, ')') orelse return null;
    var fields = std.mem.tokenizeScalar(u8, line[name_end + 1 ..], ' ');
    for (0..number) |_| _ = fields.next() orelse return null;
    return std.fmt.parseInt(u64, fields.next() orelse return null, 10) catch null;
}

/// Whether the process that had this pid and start (its bits in `mask`) still lives. In doubt it does.
pub fn lives(pid: u32, started: u64, mask: u64) bool {
    const fd = open(pid);
    if (fd == -ESRCH or fd == -sys.EINVAL) return false;
    if (fd < 0) return true;
    defer sys.close(fd);
    const start = startedAt(pid) orelse return !hasEnded(fd);
    // Looked at last: if it has not ended by now, the start was its own.
    return start & mask == started & mask and !hasEnded(fd);
}

/// Open once more, for reading and writing, what another process has open as `number`. Or -errno.
pub fn openDescriptor(pid: u32, number: u32) i32 {
    var path: [48]u8 = undefined;
    const name = std.fmt.bufPrintZ(&path, "/proc/{d}/fd/{d}", .{ pid, number }) catch unreachable; // 20 digits at most
    const flags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY; // it may be anything
    return sys.res(linux.syscall4(.openat, AT_FDCWD, @intFromPtr(name.ptr), flags, 0));
}

/// How many descriptors this process may have; it can change that at any time.
pub fn descriptorsMax() u64 {
    const RLIMIT_NOFILE = 7;
    var limit: extern struct { soft: u64, hard: u64 } = undefined;
    const rc = sys.res(linux.syscall4(.prlimit64, 0, RLIMIT_NOFILE, 0, @intFromPtr(&limit)));
    return if (rc == 0) limit.soft else 0; // a sandbox refuses it
}

/// What the kernel knows of a file.
pub const File = struct {
    /// The number by which it is told from others.
    inode: u64,
    /// Memory, or disk, that it has.
    allocated: u64,
};

/// What the kernel knows of the file of a descriptor. Null: it does not say.
pub fn fileOf(fd: i32) ?File {
    const AT_EMPTY_PATH = 0x1000;
    var file: File = undefined;
    return if (askOf(sys.num(fd), "", AT_EMPTY_PATH, &file) == 0) file else null;
}

/// What the kernel knows of what another process has open as `number`. Or -errno.
pub fn fileOfOther(pid: u32, number: u32, file: *File) i32 {
    var path: [48]u8 = undefined;
    const name = std.fmt.bufPrintZ(&path, "/proc/{d}/fd/{d}", .{ pid, number }) catch unreachable; // 20 digits at most
    return askOf(AT_FDCWD, name, 0, file);
}

fn askOf(folder: usize, path: [*:0]const u8, flags: usize, file: *File) i32 {
    const ASKED = 0x100 | 0x400; // inode, blocks
    const Statx = extern struct { mask: u32, before: [28]u8, inode: u64, size: u64, blocks: u64, rest: [200]u8 };
    comptime std.debug.assert(@sizeOf(Statx) == 256 and @offsetOf(Statx, "inode") == 32);
    var found: Statx = undefined;
    const rc = sys.res(linux.syscall5(.statx, folder, @intFromPtr(path), flags, ASKED, @intFromPtr(&found)));
    if (rc < 0) return rc;
    if (found.mask & ASKED != ASKED or found.inode == 0) return -ENOSYS;
    file.* = .{ .inode = found.inode, .allocated = found.blocks *| 512 };
    return 0;
}

/// A piece of memory, here or in another process.
pub const Piece = extern struct {
    address: u64,
    size: u64,

    /// The memory of a slice of this process.
    pub fn of(bytes: []u8) Piece {
        return .{ .address = @intFromPtr(bytes.ptr), .size = bytes.len };
    }
};

/// Copy from a process's memory. The number of bytes, or -errno.
pub fn readMemory(pid: u32, ours: []const Piece, theirs: []const Piece) i64 {
    return move(.process_vm_readv, pid, ours, theirs);
}

/// Copy into a process's memory. The number of bytes, or -errno.
pub fn writeMemory(pid: u32, ours: []const Piece, theirs: []const Piece) i64 {
    return move(.process_vm_writev, pid, ours, theirs);
}

fn move(call: linux.SYS, pid: u32, ours: []const Piece, theirs: []const Piece) i64 {
    const from = @intFromPtr(theirs.ptr);
    return sys.big(linux.syscall6(call, pid, @intFromPtr(ours.ptr), ours.len, from, theirs.len, 0));
}

/// Let any process of this user read and write this one's memory, where the kernel asks for that. Where it does not,
/// the call fails and changes nothing.
pub fn allowTracers() void {
    const PR_SET_PTRACER = 0x59616d61;
    const PR_SET_PTRACER_ANY: usize = std.math.maxInt(usize);
    _ = linux.syscall5(.prctl, PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

test "the start of a process is found behind any name" {
    const tail = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 777 20 21";
    try std.testing.expectEqual(777, fieldIn("12 (name)" ++ tail, START));
    try std.testing.expectEqual(777, fieldIn("12 (na) me) S 1 (" ++ ")" ++ tail, START));
    try std.testing.expectEqual(6, fieldIn("12 (name)" ++ tail, FLAGS));
    try std.testing.expectEqual(null, fieldIn("12 (name) S 1 2 3", START));
    try std.testing.expectEqual(null, fieldIn("12 (name", START));
    const own: u32 = @intCast(sys.getpid());
    const started = startedAt(own).?;
    try std.testing.expect(lives(own, started, std.math.maxInt(u64)));
    try std.testing.expect(!lives(own, started + 1, std.math.maxInt(u64)));
    try std.testing.expect(lives(own, started + (1 << 20), (1 << 20) - 1));
    try std.testing.expect(!lives(PID_MAX, 1, 0));
    try std.testing.expect(!isEnding(own));
    try std.testing.expect(!isEnding(PID_MAX));
}

test "memory is copied by process and address" {
    var from = [4]u8{ 1, 2, 3, 4 };
    var to: [4]u8 = @splat(0);
    const own: u32 = @intCast(sys.getpid());
    try std.testing.expectEqual(4, readMemory(own, &.{Piece.of(&to)}, &.{Piece.of(&from)}));
    try std.testing.expectEqualSlices(u8, &from, &to);
    const nowhere = [1]Piece{.{ .address = 4096, .size = 4 }};
    try std.testing.expectEqual(-EFAULT, readMemory(own, &.{Piece.of(&to)}, &nowhere));
    try std.testing.expectEqual(-ESRCH, writeMemory(PID_MAX - 1, &.{Piece.of(&to)}, &nowhere));
}
