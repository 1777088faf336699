//! What tests and fuzz targets of sessions share: two machines, and the bytes between them. PURE.

const std = @import("std");
const channels = @import("channels.zig");
const machines = @import("machine.zig");
const resends = @import("resend.zig");

const testing = std.testing;
const Machine = machines.Machine;

/// Of machines that have ended: 8 MiB anew for each of the thousands that a fuzzer makes cost more than all else.
var spare: [4]?machines.Memory = @splat(null);

const allocator = std.heap.page_allocator;

/// Memory of one machine. Tests run one after the other.
pub fn memory() !machines.Memory {
    const found = for (&spare) |*place| {
        if (place.*) |one| {
            place.* = null;
            break one;
        }
    } else machines.Memory{
        .kept = try allocator.alloc(u8, resends.MEMORY_BYTES),
        .channels = try allocator.alloc(channels.Channel, channels.CHANNELS),
        .buckets = try allocator.alloc(channels.Index, channels.BUCKETS),
    };
    @memset(found.buckets, 0);
    return found;
}

/// Give it back.
pub fn free(one: *Machine) void {
    const given = machines.Memory{ .kept = one.kept.memory, .channels = one.table.all, .buckets = one.table.buckets };
    for (&spare) |*place| if (place.* == null) {
        place.* = given;
        return;
    };
    allocator.free(given.kept);
    allocator.free(given.channels);
    allocator.free(given.buckets);
}

/// One side: its machine, bytes on their way to it, and what has come on each channel.
pub const Side = struct {
    machine: Machine,
    wire: std.ArrayListUnmanaged(u8) = .empty,
    got: std.AutoHashMapUnmanaged(u32, Received) = .empty,
    resumptions: u32 = 0,
    has_bye: bool = false,

    pub const Received = struct {
        bytes: std.ArrayListUnmanaged(u8) = .empty,
        taken: usize = 0,
        has_ended: bool = false,
        was_reset: bool = false,
    };

    /// Begin without a connection.
    pub fn init(is_dialler: bool) !Side {
        return .{ .machine = Machine.init(.{
            .is_dialler = is_dialler,
            .session = if (is_dialler) 99 else 0,
            .lease_ticks = 30,
        }, try memory()) };
    }

    /// Forget all.
    pub fn deinit(self: *Side) void {
        free(&self.machine);
        self.wire.deinit(testing.allocator);
        var all = self.got.valueIterator();
        while (all.next()) |one| one.bytes.deinit(testing.allocator);
        self.got.deinit(testing.allocator);
    }

    /// What has come on a channel.
    pub fn received(self: *Side, number: u32) *Received {
        const found = self.got.getOrPutValue(testing.allocator, number, .{}) catch unreachable; // no test fills memory
        return found.value_ptr;
    }

    /// Let up to `most` bytes pass to the other side. How many did.
    pub fn send(self: *Side, to: *Side, most: usize) !usize {
        const out = self.machine.outgoing(1 << 16);
        const n = @min(out.len, most);
        try to.wire.appendSlice(testing.allocator, out[0..n]);
        self.machine.sent(n);
        return n;
    }

    /// Read whole frames of what has come.
    pub fn read(self: *Side) !void {
        var at: usize = 0;
        defer self.wire.replaceRangeAssumeCapacity(0, at, "");
        while (try self.machine.receive(self.wire.items[at..])) |got| {
            at += got.size;
            switch (got.news) {
                .nothing => {},
                .resumed => self.resumptions += 1,
                .bye => self.has_bye = true,
                .opened => |one| {
                    const about = self.received(self.machine.at(one.index).number);
                    try about.bytes.appendSlice(testing.allocator, one.purpose);
                },
                .data => |one| {
                    const about = self.received(self.machine.at(one.index).number);
                    try about.bytes.appendSlice(testing.allocator, one.bytes);
                },
                .many => |pieces| {
                    var rest = pieces;
                    while (try self.machine.nextOf(&rest)) |news| switch (news) {
                        .data => |one| {
                            const about = self.received(self.machine.at(one.index).number);
                            try about.bytes.appendSlice(testing.allocator, one.bytes);
                        },
                        else => {},
                    };
                },
                .closed => |index| {
                    self.received(self.machine.at(index).number).has_ended = true;
                    if (self.machine.isOver(index)) self.machine.forget(index);
                },
                .reset => |index| {
                    self.received(self.machine.at(index).number).was_reset = true;
                    self.machine.forget(index);
                },
            }
        }
    }

    /// Do what is due of channels.
    pub fn chores(self: *Side) void {
        while (self.machine.doChore()) |chore| switch (chore) {
            .said => {},
            .closed => |index| if (self.machine.isOver(index)) self.machine.forget(index),
        };
    }

    /// Give bytes to a channel, as many as there is room for. How many.
    pub fn write(self: *Side, index: channels.Index, bytes: []const u8) usize {
        defer self.machine.endFold();
        return self.add(index, bytes);
    }

    /// The same, behind which more may be folded: `endFold` comes later.
    pub fn add(self: *Side, index: channels.Index, bytes: []const u8) usize {
        self.machine.ready(index);
        if (!self.machine.is_resumed or !self.machine.at(index).mayRead()) return 0;
        const to = self.machine.place(index) orelse return 0;
        const n = @min(to.len, bytes.len);
        @memcpy(to[0..n], bytes[0..n]);
        if (n > 0) self.machine.give(index, to, n);
        self.machine.dry(index);
        return n;
    }
};

/// A new connection of both, in place of what was.
pub fn connect(a: *Side, b: *Side) void {
    for ([_]*Side{ a, b }) |side| {
        side.machine.disconnect();
        side.wire.clearRetainingCapacity();
        side.machine.connect();
    }
}

/// Let bytes pass until nothing moves.
pub fn settle(a: *Side, b: *Side) !void {
    for (0..100_000) |_| {
        a.chores();
        b.chores();
        const moved = try a.send(b, 1 << 20) + try b.send(a, 1 << 20);
        try a.read();
        try b.read();
        if (moved == 0) return;
    }
    return error.NeverSettles;
}
