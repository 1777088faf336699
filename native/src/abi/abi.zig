//! Every function of `trimesh.h`: checks arguments, finds handles, calls the bus. No logic of its own.

const std = @import("std");
const arms = @import("../rings/arms.zig");
const body = @import("../protocol/body.zig");
const bus_file = @import("../links/bus.zig");
const crossing = @import("../protocol/crossing.zig");
const faults = @import("../protocol/faults.zig");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const link = @import("../links/link.zig");
const loading = @import("../system/loading.zig");
const records = @import("../protocol/record.zig");
const session = @import("../protocol/session.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");

const Bus = bus_file.Bus;
const Link = link.Link;

/// Those that a fork has to know.
const buses = @import("fork_registry.zig").ForkRegistry(Bus);

/// A broken promise inside the library ends the process with a word, not with a half-working one.
pub const panic = std.debug.FullPanic(struct {
    fn panic(message: []const u8, _: ?usize) noreturn {
        @branchHint(.cold);
        sys.complain("trimesh: broken promise in the native library, please report: ");
        sys.complain(message);
        sys.complain("\n");
        std.process.abort();
    }
}.panic);

// ---- the library ----

export fn tm_abi_version() u32 {
    return limits.ABI_VERSION;
}

export fn tm_limit(name: ?[*:0]const u8) i64 {
    return limits.lookup(std.mem.span(name orelse return -1)) orelse -1;
}

// ---- the bus ----

const BusOptions = extern struct {
    epoch: u64,
    host: u64,
    links_max: u32,
    ring_bytes: u32,
    beat_ms: u32,
    lease_ms: u32,
    stall_ms: u32,
    spin_us: u32,
};

export fn tm_bus_create(options: ?*const BusOptions, bus_out: ?*?*Bus) i32 {
    const o = options orelse return status.ERR_ARGUMENT;
    const out = bus_out orelse return status.ERR_ARGUMENT;
    out.* = null;
    if (o.epoch == 0) return status.ERR_ARGUMENT;
    if (o.links_max == 0 or o.links_max > limits.LINKS_MAX) return status.ERR_ARGUMENT;
    if (!std.math.isPowerOfTwo(@max(1, o.ring_bytes))) return status.ERR_ARGUMENT;
    if (o.ring_bytes < limits.RING_BYTES or o.ring_bytes > limits.RING_BYTES_MAX) return status.ERR_ARGUMENT;
    if (o.beat_ms == 0 or o.beat_ms > limits.BEAT_MS_MAX) return status.ERR_ARGUMENT;
    if (o.lease_ms < 2 * o.beat_ms or o.lease_ms > limits.BEAT_MS_MAX) return status.ERR_ARGUMENT;
    if (o.stall_ms > limits.BEAT_MS_MAX) return status.ERR_ARGUMENT;
    if (o.spin_us > limits.SPIN_US_MAX) return status.ERR_ARGUMENT;
    crossing.use(loading.symbol(null, "memcpy"));
    const rc = Bus.create(.{
        .epoch = o.epoch,
        .host = o.host,
        .links_max = o.links_max,
        .ring_bytes = o.ring_bytes,
        .beat_ms = o.beat_ms,
        .lease_ms = o.lease_ms,
        .stall_ms = o.stall_ms,
        .spin_us = o.spin_us,
    }, out);
    if (rc < 0) return rc;
    if (!buses.add(out.*.?)) {
        out.*.?.destroy();
        out.* = null;
        return status.ERR_LIMIT;
    }
    return status.OK;
}

export fn tm_bus_destroy(bus: ?*Bus) i32 {
    const self = bus orelse return status.ERR_ARGUMENT;
    if (self.isForked()) return status.ERR_FORKED;
    buses.remove(self);
    self.destroy();
    return status.OK;
}

/// The bus of a call, or why there is none.
fn live(bus: ?*Bus, why: *i32) ?*Bus {
    const self = bus orelse {
        why.* = status.ERR_ARGUMENT;
        return null;
    };
    if (self.isForked()) { // BU-3
        why.* = status.ERR_FORKED;
        return null;
    }
    return self;
}

export fn tm_bus_bell(bus: ?*Bus) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    return self.common.bell.fd;
}

