//! One session of OpenSSL over a `Wire`: what `session.zig` asks of it, and its errors in words.
//!
//! EN-1 OpenSSL reads and writes the caller's memory through a BIO of ours, so nothing is copied but into its record
//! and out of it, and nothing grows.

const std = @import("std");
const limits = @import("../limits.zig");
const openssl = @import("openssl.zig");
const session = @import("session.zig");
const status = @import("../status.zig");
const Credentials = @import("credentials.zig").Credentials;
const Wire = @import("wire.zig").Wire;

const Outcome = session.Outcome;

/// What tokens are bound to: of this session, and known to its two ends only.
const EXPORTER_LABEL = "EXPORTER-trimesh-join";
pub const EXPORTER_BYTES = 32;

/// How OpenSSL reaches a `Wire`. Made once for a library, never given back.
pub fn bioMethod(library: *const openssl.Library) ?*openssl.BioMethod {
    const call = &library.call;
    const method = call.BIO_meth_new(call.BIO_get_new_index() | openssl.BIO_SOURCE_SINK, "trimesh") orelse return null;
    const Bound = struct {
        // OpenSSL gives a BIO and no more; the functions are the same for every session of the process.
        var functions: *const openssl.Functions = undefined;

        fn read(bio: *openssl.Bio, bytes: [*]u8, size: c_int) callconv(.c) c_int {
            functions.BIO_clear_flags(bio, openssl.BIO_RETRY_ALL);
            const wire: *Wire = @ptrCast(@alignCast(functions.BIO_get_data(bio) orelse return -1));
            if (size <= 0) return 0;
            const n = wire.pull(bytes[0..@intCast(size)]);
            if (n > 0) return @intCast(n);
            functions.BIO_set_flags(bio, openssl.BIO_RETRY_READ);
            return -1;
        }

        fn write(bio: *openssl.Bio, bytes: [*]u8, size: c_int) callconv(.c) c_int {
            functions.BIO_clear_flags(bio, openssl.BIO_RETRY_ALL);
            const wire: *Wire = @ptrCast(@alignCast(functions.BIO_get_data(bio) orelse return -1));
            if (size <= 0) return 0;
            const n = wire.push(bytes[0..@intCast(size)]);
            if (n > 0) return @intCast(n);
            functions.BIO_set_flags(bio, openssl.BIO_RETRY_WRITE);
            return -1;
        }

        fn control(_: *openssl.Bio, command: c_int, _: c_long, _: ?*anyopaque) callconv(.c) c_long {
            return if (command == openssl.BIO_FLUSH) 1 else 0;
        }
    };
    Bound.functions = call;
    const is_set = call.BIO_meth_set_read(method, Bound.read) == 1 and
        call.BIO_meth_set_write(method, Bound.write) == 1 and
        call.BIO_meth_set_ctrl(method, Bound.control) == 1;
    return if (is_set) method else null;
}

