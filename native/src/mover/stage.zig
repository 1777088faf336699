//! Two movers in one process: each is to the other what another process would be.

const std = @import("std");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("../copying/transfer.zig");
const attachment = @import("../grants/attachment.zig");
const views = @import("../grants/view.zig");
const Mover = @import("mover.zig").Mover;

const testing = std.testing;

/// An owner with one block, all of it granted, and a reader that is attached to it.
pub const Stage = struct {
    owner: *Mover,
    reader: *Mover,
    of: *attachment.Attachment,
    number: u32,
    block: []u8,
    name: transfer.GrantName,

    /// All carriers.
    pub fn init(size: usize) !Stage {
        return initWith(size, attachment.ALL);
    }

    /// The reader may use these.
    pub fn initWith(size: usize, carriers: u32) !Stage {
        var self: Stage = undefined;
        self.owner = try newMover(1, attachment.ALL, &.{ 127, 0, 0, 1 });
        self.reader = try newMover(2, carriers, "");
        self.number = @intCast(self.owner.takeBlock(size));
        self.block = self.owner.blocks.find(self.number).?.pages.?[0..size];
        for (self.block, 0..) |*byte, i| byte.* = @truncate(i *% 31);
        self.name = .{ .place = 0, .generation = 0, .secret = @splat(9) };
        try testing.expectEqual(status.OK, self.owner.grant(self.block.ptr, size, 3, self.number, &self.name));
        self.of = self.reader.findAttachment(self.reader.attach(&self.owner.home).?).?;
        return self;
    }

    fn newMover(epoch: u64, carriers: u32, address: []const u8) !*Mover {
        var out: ?*Mover = null;
        try testing.expectEqual(status.OK, Mover.create(.{
            .epoch = epoch,
            .host = 5,
            .carriers = carriers,
            .address = address,
            .ucx = "",
        }, &out));
        return out.?;
    }

    /// Destroy both.
    pub fn deinit(self: *Stage) void {
        self.reader.destroy();
        _ = self.owner.revoke(&self.name);
        _ = self.owner.drop(&self.name);
        _ = self.owner.giveBackBlock(self.number);
        self.owner.destroy();
    }

    /// Open a view of the first bytes of the range.
    pub fn openView(self: *Stage, size: usize, mode: views.Mode, out: *views.Opened) i32 {
        const asked = self.request(.read, self.block[0..size]);
        const wanted = asked.wanted();
        return self.reader.openView(self.of, &wanted, mode, out);
    }

    /// A transfer between the beginning of the range and `ours`.
    pub fn request(self: *Stage, kind: transfer.Kind, ours: []u8) transfer.Request {
        return .{
            .attachment = 0,
            .kind = @intFromEnum(kind),
            .grant = self.name,
            .offset = 0,
            .size = if (kind.isAtomic()) 8 else ours.len,
            .local = if (kind.isAtomic()) null else ours.ptr,
            .operand = 1,
            .expected = 0,
            .exported = null,
            .exported_size = 0,
            .carriers = attachment.ALL,
        };
    }

    /// Begin it, as T0 of the reader.
    pub fn begin(self: *Stage, asked: transfer.Request, done: *transfer.Done) i32 {
        done.* = .{ .id = 0, .status = status.OK, .carrier = 0, .value = 0 };
        return self.reader.begin(&asked, self.of, done);
    }

    /// Wait for one record.
    pub fn wait(self: *Stage) transfer.Done {
        var done: [1]transfer.Done = undefined;
        while (self.reader.poll(&done) == 0) sys.threadYield();
        return done[0];
    }
};