export fn tm_lifeline_add(bus: ?*Bus, pidfd: i32) i32 {
    var rc: i32 = 0;
    const self = live(bus, &rc) orelse return rc;
    self.reactor.addLifeline(pidfd, &rc) catch |problem| return switch (problem) {
        error.Full => status.ERR_LIMIT,
        error.System => status.ofErrno(rc),
    };
    return status.OK;
}

// ---- links ----

const LinkOptions = extern struct {
    peer_epoch: u64,
    fd: i32,
    kind: u32,
    lease: u32,
    lease_ms: u32,
    hello_ms: u32,
    zero: u32,
};

export fn tm_link_open(bus: ?*Bus, options: ?*const LinkOptions, link_out: ?*u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const o = options orelse return status.ERR_ARGUMENT;
    const out = link_out orelse return status.ERR_ARGUMENT;
    const kind = std.enums.fromInt(records.Kind, o.kind) orelse return status.ERR_ARGUMENT;
    if (o.fd < 0 or o.lease > 1 or o.zero != 0) return status.ERR_ARGUMENT;
    const is_short = o.lease_ms != 0 and o.lease_ms < 2 * self.common.beat_ms;
    if (is_short or o.lease_ms > limits.BEAT_MS_MAX) return status.ERR_ARGUMENT;
    const watched = bus_file.Watched{ .lease = o.lease == 1, .lease_ms = o.lease_ms, .hello_ms = o.hello_ms };
    return self.openLink(o.fd, kind, watched, o.peer_epoch, out);
}

export fn tm_link_watch_pid(bus: ?*Bus, id: u32, pidfd: i32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    return self.watch(one, pidfd);
}

export fn tm_link_leave(bus: ?*Bus, id: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    one.leaving = true;
    return status.OK;
}

export fn tm_link_close(bus: ?*Bus, id: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    return self.closeLink(one);
}

export fn tm_link_free(bus: ?*Bus, id: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    self.freeLink(one);
    return status.OK;
}

const LinkInfo = extern struct {
    peer_epoch: u64,
    peer_host: u64,
    peer_pid: u32,
    view_bytes: u32,
    view: [*]const u8,
    detail: [*]const u8,
    messages_sent: u64,
    messages_received: u64,
    bytes_sent: u64,
    bytes_received: u64,
    frames_dropped: u64,
};

export fn tm_link_get_info(bus: ?*Bus, id: u32, info_out: ?*LinkInfo) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    const out = info_out orelse return status.ERR_ARGUMENT;
    out.* = .{
        .peer_epoch = one.inbound.epoch,
        .peer_host = if (one.inbound.epoch == 0) 0 else one.peer.host,
        .peer_pid = one.peer_pid,
        .view_bytes = one.rx.map.viewBytes(),
        .view = one.rx.map.base,
        .detail = &one.detail,
        .messages_sent = one.outbound.messages,
        .messages_received = one.inbound.messages,
        .bytes_sent = one.outbound.bytes,
        .bytes_received = one.inbound.bytes,
        .frames_dropped = one.inbound.frames_dropped,
    };
    return status.OK;
}

// ---- sending ----

/// The message that arguments describe, checked.
fn messageOf(
    head: ?[*]const u8,
    head_size: u32,
    bodies: ?[*]session.Span,
    n_bodies: u32,
    why: *i32,
) ?session.Message {
    why.* = status.ERR_TOO_LARGE;
    if (head_size > limits.HEAD_BYTES_MAX or n_bodies > limits.BODIES_MAX) return null;
    why.* = status.ERR_ARGUMENT;
    if ((head == null and head_size > 0) or (bodies == null and n_bodies > 0)) return null;
    var total: u64 = 0;
    const spans: []session.Span = if (n_bodies == 0) &.{} else bodies.?[0..n_bodies];
    for (spans) |span| {
        if (span.bytes == null and span.size > 0) return null;
        if (span.size > limits.MESSAGE_BYTES_MAX - total) {
            why.* = status.ERR_TOO_LARGE;
            return null;
        }
        total += span.size;
    }
    return .{ .head = if (head_size == 0) "" else head.?[0..head_size], .bodies = spans, .total = total };
}

