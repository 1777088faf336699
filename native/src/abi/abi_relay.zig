//! The functions of the part of `trimesh.h` that is about sessions between hosts: checks arguments, finds handles,
//! calls the relay.

const std = @import("std");
const limits = @import("../limits.zig");
const peers = @import("../relay/peer.zig");
const status = @import("../status.zig");
const Held = @import("../tls/tls.zig").Held;
const Relay = @import("../relay/relay.zig").Relay;

/// Those that a fork has to know.
const relays = @import("fork_registry.zig").ForkRegistry(Relay);

/// The relay of a call, or why there is none.
fn live(relay: ?*Relay, why: *i32) ?*Relay {
    const self = relay orelse {
        why.* = status.ERR_ARGUMENT;
        return null;
    };
    if (self.isForked()) {
        why.* = status.ERR_FORKED;
        return null;
    }
    return self;
}

export fn tm_relay_create(relay_out: ?*?*Relay) i32 {
    const out = relay_out orelse return status.ERR_ARGUMENT;
    out.* = null;
    const rc = Relay.create(out);
    if (rc < 0) return rc;
    if (relays.add(out.*.?)) return status.OK;
    out.*.?.destroy();
    out.* = null;
    return status.ERR_LIMIT;
}

export fn tm_relay_destroy(relay: ?*Relay) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    relays.remove(self);
    self.destroy();
    return status.OK;
}

export fn tm_relay_bell(relay: ?*Relay) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    return self.bell;
}

export fn tm_relay_begin(relay: ?*Relay, number: u64, lease_ms: u32, control: i32, session_out: ?*u32) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    const out = session_out orelse return status.ERR_ARGUMENT;
    if (control < 0 or lease_ms < limits.HOST_TICK_MS) return status.ERR_ARGUMENT;
    return self.begin(.{
        .is_dialler = number != 0,
        .session = number,
        .lease_ticks = std.math.divCeil(u32, lease_ms, limits.HOST_TICK_MS) catch unreachable, // not by zero
    }, control, out);
}

fn slice(bytes: ?[*]const u8, size: u32) ?[]const u8 {
    if (size == 0) return "";
    return if (bytes) |from| from[0..size] else null;
}

export fn tm_relay_attach(
    relay: ?*Relay,
    session: u32,
    fd: i32,
    tls: ?*Held,
    wire: ?[*]const u8,
    wire_size: u32,
    plain: ?[*]const u8,
    plain_size: u32,
) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    const encrypted = slice(wire, wire_size) orelse return status.ERR_ARGUMENT;
    const open = slice(plain, plain_size) orelse return status.ERR_ARGUMENT;
    if (fd < 0 or tls == null) return status.ERR_ARGUMENT;
    return self.attach(session, fd, tls, encrypted, open);
}

export fn tm_relay_open(
    relay: ?*Relay,
    session: u32,
    fd: i32,
    purpose: ?[*]const u8,
    size: u32,
    channel_out: ?*u32,
) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    const out = channel_out orelse return status.ERR_ARGUMENT;
    if (fd < 0) return status.ERR_ARGUMENT;
    return self.openChannel(session, fd, slice(purpose, size) orelse return status.ERR_ARGUMENT, out);
}

export fn tm_relay_answer(relay: ?*Relay, session: u32, channel: u32, fd: i32) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    return if (fd < -1) status.ERR_ARGUMENT else self.answer(session, channel, fd);
}

export fn tm_relay_end(relay: ?*Relay, session: u32, how: u32) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    return self.end(session, std.enums.fromInt(Relay.How, how) orelse return status.ERR_ARGUMENT);
}

const Event = extern struct {
    session: u32,
    kind: u32,
    channel: u32,
    number: u32,
    size: u32,
    reserved: u32 = 0,
    bytes: [*]const u8,
};

export fn tm_relay_poll(relay: ?*Relay, event_out: ?*Event) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    const out = event_out orelse return status.ERR_ARGUMENT;
    const one = self.poll() orelse return 0;
    out.* = .{
        .session = one.event.session,
        .kind = @intFromEnum(one.event.kind),
        .channel = one.event.channel,
        .number = one.event.number,
        .size = one.event.size,
        .bytes = one.bytes.ptr,
    };
    return 1;
}

export fn tm_relay_get_counts(relay: ?*Relay, session: u32, counts_out: ?*peers.Counts) i32 {
    var why: i32 = 0;
    const self = live(relay, &why) orelse return why;
    return self.counts(session, counts_out orelse return status.ERR_ARGUMENT);
}

comptime {
    std.debug.assert(@sizeOf(Event) == 32 and @sizeOf(peers.Counts) == 72);
}
