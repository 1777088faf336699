//! The functions of the part of `trimesh.h` that is about TLS: checks arguments, finds handles, calls the session.

const std = @import("std");
const credentials = @import("../tls/credentials.zig");
const engine = @import("../tls/engine.zig");
const hellos = @import("../tls/hello.zig");
const limits = @import("../limits.zig");
const session = @import("../tls/session.zig");
const status = @import("../status.zig");
const tls = @import("../tls/tls.zig");

const Tls = tls.Tls;
const Held = tls.Held;

export fn tm_tls_library(about_out: ?*[*:0]const u8) i32 {
    const out = about_out orelse return status.ERR_ARGUMENT;
    const found = tls.library();
    out.* = @ptrCast(&found.library.about);
    return if (found.method != null) status.OK else status.ERR_UNREACHABLE;
}

const Options = extern struct {
    chain: ?[*]const u8,
    key: ?[*]const u8,
    authority: ?[*]const u8,
    chain_size: u32,
    key_size: u32,
    authority_size: u32,
    takes_joins: u32,
    is_plain: u32,
    reserved: u32,
    pin: [32]u8,
};

fn text(bytes: ?[*]const u8, size: u32) []const u8 {
    return if (bytes) |some| some[0..size] else "";
}

export fn tm_tls_create(options: ?*const Options, tls_out: ?*?*Tls, why_out: ?*[*]const u8) i32 {
    const o = options orelse return status.ERR_ARGUMENT;
    const out = tls_out orelse return status.ERR_ARGUMENT;
    const why = why_out orelse return status.ERR_ARGUMENT;
    out.* = null;
    why.* = "";
    if (o.takes_joins > 1 or o.is_plain > 1) return status.ERR_ARGUMENT;
    if (o.is_plain == 1) {
        if (o.chain_size + o.key_size + o.authority_size + o.takes_joins > 0) return status.ERR_ARGUMENT;
        return Tls.createPlain(out);
    }
    var words: []const u8 = "";
    const rc = Tls.create(.{
        .chain = text(o.chain, o.chain_size),
        .key = text(o.key, o.key_size),
        .authority = text(o.authority, o.authority_size),
        .pin = o.pin,
        .takes_joins = o.takes_joins == 1,
    }, out, &words);
    if (rc < 0 and words.len > 0) why.* = words.ptr; // literals, which end by zero
    return rc;
}

export fn tm_tls_destroy(it: ?*Tls) i32 {
    const self = it orelse return status.ERR_ARGUMENT;
    if (self.isForked()) return status.ERR_FORKED;
    return self.destroy();
}

const SessionOptions = extern struct {
    expected: u64,
    role: u32,
    has_names: u32,
    hello: hellos.Hello,
};

export fn tm_tls_open(it: ?*Tls, options: ?*const SessionOptions, session_out: ?*?*Held) i32 {
    const self = it orelse return status.ERR_ARGUMENT;
    const o = options orelse return status.ERR_ARGUMENT;
    const out = session_out orelse return status.ERR_ARGUMENT;
    out.* = null;
    if (self.isForked()) return status.ERR_FORKED;
    const role = std.enums.fromInt(session.Role, o.role) orelse return status.ERR_ARGUMENT;
    o.hello.check() catch return status.ERR_ARGUMENT;
    if (o.has_names > 1) return status.ERR_ARGUMENT;
    return self.open(.{
        .role = role,
        .hello = o.hello,
        .has_names = o.has_names == 1,
        .expected = o.expected,
    }, out);
}

/// The session of a call, or why there is none.
fn live(it: ?*Held, why: *i32) ?*Held {
    const self = it orelse {
        why.* = status.ERR_ARGUMENT;
        return null;
    };
    if (self.tls.isForked()) {
        why.* = status.ERR_FORKED;
        return null;
    }
    return self;
}

export fn tm_tls_free(it: ?*Held) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    self.free();
    return status.OK;
}

export fn tm_tls_step(it: ?*Held, io: ?*session.Io) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    self.session.step(io orelse return status.ERR_ARGUMENT);
    return self.session.status;
}

export fn tm_tls_tick(it: ?*Held, ms: u32) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    self.session.tick(ms);
    return self.session.status;
}

export fn tm_tls_prove(it: ?*Held, token: ?*const [16]u8, proof: ?*const [32]u8) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    return self.session.prove(token orelse return status.ERR_ARGUMENT, proof orelse return status.ERR_ARGUMENT);
}

export fn tm_tls_answer(it: ?*Held, verdict: u32) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    return self.session.answer(std.enums.fromInt(hellos.Verdict, verdict) orelse return status.ERR_ARGUMENT);
}

export fn tm_tls_close(it: ?*Held) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    return self.session.close();
}

export fn tm_tls_end(it: ?*Held) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    self.session.end();
    return self.session.status;
}

const Info = extern struct {
    state: u32,
    status: i32,
    detail: [*]const u8,
    is_certified: u32,
    name_size: u32,
    name: [*]const u8,
    exporter: [engine.EXPORTER_BYTES]u8,
    peer: hellos.Hello,
    half_open: u32,
    reserved: u32,
};

export fn tm_tls_get_info(it: ?*Held, info_out: ?*Info) i32 {
    var why: i32 = 0;
    const self = live(it, &why) orelse return why;
    const out = info_out orelse return status.ERR_ARGUMENT;
    const one = &self.session;
    out.* = .{
        .state = @intFromEnum(one.state),
        .status = one.status,
        .detail = &one.detail,
        .is_certified = @intFromBool(one.peer.is_certified),
        .name_size = @intCast(one.peer.name.len),
        .name = one.peer.name.ptr,
        .exporter = @splat(0),
        .peer = one.peer_hello,
        .half_open = self.tls.half_open.count,
        .reserved = 0,
    };
    if (one.state != .handshake) _ = one.engine.exporter(&out.exporter);
    return status.OK;
}

comptime {
    std.debug.assert(@sizeOf(Options) == 80 and @sizeOf(SessionOptions) == 16 + @sizeOf(hellos.Hello));
    std.debug.assert(@sizeOf(hellos.Hello) == 184 and @sizeOf(session.Io) == 96 and @sizeOf(Info) == 256);
    std.debug.assert(hellos.TEXT_BYTES == 32 and limits.TLS_HELLO_BYTES >= 192);
}