export fn tm_link_send(
    bus: ?*Bus,
    id: u32,
    lane: u32,
    head: ?[*]const u8,
    head_size: u32,
    bodies: ?[*]session.Span,
    n_bodies: u32,
    cursor_io: ?*session.Cursor,
) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const one = self.find(id) orelse return status.ERR_LINK;
    const cursor = cursor_io orelse return status.ERR_ARGUMENT;
    const CHUNK = 2;
    if (lane > CHUNK or (lane == 0 and n_bodies > 0) or (lane == CHUNK and n_bodies == 0)) return status.ERR_ARGUMENT;
    var message = messageOf(head, head_size, bodies, n_bodies, &why) orelse return why;
    message.chunk = lane == CHUNK;
    return self.send(one, if (lane == 0) .control else .data, message, cursor);
}

export fn tm_link_send_head(bus: ?*Bus, id: u32, lane: u32, head: ?[*]const u8, head_size: u32) i32 {
    var cursor = session.Cursor{};
    return tm_link_send(bus, id, lane, head, head_size, null, 0, &cursor);
}

export fn tm_links_send(
    bus: ?*Bus,
    ids: ?[*]const u32,
    n_links: u32,
    head: ?[*]const u8,
    head_size: u32,
    bodies: ?[*]session.Span,
    n_bodies: u32,
    statuses_out: ?[*]i32,
    cursors_out: ?[*]session.Cursor,
) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    if (n_links == 0) return status.OK;
    if (ids == null or statuses_out == null or cursors_out == null) return status.ERR_ARGUMENT;
    const message = messageOf(head, head_size, bodies, n_bodies, &why) orelse return why;
    for (ids.?[0..n_links], statuses_out.?[0..n_links], cursors_out.?[0..n_links]) |id, *rc, *cursor| {
        cursor.* = .{};
        const one = self.find(id) orelse {
            rc.* = status.ERR_LINK;
            continue;
        };
        rc.* = self.send(one, .data, message, cursor);
    }
    return status.OK;
}

export fn tm_bodies_done(bus: ?*Bus, bodies: ?[*]session.Span, n_bodies: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    if (n_bodies == 0) return status.OK;
    if (n_bodies > limits.BODIES_MAX) return status.ERR_TOO_LARGE;
    self.pool.messageDone((bodies orelse return status.ERR_ARGUMENT)[0..n_bodies]);
    return status.OK;
}

export fn tm_flush(bus: ?*Bus) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    self.flush();
    return status.OK;
}

// ---- receiving ----

export fn tm_poll(bus: ?*Bus, records_out: ?[*]records.Record, max: u32, n_out: ?*u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const into = records_out orelse return status.ERR_ARGUMENT;
    const out = n_out orelse return status.ERR_ARGUMENT;
    out.* = 0;
    if (max == 0) return status.ERR_ARGUMENT;
    const rc = self.poll(into[0..max]);
    if (rc < 0) return rc;
    out.* = @intCast(rc);
    return status.OK;
}

export fn tm_after_wait(bus: ?*Bus, records_out: ?[*]records.Record, max: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const into = records_out orelse return status.ERR_ARGUMENT;
    if (max == 0) return status.ERR_ARGUMENT;
    return self.afterWait(into[0..max]);
}

export fn tm_wait_here(bus: ?*Bus, poller: i32, most_us: u32, records_out: ?[*]records.Record, max: u32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const into = records_out orelse return status.ERR_ARGUMENT;
    if (max == 0 or poller < 0) return status.ERR_ARGUMENT;
    return self.waitFor(poller, @as(u64, most_us) * 1_000, into[0..max]);
}

export fn tm_has_news(bus: ?*Bus) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    return @intFromBool(self.hasNews());
}

export fn tm_poll_done(bus: ?*Bus) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    self.pollDone();
    return status.OK;
}

const Body = extern struct { bytes: [*]u8, mapped: u64 };

export fn tm_body_take(bus: ?*Bus, id: u32, word: u64, body_out: ?*Body) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    const out = body_out orelse return status.ERR_ARGUMENT;
    const one = self.find(id) orelse return status.ERR_LINK;
    if (one.kind != .local) return status.ERR_ARGUMENT;
    const lent = self.takeBody(one, word) orelse return status.ERR_PEER;
    out.* = .{ .bytes = lent.pages, .mapped = lent.bytes };
    return status.OK;
}

