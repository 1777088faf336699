//! The functions of the last part of `trimesh.h`, "bulk data": checks arguments, finds handles, calls the mover.

const std = @import("std");
const grants = @import("../grants/grants.zig");
const ledger = @import("../grants/ledger.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const streaming = @import("../system/streaming.zig");
const sys = @import("../system/sys.zig");
const transfer = @import("../copying/transfer.zig");
const views = @import("../grants/view.zig");
const attachment = @import("../grants/attachment.zig");
const Mover = @import("../mover/mover.zig").Mover;

/// Those that a fork has to know.
const movers = @import("fork_registry.zig").ForkRegistry(Mover);

// ---- the mover ----

const Options = extern struct {
    epoch: u64,
    host: u64,
    carriers: u32,
    address_size: u32,
    address: [16]u8,
    ucx: ?[*:0]const u8,
};

export fn tm_mover_create(options: ?*const Options, mover_out: ?*?*Mover) i32 {
    const o = options orelse return status.ERR_ARGUMENT;
    const out = mover_out orelse return status.ERR_ARGUMENT;
    out.* = null;
    if (o.epoch == 0 or o.host == 0 or o.carriers & ~attachment.ALL != 0) return status.ERR_ARGUMENT;
    if (o.address_size != 0 and o.address_size != 4 and o.address_size != 16) return status.ERR_ARGUMENT;
    const rc = Mover.create(.{
        .epoch = o.epoch,
        .host = o.host,
        .carriers = o.carriers,
        .address = o.address[0..o.address_size],
        .ucx = if (o.ucx) |path| std.mem.span(path) else "",
    }, out);
    if (rc < 0) return rc;
    if (!movers.add(out.*.?)) {
        out.*.?.destroy();
        out.* = null;
        return status.ERR_LIMIT;
    }
    return status.OK;
}

/// The mover of a call, or why there is none.
fn live(mover: ?*Mover, why: *i32) ?*Mover {
    const self = mover orelse {
        why.* = status.ERR_ARGUMENT;
        return null;
    };
    if (self.isForked()) { // MO-2
        why.* = status.ERR_FORKED;
        return null;
    }
    return self;
}

export fn tm_mover_destroy(mover: ?*Mover) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    movers.remove(self);
    self.destroy();
    return status.OK;
}

export fn tm_mover_home(mover: ?*Mover, home_out: ?*attachment.Home) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const out = home_out orelse return status.ERR_ARGUMENT;
    out.* = self.home;
    return status.OK;
}

export fn tm_mover_bell(mover: ?*Mover) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return self.thread.bell;
}

// ---- granting ----

export fn tm_grant_add(
    mover: ?*Mover,
    bytes: ?[*]u8,
    size: u64,
    rights: u32,
    block: u32,
    memory: u32,
    grant_io: ?*transfer.GrantName,
) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const grant = grant_io orelse return status.ERR_ARGUMENT;
    if (size == 0 or rights == 0 or rights & ~(ledger.RIGHT_READ | ledger.RIGHT_WRITE) != 0) return status.ERR_ARGUMENT;
    const start = bytes orelse return status.ERR_ARGUMENT;
    const kind = std.enums.fromInt(grants.Memory, memory) orelse return status.ERR_ARGUMENT;
    if (kind == .host) return self.grant(start, size, rights, block, grant);
    if (block != 0) return status.ERR_ARGUMENT;
    return self.grantDevice(start, size, rights, kind, grant);
}

export fn tm_grant_revoke(mover: ?*Mover, grant: ?*const transfer.GrantName) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return self.revoke(grant orelse return status.ERR_ARGUMENT);
}

export fn tm_grant_drop(mover: ?*Mover, grant: ?*const transfer.GrantName) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return self.drop(grant orelse return status.ERR_ARGUMENT);
}

export fn tm_grant_export(
    mover: ?*Mover,
    grant: ?*const transfer.GrantName,
    bytes_out: ?[*]u8,
    max: u32,
    size_out: ?*u32,
) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const name = grant orelse return status.ERR_ARGUMENT;
    const into = bytes_out orelse return status.ERR_ARGUMENT;
    const out = size_out orelse return status.ERR_ARGUMENT;
    out.* = 0;
    const rc = self.exportGrant(name, into[0..max]);
    if (rc < 0) return rc;
    out.* = @intCast(rc);
    return status.OK;
}

const Adapters = extern struct { usable: u32, memory: u32, about: [*:0]const u8, why_no_device: [*:0]const u8 };

export fn tm_mover_get_adapters(mover: ?*Mover, adapters_out: ?*Adapters) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const out = adapters_out orelse return status.ERR_ARGUMENT;
    out.* = .{ .usable = 0, .memory = 0, .about = "not allowed here", .why_no_device = "ucx is not allowed here" };
    const ucx = self.ucx orelse return status.OK;
    out.usable = @intFromBool(ucx.isOpen());
    out.memory = ucx.memory();
    out.about = ucx.about.get();
    out.why_no_device = ucx.whyNoDevice();
    return status.OK;
}

const Block = extern struct { bytes: [*]u8, size: u64, number: u32, reserved: u32 };

export fn tm_block_take(mover: ?*Mover, size: u64, block_out: ?*Block) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const out = block_out orelse return status.ERR_ARGUMENT;
    if (size == 0 or size > limits.BLOCK_BYTES_MAX) return status.ERR_ARGUMENT;
    const number = self.takeBlock(size);
    if (number < 0) return number;
    const one = self.blocks.find(@intCast(number)).?; // just taken
    out.* = .{ .bytes = one.pages.?, .size = one.bytes, .number = @intCast(number), .reserved = 0 };
    return status.OK;
}

