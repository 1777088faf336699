//! Whether this thread can keep a core busy that is not wanted else: the cores that it may use, and how many threads of
//! the machine want one now.

const std = @import("std");
const limits = @import("../limits.zig");
const sys = @import("sys.zig");
const linux = std.os.linux;

const Set = [limits.CORES_MAX / 64]u64;

/// Cores that this thread may use; 0 when the system does not say.
pub fn allowed() u32 {
    var words: Set = @splat(0);
    if (sys.res(linux.syscall3(.sched_getaffinity, 0, @sizeOf(Set), @intFromPtr(&words))) < 0) return 0;
    var count: u32 = 0;
    for (words) |word| count += @popCount(word);
    return count;
}

/// Threads of this machine that run or want to, this one with them; null when the system does not say.
pub fn runnable() ?u32 {
    const AT_FDCWD = -100;
    const O_CLOEXEC = 0o2000000;
    const path: [*:0]const u8 = "/proc/loadavg";
    const fd = sys.res(linux.syscall4(.openat, sys.num(AT_FDCWD), @intFromPtr(path), O_CLOEXEC, 0));
    if (fd < 0) return null;
    defer sys.close(fd);
    var text: [64]u8 = undefined;
    const n = sys.readAt(fd, &text, 0);
    return if (n <= 0) null else parseRunnable(text[0..@intCast(n)]);
}

/// The fourth word is "runnable/all".
fn parseRunnable(text: []const u8) ?u32 {
    var words = std.mem.tokenizeScalar(u8, text, ' ');
    for (0..3) |_| _ = words.next() orelse return null;
    const word = words.next() orelse return null;
    const end = std.mem.indexOfScalar(u8, word, '/') orelse return null;
    return std.fmt.parseInt(u32, word[0..end], 10) catch null;
}

/// Whether there is a core for each that wants one, this thread included.
pub fn areSpare(cores: u32, threads: ?u32) bool {
    return cores >= 2 and (threads orelse return false) <= cores;
}

test "the fourth word of loadavg is read, and nothing else" {
    try std.testing.expectEqual(27, parseRunnable("24.33 12.51 6.24 27/200 17171\n"));
    for ([_][]const u8{ "", "1 2 3", "1 2 3 4", "1 2 3 x/9", "1 2 3 /9" }) |text| {
        try std.testing.expectEqual(null, parseRunnable(text));
    }
}

test "this machine says both" {
    try std.testing.expect(allowed() >= 1);
    try std.testing.expect(runnable().? >= 1);
}

test "one core is never spare, nor are cores that others want" {
    try std.testing.expect(!areSpare(1, 1));
    try std.testing.expect(!areSpare(2, 3));
    try std.testing.expect(!areSpare(2, null));
    try std.testing.expect(areSpare(2, 2));
}

test "a thread that is kept to one core has one" {
    var before: Set = @splat(0);
    _ = linux.syscall3(.sched_getaffinity, 0, @sizeOf(Set), @intFromPtr(&before));
    defer _ = linux.syscall3(.sched_setaffinity, 0, @sizeOf(Set), @intFromPtr(&before));
    var one: Set = @splat(0);
    for (before, &one) |word, *kept| {
        if (word == 0) continue;
        kept.* = word & (~word + 1); // its lowest bit
        break;
    }
    try std.testing.expectEqual(0, sys.res(linux.syscall3(.sched_setaffinity, 0, @sizeOf(Set), @intFromPtr(&one))));

    try std.testing.expectEqual(1, allowed());
}