export fn tm_body_give_back(bus: ?*Bus, id: u32, word: u64, bytes: ?[*]u8, mapped: u64) i32 {
    const entry = body.Entry.decode(word) orelse return status.ERR_ARGUMENT;
    const ref = entry.segment orelse return status.ERR_ARGUMENT;
    const pages = @intFromPtr(bytes orelse return status.ERR_ARGUMENT);
    if (pages % 4096 != 0 or mapped % 4096 != 0 or mapped == 0) return status.ERR_ARGUMENT;
    if (bus == null) {
        sys.unmap(@ptrFromInt(pages), @intCast(mapped));
        return status.OK;
    }
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    self.giveBack(id, ref, pages, mapped);
    return status.OK;
}

export fn tm_arm(bus: ?*Bus) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    return @intFromBool(self.arm());
}

export fn tm_before_wait(bus: ?*Bus, poller: i32) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    if (poller < -1) return status.ERR_ARGUMENT;
    return @intFromEnum(self.beforeWait(poller));
}

// ---- faults that a test has planned ----

export fn tm_faults_create(secret: u64, fd_out: ?*i32) i32 {
    const out = fd_out orelse return status.ERR_ARGUMENT;
    out.* = arms.newTable(secret);
    return if (out.* < 0) status.ofErrno(out.*) else status.OK;
}

export fn tm_bus_arm_faults(bus: ?*Bus, fd: i32, secret: u64) i32 {
    var why: i32 = 0;
    const self = live(bus, &why) orelse return why;
    return self.armFaults(fd, secret);
}

/// The table of an armed bus.
fn tableOf(bus: ?*Bus, why: *i32) ?*faults.Table {
    const self = live(bus, why) orelse return null;
    const one = self.common.arms orelse {
        why.* = status.ERR_STATE;
        return null;
    };
    return one.table;
}

export fn tm_fault_add(bus: ?*Bus, fault: ?*const faults.Rule, index_out: ?*u32) i32 {
    var why: i32 = 0;
    const table = tableOf(bus, &why) orelse return why;
    const rule = fault orelse return status.ERR_ARGUMENT;
    const out = index_out orelse return status.ERR_ARGUMENT;
    const kind = std.enums.fromInt(faults.Kind, rule.kind) orelse return status.ERR_ARGUMENT;
    if (rule.target == 0 or (rule.source == 0) != (kind == .refuse)) return status.ERR_ARGUMENT;
    if (!(rule.amount >= 0)) return status.ERR_ARGUMENT;
    if (kind == .refuse and (rule.nth == 0 or (rule.code != arms.ENOSPC and rule.code != arms.EMFILE)))
        return status.ERR_ARGUMENT;
    out.* = table.add(rule.*) orelse return status.ERR_LIMIT;
    return status.OK;
}

export fn tm_fault_heal(bus: ?*Bus, index: u32) i32 {
    var why: i32 = 0;
    const table = tableOf(bus, &why) orelse return why;
    if (index >= table.rows.len) return status.ERR_ARGUMENT;
    table.heal(index);
    return status.OK;
}

const FaultCount = extern struct { hits: u64, first_ns: u64 };

export fn tm_fault_get_count(bus: ?*Bus, index: u32, count_out: ?*FaultCount) i32 {
    var why: i32 = 0;
    const table = tableOf(bus, &why) orelse return why;
    const out = count_out orelse return status.ERR_ARGUMENT;
    if (index >= table.rows.len) return status.ERR_ARGUMENT;
    const row = &table.rows[index];
    out.hits = @atomicLoad(u64, &row.hits, .acquire);
    out.first_ns = @atomicLoad(u64, &row.first_ns, .monotonic);
    return status.OK;
}

comptime {
    _ = @import("abi_mover.zig");
    _ = @import("abi_relay.zig");
    _ = @import("abi_tls.zig");
    std.debug.assert(@sizeOf(faults.Rule) == 56);
    std.debug.assert(@sizeOf(records.Record) == 32);
    std.debug.assert(@sizeOf(session.Span) == 24 and @sizeOf(session.Cursor) == 16);
    std.debug.assert(@sizeOf(LinkOptions) == 32 and @sizeOf(BusOptions) == 40);
}
