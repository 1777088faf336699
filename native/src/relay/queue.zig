//! Records of any size between two threads, in order; it grows, so whoever reads slowly is to be asked less. Used under
//! a lock.

const std = @import("std");
const assert = std.debug.assert;
const sys = @import("../system/sys.zig");

/// What it begins with, and keeps: as much of it as is used costs memory.
pub const BYTES = 1 << 20;

/// Records are a `Head`, whose `size` says how many bytes follow.
pub fn Queue(comptime Head: type) type {
    return struct {
        memory: []align(4096) u8,
        first: usize = 0,
        last: usize = 0,

        const Self = @This();

        pub const Taken = struct { head: Head, bytes: []const u8 };

        /// Null: there is no memory.
        pub fn init() ?Self {
            const pages = sys.mapPrivate(BYTES) orelse return null;
            return .{ .memory = pages[0..BYTES] };
        }

        /// Give all memory back.
        pub fn deinit(self: *Self) void {
            sys.unmap(self.memory.ptr, self.memory.len);
        }

        /// Bytes that wait.
        pub fn length(self: *const Self) usize {
            assert(self.first <= self.last);
            assert(self.last <= self.memory.len);
            return self.last - self.first;
        }

        /// Add a record; its bytes are those of two pieces. False: there is no memory.
        pub fn push(self: *Self, head: Head, a: []const u8, b: []const u8) bool {
            const span = @sizeOf(Head) + a.len + b.len;
            if (self.memory.len - self.last < span and !self.makeRoom(span)) return false;
            assert(self.memory.len - self.last >= span);
            var said = head;
            said.size = @intCast(a.len + b.len);
            for ([_][]const u8{ std.mem.asBytes(&said), a, b }) |piece| {
                @memcpy(self.memory[self.last..][0..piece.len], piece);
                self.last += piece.len;
            }
            return true;
        }

        fn makeRoom(self: *Self, span: usize) bool {
            const waiting = self.memory[self.first..self.last];
            var to = self.memory;
            if (self.memory.len < 2 * (waiting.len + span)) {
                const size = std.math.ceilPowerOfTwoAssert(usize, 4 * (waiting.len + span));
                to = (sys.mapPrivate(size) orelse return false)[0..size];
            }
            std.mem.copyForwards(u8, to[0..waiting.len], waiting);
            if (to.ptr != self.memory.ptr) {
                sys.unmap(self.memory.ptr, self.memory.len);
                self.memory = to;
            }
            self.last = waiting.len;
            self.first = 0;
            assert(self.memory.len - self.last >= span);
            return true;
        }

        /// Take the first record; its bytes stay until the next `push`.
        pub fn shift(self: *Self) ?Taken {
            if (self.first == self.last) return null;
            assert(self.length() >= @sizeOf(Head));
            var head: Head = undefined;
            @memcpy(std.mem.asBytes(&head), self.memory[self.first..][0..@sizeOf(Head)]);
            const bytes = self.memory[self.first + @sizeOf(Head) ..][0..head.size];
            self.first += @sizeOf(Head) + bytes.len;
            assert(self.first <= self.last); // no record is cut
            if (self.first == self.last) {
                self.first = 0;
                self.last = 0;
            }
            return .{ .head = head, .bytes = bytes };
        }
    };
}

test "records come out in order, however many wait" {
    const Head = extern struct { number: u32, size: u32 = 0 };
    var queue = Queue(Head).init().?;
    defer queue.deinit();
    const bytes: [100]u8 = @splat(7);
    var next: u32 = 0;
    var pushed: u32 = 0;
    for (0..3) |turn| {
        for (0..20_000) |_| {
            try std.testing.expect(queue.push(.{ .number = pushed }, bytes[0 .. pushed % 50], bytes[0 .. pushed % 7]));
            pushed += 1;
        }
        while (queue.shift()) |one| {
            try std.testing.expectEqual(next, one.head.number);
            try std.testing.expectEqual(next % 50 + next % 7, one.bytes.len);
            next += 1;
            if (turn < 2 and next % 13_000 == 0) break;
        }
    }
    try std.testing.expectEqual(pushed, next);
}