pub const Engine = struct {
    library: *const openssl.Library,
    ssl: *openssl.Ssl,
    bio: *openssl.Bio,
    name: [limits.TLS_NAME_BYTES]u8 = undefined,
    name_bytes: usize = 0,
    is_certified: bool = false,

    /// Begin a session. Null: there is no memory, or no certificate for a server.
    pub fn init(credentials: *const Credentials, role: session.Role) ?Engine {
        const call = &credentials.library.call;
        const context = switch (role) {
            .client => credentials.client,
            .server => credentials.server orelse return null,
        };
        const ssl = call.SSL_new(context) orelse return null;
        const bio = call.BIO_new(credentials.method) orelse {
            call.SSL_free(ssl);
            return null;
        };
        call.BIO_set_init(bio, 1);
        call.SSL_set_bio(ssl, bio, bio); // both directions; taken over
        switch (role) {
            .client => call.SSL_set_connect_state(ssl),
            .server => call.SSL_set_accept_state(ssl),
        }
        return .{ .library = credentials.library, .ssl = ssl, .bio = bio };
    }

    /// Forget the session and its keys.
    pub fn deinit(self: *Engine) void {
        self.library.call.SSL_free(self.ssl);
    }

    /// Carry the handshake on.
    pub fn handshake(self: *Engine, wire: *Wire) Outcome {
        self.begin(wire);
        const rc = self.library.call.SSL_do_handshake(self.ssl);
        if (rc == 1) return .{ .moved = 0 };
        return self.outcome(rc);
    }

    /// Decrypt into the caller's memory, at most one record.
    pub fn read(self: *Engine, wire: *Wire, into: []u8) Outcome {
        self.begin(wire);
        var n: usize = 0;
        const rc = self.library.call.SSL_read_ex(self.ssl, into.ptr, into.len, &n);
        return if (rc == 1) .{ .moved = n } else self.outcome(rc);
    }

    /// Encrypt the caller's memory as one record.
    pub fn write(self: *Engine, wire: *Wire, from: []const u8) Outcome {
        self.begin(wire);
        var n: usize = 0;
        const rc = self.library.call.SSL_write_ex(self.ssl, from.ptr, from.len, &n);
        return if (rc == 1) .{ .moved = n } else self.outcome(rc);
    }

    /// Say that nothing follows.
    pub fn shut(self: *Engine, wire: *Wire) void {
        self.begin(wire);
        _ = self.library.call.SSL_shutdown(self.ssl); // 0: said; below: a session that has failed says nothing
    }

    fn begin(self: *Engine, wire: *Wire) void {
        self.library.call.BIO_set_data(self.bio, wire); // sessions may have moved meanwhile
        self.library.call.ERR_clear_error(); // of whatever else this thread has done
    }

    /// Who the peer is, after the handshake.
    pub fn peer(self: *Engine) session.Peer {
        const call = &self.library.call;
        if (call.SSL_get1_peer_certificate(self.ssl)) |certificate| {
            defer call.X509_free(certificate);
            self.is_certified = call.SSL_get_verify_result(self.ssl) == 0;
            self.readName(certificate);
        }
        return .{ .is_certified = self.is_certified, .name = self.name[0..self.name_bytes] };
    }

    /// The first URI among the names, or else the first name of DNS. Bytes that are not printable make it no name.
    fn readName(self: *Engine, certificate: *openssl.Certificate) void {
        const call = &self.library.call;
        const all = call.X509_get_ext_d2i(certificate, openssl.ALTERNATIVE_NAMES, null, null) orelse return;
        defer call.GENERAL_NAMES_free(all);
        for ([_]c_int{ openssl.NAME_URI, openssl.NAME_DNS }) |wanted| {
            var i: c_int = 0;
            while (i < call.OPENSSL_sk_num(all)) : (i += 1) {
                const one: *openssl.GeneralName = @ptrCast(call.OPENSSL_sk_value(all, i) orelse continue);
                var kind: c_int = -1;
                const value = call.GENERAL_NAME_get0_value(one, &kind);
                if (kind != wanted) continue;
                const text: *openssl.Text = @ptrCast(value orelse continue);
                const bytes = call.ASN1_STRING_get0_data(text) orelse continue;
                const size: usize = @intCast(call.ASN1_STRING_length(text));
                if (size > self.name.len) continue;
                for (bytes[0..size]) |byte| {
                    if (byte <= 0x20 or byte > 0x7E) break;
                } else {
                    @memcpy(self.name[0..size], bytes[0..size]);
                    self.name_bytes = size;
                    return;
                }
            }
        }
    }

    /// What only the two ends of this session know. False: not before the handshake is done.
    pub fn exporter(self: *Engine, into: *[EXPORTER_BYTES]u8) bool {
        self.library.call.ERR_clear_error();
        const label = EXPORTER_LABEL;
        const call = &self.library.call;
        return call.SSL_export_keying_material(self.ssl, into, into.len, label, label.len, null, 0, 0) == 1;
    }

    fn outcome(self: *Engine, rc: c_int) Outcome {
        return switch (self.library.call.SSL_get_error(self.ssl, rc)) {
            openssl.ERROR_WANT_READ => .starved,
            openssl.ERROR_WANT_WRITE => .full,
            openssl.ERROR_ZERO_RETURN => .closed,
            else => .{ .failed = self.failure() },
        };
    }

    fn failure(self: *Engine) session.Failure {
        const call = &self.library.call;
        const code = call.ERR_peek_error();
        const words = if (call.ERR_reason_error_string(code)) |text| std.mem.span(text) else "no reason given";
        const LIBRARY_OF_TLS = 20;
        if (code >> 23 & 0xFF != LIBRARY_OF_TLS) return .{ .status = status.ERR_TLS, .words = words };
        const verified = call.SSL_get_verify_result(self.ssl);
        return switch (code & 0x7F_FFFF) { // reasons of the headers; from 1000 on: 1000 + the alert that came
            134 => .{
                .status = status.ERR_TLS_CERTIFICATE,
                .words = std.mem.span(call.X509_verify_cert_error_string(verified)),
            },
            199 => .{ .status = status.ERR_TLS_CERTIFICATE, .words = words }, // it has shown none
            155, 156, 267 => .{ .status = status.ERR_TLS_PLAINTEXT, .words = words },
            166, 191, 258, 396, 1070 => .{ .status = status.ERR_TLS_VERSION, .words = words },
            1042...1046, 1048, 1049, 1051, 1116 => .{ .status = status.ERR_TLS_REFUSED, .words = words },
            else => .{ .status = status.ERR_TLS, .words = words },
        };
    }
};
