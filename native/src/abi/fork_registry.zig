//! The handles of one kind that a fork has to know, process-wide: they rest while the memory is copied, and the child's
//! copies of them are dead.
//!
//! FK-1 A fork of any thread finds no handle in the middle of something, and no lock of one held in the child. FK-2 The
//! child knows none of its parent's handles, and may make its own.

const std = @import("std");
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

/// All of type `T`, which has `beforeFork` (come to rest, and keep others out), `afterForkParent` and `afterForkChild`
/// (let them in again).
pub fn ForkRegistry(comptime T: type) type {
    return struct {
        var places: [limits.BUSES_MAX]?*T = @splat(null);
        var lock: sys.Mutex = .{};
        var is_watching: bool = false;

        /// Have forks know one. Whether there was room.
        pub fn add(one: *T) bool {
            lock.lock();
            defer lock.unlock();
            if (!is_watching) {
                if (!sys.atFork(beforeFork, afterForkParent, afterForkChild)) return false;
                is_watching = true;
            }
            for (&places) |*place| {
                if (place.* == null) {
                    place.* = one;
                    return true;
                }
            }
            return false;
        }

        /// Have forks know it no more, before it goes.
        pub fn remove(one: *T) void {
            lock.lock();
            defer lock.unlock();
            for (&places) |*place| {
                if (place.* == one) place.* = null;
            }
        }

        fn beforeFork() callconv(.c) void {
            lock.lock();
            for (places) |place| if (place) |one| one.beforeFork();
        }

        fn afterForkParent() callconv(.c) void {
            for (places) |place| if (place) |one| one.afterForkParent();
            lock.unlock();
        }

        fn afterForkChild() callconv(.c) void {
            for (places) |place| if (place) |one| one.afterForkChild();
            places = @splat(null); // FK-2
            lock.unlock();
        }
    };
}

const testing = std.testing;

const Handle = struct {
    state: enum { moving, resting, dead } = .moving,

    fn beforeFork(self: *Handle) void {
        self.state = .resting;
    }

    fn afterForkParent(self: *Handle) void {
        self.state = .moving;
    }

    fn afterForkChild(self: *Handle) void {
        self.state = .dead;
    }
};

test "handles rest during a fork, and are dead in the child, which begins with none" {
    const Handles = ForkRegistry(Handle);
    var kept: Handle = .{};
    var gone: Handle = .{};
    try testing.expect(Handles.add(&kept) and Handles.add(&gone));
    Handles.remove(&gone);

    Handles.beforeFork();
    try testing.expect(kept.state == .resting and gone.state == .moving);
    Handles.afterForkParent();
    try testing.expect(kept.state == .moving);

    Handles.beforeFork();
    Handles.afterForkChild();
    try testing.expect(kept.state == .dead and gone.state == .moving);
    kept.state = .moving;
    Handles.beforeFork();
    Handles.afterForkChild();
    try testing.expect(kept.state == .moving);
}

test "a registry has room for as many as there may be" {
    const Numbered = struct {
        number: u32,

        fn beforeFork(_: *@This()) void {}
        fn afterForkParent(_: *@This()) void {}
        fn afterForkChild(_: *@This()) void {}
    };
    const Handles = ForkRegistry(Numbered);
    var all: [limits.BUSES_MAX + 1]Numbered = undefined;
    for (all[0..limits.BUSES_MAX]) |*one| try testing.expect(Handles.add(one));
    try testing.expect(!Handles.add(&all[limits.BUSES_MAX]));
    Handles.remove(&all[3]);
    try testing.expect(Handles.add(&all[limits.BUSES_MAX]));
    Handles.beforeFork();
    Handles.afterForkChild();
}
