//! The bytes of one TLS session that come from a peer and go to it, as one step of it sees them. PURE.
//!
//! An engine reads and writes the caller's memory itself. What it makes while the caller has no room (an alert, a
//! flight of the handshake, the answer to an update of keys) waits here.
//!
//! WI-1 Bytes leave in the order in which they were made. WI-2 No more than `allowed` bytes are taken before the peer
//! is admitted. WI-3 What waits is bounded: full is an answer to the engine, which tries again.

const std = @import("std");
const limits = @import("../limits.zig");

pub const Wire = struct {
    in: []const u8 = &.{},
    out: []u8 = &.{},
    taken: usize = 0,
    made: usize = 0,
    /// Bytes that may still be taken.
    allowed: u64 = limits.TLS_HALF_OPEN_BYTES,
    waiting: [limits.TLS_WAITING_BYTES]u8 = undefined,
    first: usize = 0,
    last: usize = 0,

    /// Begin a step: what waits goes out first.
    pub fn begin(self: *Wire, in: []const u8, out: []u8) void {
        self.in = in;
        self.out = out;
        self.taken = 0;
        self.made = 0;
        const n = @min(self.last - self.first, out.len);
        @memcpy(out[0..n], self.waiting[self.first..][0..n]);
        self.made = n;
        self.first += n;
        if (self.first == self.last) {
            self.first = 0;
            self.last = 0;
        }
    }

    /// End a step: the caller's memory is its own again.
    pub fn end(self: *Wire) void {
        self.in = &.{};
        self.out = &.{};
        self.taken = 0;
        self.made = 0;
    }

    /// The engine reads; 0: nothing is there, or no more is allowed.
    pub fn pull(self: *Wire, into: []u8) usize {
        const n: usize = @intCast(@min(into.len, self.in.len - self.taken, self.allowed));
        @memcpy(into[0..n], self.in[self.taken..][0..n]);
        self.taken += n;
        self.allowed -= n;
        return n;
    }

    /// The engine writes; fewer than all: there is no room for more.
    pub fn push(self: *Wire, from: []const u8) usize {
        const at_once = if (self.first == self.last) @min(from.len, self.out.len - self.made) else 0; // WI-1
        @memcpy(self.out[self.made..][0..at_once], from[0..at_once]);
        self.made += at_once;
        const later = @min(from.len - at_once, self.waiting.len - self.last);
        @memcpy(self.waiting[self.last..][0..later], from[at_once..][0..later]);
        self.last += later;
        return at_once + later;
    }

    /// Room in the caller's memory for what is made next.
    pub fn room(self: *const Wire) usize {
        return if (self.first == self.last) self.out.len - self.made else 0;
    }

    /// Whether there are bytes that may not be taken.
    pub fn isOverdrawn(self: *const Wire) bool {
        return self.allowed == 0 and self.taken < self.in.len;
    }
};

test "what has no room waits, and leaves in order" {
    var wire = Wire{};
    var out: [4]u8 = undefined;
    wire.begin("", &out);
    try std.testing.expectEqual(6, wire.push("abcdef"));
    try std.testing.expectEqual(2, wire.push("gh"));
    try std.testing.expectEqualStrings("abcd", out[0..wire.made]);
    try std.testing.expectEqual(0, wire.room());

    wire.begin("", &out);
    try std.testing.expectEqualStrings("efgh", out[0..wire.made]);
    try std.testing.expectEqual(0, wire.room());
    wire.begin("", &out);
    try std.testing.expectEqual(4, wire.room());
}

test "what is made between two steps waits for the next" {
    var wire = Wire{};
    var out: [4]u8 = undefined;
    wire.begin("", &out);
    try std.testing.expectEqual(2, wire.push("ab"));
    wire.end();
    try std.testing.expectEqual(2, wire.push("cd"));
    wire.begin("", &out);

    try std.testing.expectEqualStrings("cd", out[0..wire.made]);
}

test "what waits is bounded" {
    var wire = Wire{};
    const much: [limits.TLS_WAITING_BYTES + 5]u8 = @splat(1);

    try std.testing.expectEqual(limits.TLS_WAITING_BYTES, wire.push(&much));
    try std.testing.expectEqual(0, wire.push("x"));
}

test "no more is taken than is allowed" {
    var wire = Wire{ .allowed = 3 };
    var into: [8]u8 = undefined;
    wire.begin("abcdef", &.{});

    try std.testing.expectEqual(3, wire.pull(&into));
    try std.testing.expectEqual(0, wire.pull(&into));
    try std.testing.expect(wire.isOverdrawn());
}