export fn tm_block_give_back(mover: ?*Mover, number: u32) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return self.giveBackBlock(number);
}

// ---- reaching ----

export fn tm_attachment_open(mover: ?*Mover, home: ?*const attachment.Home, attachment_out: ?*u32) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const out = attachment_out orelse return status.ERR_ARGUMENT;
    out.* = self.attach(home orelse return status.ERR_ARGUMENT) orelse return status.ERR_LIMIT;
    return status.OK;
}

export fn tm_attachment_close(mover: ?*Mover, id: u32) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    self.detach(self.findAttachment(id) orelse return status.ERR_ARGUMENT);
    return status.OK;
}

const AttachmentInfo = extern struct { carriers: u32, gone: u32, why_not: [*]const u8 };

export fn tm_attachment_get_info(mover: ?*Mover, id: u32, info_out: ?*AttachmentInfo) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const one = self.findAttachment(id) orelse return status.ERR_ARGUMENT;
    const out = info_out orelse return status.ERR_ARGUMENT;
    out.* = .{
        .gone = @intFromBool(one.hasEnded()),
        .carriers = one.carriers,
        .why_not = &one.why_not.text,
    };
    return status.OK;
}

export fn tm_transfer_begin(mover: ?*Mover, request: ?*const transfer.Request, done_out: ?*transfer.Done) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const asked = request orelse return status.ERR_ARGUMENT;
    const done = done_out orelse return status.ERR_ARGUMENT;
    done.* = .{ .id = 0, .status = status.OK, .carrier = 0, .value = 0 };
    const kind = std.enums.fromInt(transfer.Kind, asked.kind) orelse return status.ERR_ARGUMENT;
    const one = self.findAttachment(asked.attachment) orelse return status.ERR_ARGUMENT;
    _ = std.enums.fromInt(grants.Memory, asked.memory) orelse return status.ERR_ARGUMENT;
    if (kind.isAtomic()) {
        if (asked.size != 8 or asked.offset % 8 != 0) return status.ERR_ARGUMENT;
    } else if (asked.size == 0 or asked.local == null) return status.ERR_ARGUMENT;
    if (@intFromPtr(asked.local) +% asked.size < asked.size) return status.ERR_ARGUMENT;
    return self.begin(asked, one, done);
}

export fn tm_transfer_give_up(mover: ?*Mover, id: u64) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return if (self.thread.giveUp(id)) status.OK else status.ERR_ARGUMENT;
}

export fn tm_mover_poll(mover: ?*Mover, done_out: ?[*]transfer.Done, max: u32, n_out: ?*u32) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const into = done_out orelse return status.ERR_ARGUMENT;
    const out = n_out orelse return status.ERR_ARGUMENT;
    if (max == 0) return status.ERR_ARGUMENT;
    out.* = self.poll(into[0..max]);
    return status.OK;
}

// ---- views ----

export fn tm_view_open(
    mover: ?*Mover,
    id: u32,
    grant: ?*const transfer.GrantName,
    offset: u64,
    size: u64,
    mode: u32,
    view_out: ?*views.Opened,
) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    const out = view_out orelse return status.ERR_ARGUMENT;
    out.* = .{ .bytes = null, .handle = 0 };
    const name = grant orelse return status.ERR_ARGUMENT;
    const one = self.findAttachment(id) orelse return status.ERR_ARGUMENT;
    const how = std.enums.fromInt(views.Mode, mode) orelse return status.ERR_ARGUMENT;
    if (size == 0) return status.ERR_ARGUMENT;
    const rights = if (how == .write) ledger.RIGHT_READ | ledger.RIGHT_WRITE else ledger.RIGHT_READ;
    return self.openView(one, &.{
        .place = name.place,
        .generation = name.generation,
        .secret = name.secret,
        .rights = rights,
        .offset = offset,
        .size = size,
    }, how, out);
}

export fn tm_view_close(mover: ?*Mover, handle: u64) i32 {
    var why: i32 = 0;
    const self = live(mover, &why) orelse return why;
    return if (self.closeView(handle)) status.OK else status.ERR_ARGUMENT;
}

export fn tm_copy_rows(
    into: ?[*]u8,
    into_step: u64,
    from: ?[*]const u8,
    from_step: u64,
    size: u64,
    rows: u64,
    is_huge: u32,
) i32 {
    const to = into orelse return status.ERR_ARGUMENT;
    const source = from orelse return status.ERR_ARGUMENT;
    streaming.copyRows(
        .{ .first = to, .step = @intCast(into_step) },
        .{ .first = source, .step = @intCast(from_step) },
        @intCast(size),
        @intCast(rows),
        is_huge != 0,
    );
    return status.OK;
}

export fn tm_unmap(bytes: ?[*]u8, size: u64) i32 {
    const at = @intFromPtr(bytes orelse return status.ERR_ARGUMENT);
    if (size == 0 or at +% size < at) return status.ERR_ARGUMENT;
    const first = std.mem.alignBackward(u64, at, 4096);
    sys.unmap(@ptrFromInt(first), @intCast(std.mem.alignForward(u64, at + size, 4096) - first));
    return status.OK;
}

comptime {
    std.debug.assert(@sizeOf(Options) == 48 and @sizeOf(attachment.Home) == 56 and @sizeOf(Block) == 24);
    std.debug.assert(@sizeOf(AttachmentInfo) == 16 and @sizeOf(Adapters) == 24 and @sizeOf(views.Opened) == 16);
}
