//! Who we are and whom we trust, as OpenSSL keeps it for many sessions: certificate, key, authority or its pin.
//!
//! KY-1 TLS 1.3 and nothing else; no tickets, no early data, no renegotiation. KY-2 A peer's chain ends at the given
//! authority, or at one whose public key has the given digest: then OpenSSL checks it with that one as the only root.
//! KY-3 Text that is no certificate or key, or a key of another certificate, makes no credentials.

const std = @import("std");
const limits = @import("../limits.zig");
const openssl = @import("openssl.zig");
const status = @import("../status.zig");

const Sha256 = std.crypto.hash.sha2.Sha256;

pub const Options = struct {
    /// Certificates in PEM, ours first; "" = none.
    chain: []const u8 = "",
    key: []const u8 = "",
    /// Certificates of authorities in PEM; "" = `pin` says which.
    authority: []const u8 = "",
    /// SHA-256 of the authority's SubjectPublicKeyInfo.
    pin: [32]u8 = @splat(0),
    /// As a server, take clients without a certificate: they show a token instead.
    takes_joins: bool = false,
};

/// Set once, then only read. Does not move: OpenSSL has its address.
pub const Credentials = struct {
    library: *const openssl.Library,
    client: *openssl.Context,
    server: ?*openssl.Context,
    method: *openssl.BioMethod,
    pin: [32]u8,
    is_pinned: bool,

    /// Make them. A status; `why` then says in words what is wrong.
    pub fn init(
        self: *Credentials,
        library: *const openssl.Library,
        method: *openssl.BioMethod,
        options: Options,
        why: *[]const u8,
    ) i32 {
        self.* = .{
            .library = library,
            .client = undefined,
            .server = null,
            .method = method,
            .pin = options.pin,
            .is_pinned = options.authority.len == 0,
        };
        library.call.ERR_clear_error();
        self.client = self.context(options, openssl.VERIFY_PEER, why) orelse return status.ERR_ARGUMENT;
        if (options.chain.len == 0) return status.OK;
        const verify: c_int = if (options.takes_joins) openssl.VERIFY_PEER else openssl.VERIFY_ALWAYS;
        self.server = self.context(options, verify, why) orelse {
            library.call.SSL_CTX_free(self.client);
            return status.ERR_ARGUMENT;
        };
        return status.OK;
    }

    /// Forget them. Sessions keep what they need.
    pub fn deinit(self: *Credentials) void {
        self.library.call.SSL_CTX_free(self.client);
        if (self.server) |server| self.library.call.SSL_CTX_free(server);
    }

    fn context(self: *Credentials, options: Options, verify: c_int, why: *[]const u8) ?*openssl.Context {
        const call = &self.library.call;
        const one = call.SSL_CTX_new(call.TLS_method()) orelse {
            why.* = "OpenSSL makes no context: its configuration may forbid it";
            return null;
        };
        if (self.fill(one, options, verify, why)) return one;
        call.SSL_CTX_free(one);
        return null;
    }

    fn fill(self: *Credentials, one: *openssl.Context, options: Options, verify: c_int, why: *[]const u8) bool {
        const call = &self.library.call;
        const is_set = call.SSL_CTX_ctrl(one, openssl.CONTROL_VERSION_MIN, openssl.TLS1_3, null) == 1 and
            call.SSL_CTX_ctrl(one, openssl.CONTROL_VERSION_MAX, openssl.TLS1_3, null) == 1 and
            call.SSL_CTX_set_num_tickets(one, 0) == 1 and
            call.SSL_CTX_set_max_early_data(one, 0) == 1 and
            call.SSL_CTX_set_recv_max_early_data(one, 0) == 1;
        if (!is_set) { // KY-1
            why.* = "OpenSSL cannot be set to TLS 1.3 alone: its configuration may forbid it";
            return false;
        }
        _ = call.SSL_CTX_set_options(one, openssl.OPTION_NO_TICKET | openssl.OPTION_NO_COMPRESSION |
            openssl.OPTION_NO_RENEGOTIATION);
        _ = call.SSL_CTX_ctrl(one, openssl.CONTROL_SESSION_CACHE, 0, null);
        _ = call.SSL_CTX_ctrl(one, openssl.CONTROL_CERTIFICATES_BYTES_MAX, limits.TLS_HALF_OPEN_BYTES, null);
        _ = call.SSL_CTX_ctrl(one, openssl.CONTROL_MODE, openssl.MODE_PARTIAL_WRITE | openssl.MODE_MOVING_BUFFER, null);
        call.SSL_CTX_set_verify(one, verify, null);
        if (self.is_pinned) {
            call.SSL_CTX_set_cert_verify_callback(one, verifyPinned, self);
        } else if (!self.readCertificates(one, options.authority, trust)) {
            why.* = "the authority's certificates cannot be read: PEM is wanted";
            return false;
        }
        if (options.chain.len == 0) return true;
        if (!self.readCertificates(one, options.chain, show)) {
            why.* = "the certificates cannot be read: PEM is wanted, the own one first";
            return false;
        }
        if (!self.readKey(one, options.key)) {
            why.* = "the private key cannot be read, or is not of the certificate: PEM without a password is wanted";
            return false;
        }
        return true;
    }

    /// A source of OpenSSL's own for bytes of ours, which stay.
    fn source(self: *Credentials, text: []const u8) ?*openssl.Bio {
        const size = std.math.cast(c_int, text.len) orelse return null;
        return self.library.call.BIO_new_mem_buf(text.ptr, size);
    }

    const Take = fn (*const openssl.Functions, *openssl.Context, *openssl.Certificate, u32) bool;

    /// Hand each certificate of a text to `take`. False: there is none, or one is not taken.
    fn readCertificates(self: *Credentials, one: *openssl.Context, text: []const u8, comptime take: Take) bool {
        const call = &self.library.call;
        const from = self.source(text) orelse return false;
        defer _ = call.BIO_free(from);
        var count: u32 = 0;
        while (count < limits.TLS_CERTIFICATES_MAX) : (count += 1) {
            const certificate = call.PEM_read_bio_X509(from, null, noPassword, null) orelse break;
            defer call.X509_free(certificate);
            if (!take(call, one, certificate, count)) return false;
        }
        call.ERR_clear_error(); // the end of the text is an error to it
        return count > 0;
    }

    fn trust(call: *const openssl.Functions, one: *openssl.Context, certificate: *openssl.Certificate, _: u32) bool {
        return call.X509_STORE_add_cert(call.SSL_CTX_get_cert_store(one), certificate) == 1;
    }

    /// The own certificate comes first, then those up to the authority.
    fn show(call: *const openssl.Functions, one: *openssl.Context, certificate: *openssl.Certificate, nth: u32) bool {
        if (nth == 0) return call.SSL_CTX_use_certificate(one, certificate) == 1;
        return call.SSL_CTX_ctrl(one, openssl.CONTROL_ADD_CHAIN, 1, certificate) == 1;
    }

    fn readKey(self: *Credentials, one: *openssl.Context, text: []const u8) bool {
        const call = &self.library.call;
        const from = self.source(text) orelse return false;
        defer _ = call.BIO_free(from);
        defer call.ERR_clear_error();
        const key = call.PEM_read_bio_PrivateKey(from, null, noPassword, null) orelse return false;
        defer call.EVP_PKEY_free(key);
        return call.SSL_CTX_use_PrivateKey(one, key) == 1 and call.SSL_CTX_check_private_key(one) == 1;
    }

    /// KY-2: called by OpenSSL in place of its own check.
    fn verifyPinned(context_of_check: *openssl.StoreContext, argument: ?*anyopaque) callconv(.c) c_int {
        const self: *Credentials = @ptrCast(@alignCast(argument.?));
        const call = &self.library.call;
        const shown = call.X509_STORE_CTX_get0_untrusted(context_of_check);
        const root = self.pinnedOf(shown) orelse {
            const NOT_TRUSTED = 27;
            call.X509_STORE_CTX_set_error(context_of_check, NOT_TRUSTED);
            return 0;
        };
        const roots = call.OPENSSL_sk_new_null() orelse return 0;
        defer call.OPENSSL_sk_free(roots);
        if (call.OPENSSL_sk_push(roots, root) <= 0) return 0;
        call.X509_STORE_CTX_set0_trusted_stack(context_of_check, roots);
        return if (call.X509_verify_cert(context_of_check) == 1) 1 else 0;
    }

    fn pinnedOf(self: *Credentials, shown: ?*openssl.Stack) ?*openssl.Certificate {
        const call = &self.library.call;
        const count = call.OPENSSL_sk_num(shown);
        var i: c_int = 0;
        while (i < count) : (i += 1) {
            const one: *openssl.Certificate = @ptrCast(call.OPENSSL_sk_value(shown.?, i) orelse continue);
            const key = call.X509_get_X509_PUBKEY(one) orelse continue;
            var der: [4096]u8 = undefined; // 91 bytes for P-256, 2 KiB for the largest keys in use
            const size = call.i2d_X509_PUBKEY(key, null);
            if (size <= 0 or size > der.len) continue;
            var at: [*]u8 = &der;
            if (call.i2d_X509_PUBKEY(key, &at) != size) continue;
            var digest: [32]u8 = undefined;
            Sha256.hash(der[0..@intCast(size)], &digest, .{});
            if (std.mem.eql(u8, &digest, &self.pin)) return one;
        }
        return null;
    }

    /// It would ask at the terminal.
    fn noPassword(_: [*]u8, _: c_int, _: c_int, _: ?*anyopaque) callconv(.c) c_int {
        return -1;
    }
};
