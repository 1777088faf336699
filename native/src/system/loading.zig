//! Shared libraries that are looked for at run time, and what decides which: the environment, folders. Functions of
//! libc where the kernel knows nothing of it.

const std = @import("std");
const builtin = @import("builtin");
const linux = std.os.linux;
const sys = @import("sys.zig");

extern "c" fn dlopen(path: [*:0]const u8, flags: c_int) ?*anyopaque;
extern "c" fn dlsym(library: ?*anyopaque, name: [*:0]const u8) ?*anyopaque;
extern "c" fn dlerror() ?[*:0]const u8;
extern "c" fn dlclose(library: *anyopaque) c_int;
extern "c" fn dladdr(address: *const anyopaque, info: *Info) c_int;
extern "c" fn getenv(name: [*:0]const u8) ?[*:0]const u8;
extern "c" fn setenv(name: [*:0]const u8, value: [*:0]const u8, overwrite: c_int) c_int;
extern "c" fn open_memstream(text: *?[*:0]u8, size: *usize) ?*anyopaque;
extern "c" fn fclose(stream: *anyopaque) c_int;
extern "c" fn free(memory: ?*anyopaque) void;

const Info = extern struct { file: ?[*:0]const u8, base: ?*anyopaque, name: ?[*:0]const u8, symbol: ?*anyopaque };

const RTLD_NOW = 2;
const RTLD_LOCAL = 0;

/// Load a library, so that no other one sees its names; null if it cannot be: `reason` then says why.
pub fn open(path: [*:0]const u8) ?*anyopaque {
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

/// The same, and the library takes its own names before those of the process: an interpreter may have another copy of
/// it inside.
pub fn openApart(path: [*:0]const u8) ?*anyopaque {
    const RTLD_DEEPBIND = if (builtin.sanitize_thread) 0 else 8; // sanitizers end the process that asks for it
    return dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
}

/// Why the last `open` failed; until the next call.
pub fn reason() [*:0]const u8 {
    return dlerror() orelse "no reason given";
}

/// Give a library back.
pub fn close(library: *anyopaque) void {
    _ = dlclose(library); // what is still used by others stays
}

/// A function of a library; of null, the one that the process calls by this name.
pub fn symbol(library: ?*anyopaque, name: [*:0]const u8) ?*anyopaque {
    return dlsym(library, name);
}

/// The file that a loaded function came from.
pub fn fileOf(function: *const anyopaque) ?[*:0]const u8 {
    var info: Info = undefined;
    return if (dladdr(function, &info) != 0) info.file else null;
}

/// The value of a variable of the environment.
pub fn variable(name: [*:0]const u8) ?[]const u8 {
    return std.mem.span(getenv(name) orelse return null);
}

/// Set a variable, unless it is set.
pub fn setDefault(name: [*:0]const u8, value: [*:0]const u8) void {
    _ = setenv(name, value, 0); // it fails for want of memory: then the library takes its own default
}

/// What a function prints to a stream of C, cut to `into`.
pub fn printed(into: []u8, argument: anytype, print: *const fn (@TypeOf(argument), *anyopaque) callconv(.c) void) []u8 {
    var text: ?[*:0]u8 = null;
    var size: usize = 0;
    const stream = open_memstream(&text, &size) orelse return into[0..0];
    print(argument, stream);
    _ = fclose(stream);
    defer free(text);
    const n = @min(size, into.len);
    if (text) |bytes| @memcpy(into[0..n], bytes[0..n]);
    return into[0..n];
}

/// Whether a folder has anything in it; false, too, if it is not there.
pub fn hasEntries(folder: [*:0]const u8) bool {
    const AT_FDCWD = -100;
    const O_DIRECTORY_CLOEXEC = 0o2000000 | if (builtin.cpu.arch == .aarch64) 0o40000 else 0o200000;
    const fd = sys.res(linux.syscall4(.openat, sys.num(AT_FDCWD), @intFromPtr(folder), O_DIRECTORY_CLOEXEC, 0));
    if (fd < 0) return false;
    defer sys.close(fd);
    var entries: [1024]u8 align(8) = undefined; // ".", ".." and the first of the others
    const n = sys.big(linux.syscall3(.getdents64, sys.num(fd), @intFromPtr(&entries), entries.len));
    var at: usize = 0;
    var count: u32 = 0;
    while (n > 0 and at < n) : (count += 1) at += std.mem.readInt(u16, entries[at + 16 ..][0..2], .little);
    return count > 2;
}

test "folders with something in them" {
    try std.testing.expect(hasEntries("/proc"));
    try std.testing.expect(!hasEntries("/proc/nothing-of-this-name"));
    try std.testing.expect(!hasEntries("/proc/self/status"));
}

test "a library that is not there has a reason" {
    try std.testing.expectEqual(null, open("libnothing-of-this-name.so.9"));
    try std.testing.expect(std.mem.indexOf(u8, std.mem.span(reason()), "libnothing") != null);
}

test "a variable that is set stays" {
    setDefault("TRIMESH_TEST_VARIABLE", "one");
    setDefault("TRIMESH_TEST_VARIABLE", "two");

    try std.testing.expectEqualStrings("one", variable("TRIMESH_TEST_VARIABLE").?);
    try std.testing.expectEqual(null, variable("TRIMESH_TEST_NOTHING"));
}
