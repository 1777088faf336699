//! Two movers that all their threads use at once, so that ThreadSanitizer (`zig build test -Dsanitize-thread`) sees
//! every pair of threads that shares memory: T0 of the reader begins, gives up, polls, and attaches anew; T0 of the
//! owner grants, revokes and drops; T2 of both move bytes.

const std = @import("std");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("../copying/transfer.zig");
const attachment = @import("../grants/attachment.zig");
const Stage = @import("stage.zig").Stage;

const testing = std.testing;

const LANES = 8;
const LANE_BYTES = 2 * limits.INLINE_BYTES_MAX;
const TRANSFERS = 600;
const TRANSFERS_AN_ATTACHMENT = 100;

/// T0 of the owner: changes what is not read, until it is told to revoke the rest.
const Changer = struct {
    stage: *Stage,
    revoke_now: std.atomic.Value(bool) = .init(false),
    changes: std.atomic.Value(u32) = .init(0),

    fn run(self: *Changer) void {
        self.change() catch |problem| std.debug.panic("the owner failed: {}", .{problem});
    }

    fn change(self: *Changer) !void {
        const owner = self.stage.owner;
        while (!self.revoke_now.load(.acquire)) {
            const number: u32 = @intCast(owner.takeBlock(4096));
            const bytes = owner.blocks.find(number).?.pages.?[0..4096];
            var name = transfer.GrantName{ .place = 0, .generation = 0, .secret = @splat(7) };
            try testing.expectEqual(status.OK, owner.grant(bytes.ptr, bytes.len, 3, number, &name));
            try testing.expectEqual(status.OK, owner.revoke(&name));
            try testing.expectEqual(status.OK, owner.drop(&name));
            try testing.expectEqual(status.OK, owner.giveBackBlock(number));
            _ = self.changes.fetchAdd(1, .monotonic);
            sys.threadYield();
        }
        while (owner.revoke(&self.stage.name) != status.OK) sys.threadYield();
    }
};

/// T0 of the reader. Each lane has its own part of the memory, and one transfer at a time.
const Poster = struct {
    stage: *Stage,
    local: []u8,
    lanes: [LANES]?u64 = @splat(null),
    ended: u32 = 0,
    given_up: u32 = 0,
    revoked: u32 = 0,
    other: u32 = 0,

    /// Begin one in every lane that is free, each time another kind and size.
    fn post(self: *Poster, round: usize) !void {
        for (&self.lanes, 0..) |*lane, i| {
            if (lane.* != null) continue;
            const kind: transfer.Kind = switch ((round + i) % 4) {
                0, 1 => .read,
                2 => .write,
                else => .add,
            };
            const size: usize = if ((round + i) % 8 < 4) LANE_BYTES else 100;
            var asked = self.stage.request(kind, self.local[i * LANE_BYTES ..][0..size]);
            asked.offset = if (kind.isAtomic()) LANES * LANE_BYTES else i * LANE_BYTES;
            var done: transfer.Done = undefined;
            switch (self.stage.begin(asked, &done)) {
                status.OK => self.note(done),
                status.UNDER_WAY => lane.* = done.id,
                else => return error.TestUnexpectedResult,
            }
            if (lane.*) |id| if ((round + i) % 7 == 0) {
                self.given_up += @intFromBool(self.stage.reader.thread.giveUp(id));
            };
        }
    }

    fn poll(self: *Poster) void {
        var done: [4]transfer.Done = undefined;
        const n = self.stage.reader.poll(&done);
        for (done[0..n]) |one| {
            self.note(one);
            for (&self.lanes) |*lane| if (lane.* == one.id) {
                lane.* = null;
            };
        }
        if (n == 0) sys.threadYield();
    }

    fn note(self: *Poster, done: transfer.Done) void {
        self.ended += 1;
        switch (done.status) {
            status.OK, status.ERR_CANCELLED => {},
            status.ERR_REVOKED => self.revoked += 1,
            else => self.other += 1,
        }
    }

    fn isBusy(self: *const Poster) bool {
        for (self.lanes) |lane| if (lane != null) return true;
        return false;
    }

    /// End the attachment, with all that is under way, and begin another one.
    fn attachAnew(self: *Poster) !void {
        const stage = self.stage;
        const next = stage.reader.findAttachment(stage.reader.attach(&stage.owner.home).?).?;
        stage.reader.detach(stage.of);
        stage.of = next;
        try testing.expect(next.carriers != 0);
    }
};

fn race(carriers: u32) !void {
    var stage = try Stage.initWith(LANES * LANE_BYTES + 8, carriers);
    defer stage.deinit();
    const local = try testing.allocator.alloc(u8, LANES * LANE_BYTES);
    defer testing.allocator.free(local);
    @memset(local, 5);
    var changer = Changer{ .stage = &stage };
    var poster = Poster{ .stage = &stage, .local = local };
    const thread = try std.Thread.spawn(.{}, Changer.run, .{&changer});

    var round: usize = 0;
    var attachments: u32 = 1;
    while (poster.ended < TRANSFERS or changer.changes.load(.monotonic) == 0) : (round += 1) {
        try poster.post(round);
        poster.poll();
        if (poster.ended < attachments * TRANSFERS_AN_ATTACHMENT) continue;
        try poster.attachAnew();
        attachments += 1;
    }
    try testing.expectEqual(0, poster.revoked);
    changer.revoke_now.store(true, .release);
    while (poster.revoked == 0) {
        try poster.post(0);
        poster.poll();
    }
    while (poster.isBusy()) poster.poll();
    thread.join();

    try testing.expectEqual(0, poster.other);
    try testing.expect(poster.given_up > 0);
}

test "transfers over tcp, while the owner changes other grants and then revokes theirs" {
    try race(attachment.TCP);
}

test "transfers by mapped memory, while the owner changes other grants and then revokes theirs" {
    try race(attachment.SHM);
}

test "transfers by process_vm_readv, while the owner changes other grants and then revokes theirs" {
    try race(attachment.CMA);
}
