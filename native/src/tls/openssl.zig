//! OpenSSL: which library it is, and the part of its C interface that is used here, which has not changed since 3.0.
//!
//! Nothing of it is linked, so that its security fixes are those of the system. A wheel of Python may have a copy of
//! its own inside, which is neither found nor touched.

const std = @import("std");
const limits = @import("../limits.zig");
const loading = @import("../system/loading.zig");

pub const Context = opaque {};
pub const Method = opaque {};
pub const Ssl = opaque {};
pub const Bio = opaque {};
pub const BioMethod = opaque {};
pub const Certificate = opaque {};
pub const Key = opaque {};
pub const PublicKey = opaque {};
pub const Store = opaque {};
pub const StoreContext = opaque {};
pub const Stack = opaque {};
pub const GeneralName = opaque {};
pub const Text = opaque {};

pub const BioIo = *const fn (bio: *Bio, bytes: [*]u8, size: c_int) callconv(.c) c_int;
pub const BioControl = *const fn (bio: *Bio, command: c_int, number: c_long, pointer: ?*anyopaque) callconv(.c) c_long;
pub const Verify = *const fn (context: *StoreContext, argument: ?*anyopaque) callconv(.c) c_int;
pub const Password = *const fn (buffer: [*]u8, size: c_int, rwflag: c_int, argument: ?*anyopaque) callconv(.c) c_int;

// Numbers of the headers: what they spell as macros over a few functions.

pub const TLS1_3 = 0x0304;
pub const CONTROL_MODE = 33;
pub const CONTROL_SESSION_CACHE = 44;
pub const CONTROL_CERTIFICATES_BYTES_MAX = 50;
pub const CONTROL_ADD_CHAIN = 89; // counts a reference of its own
pub const CONTROL_VERSION_MIN = 123;
pub const CONTROL_VERSION_MAX = 124;
pub const MODE_PARTIAL_WRITE = 1;
pub const MODE_MOVING_BUFFER = 2;
pub const OPTION_NO_TICKET: u64 = 1 << 14;
pub const OPTION_NO_COMPRESSION: u64 = 1 << 17;
pub const OPTION_NO_RENEGOTIATION: u64 = 1 << 30;
pub const VERIFY_PEER = 1;
pub const VERIFY_ALWAYS = 1 | 2;
pub const ERROR_WANT_READ = 2;
pub const ERROR_WANT_WRITE = 3;
pub const ERROR_ZERO_RETURN = 6;
pub const BIO_SOURCE_SINK = 0x0400;
pub const BIO_RETRY_READ = 0x01 | 0x08;
pub const BIO_RETRY_WRITE = 0x02 | 0x08;
pub const BIO_RETRY_ALL = 0x0F;
pub const BIO_FLUSH = 11;
pub const ALTERNATIVE_NAMES = 85;
pub const NAME_DNS = 2;
pub const NAME_URI = 6;

/// The functions, by their whole names.
pub const Functions = struct {
    OpenSSL_version: *const fn (c_int) callconv(.c) [*:0]const u8,
    OpenSSL_version_num: *const fn () callconv(.c) c_ulong,
    ERR_clear_error: *const fn () callconv(.c) void,
    ERR_peek_error: *const fn () callconv(.c) c_ulong,
    ERR_reason_error_string: *const fn (c_ulong) callconv(.c) ?[*:0]const u8,
    OPENSSL_cleanse: *const fn ([*]u8, usize) callconv(.c) void,

    BIO_get_new_index: *const fn () callconv(.c) c_int,
    BIO_meth_new: *const fn (c_int, [*:0]const u8) callconv(.c) ?*BioMethod,
    BIO_meth_set_read: *const fn (*BioMethod, BioIo) callconv(.c) c_int,
    BIO_meth_set_write: *const fn (*BioMethod, BioIo) callconv(.c) c_int,
    BIO_meth_set_ctrl: *const fn (*BioMethod, BioControl) callconv(.c) c_int,
    BIO_new: *const fn (*BioMethod) callconv(.c) ?*Bio,
    BIO_new_mem_buf: *const fn ([*]const u8, c_int) callconv(.c) ?*Bio,
    BIO_free: *const fn (*Bio) callconv(.c) c_int,
    BIO_set_data: *const fn (*Bio, ?*anyopaque) callconv(.c) void,
    BIO_get_data: *const fn (*Bio) callconv(.c) ?*anyopaque,
    BIO_set_init: *const fn (*Bio, c_int) callconv(.c) void,
    BIO_set_flags: *const fn (*Bio, c_int) callconv(.c) void,
    BIO_clear_flags: *const fn (*Bio, c_int) callconv(.c) void,

    PEM_read_bio_X509: *const fn (*Bio, ?*anyopaque, Password, ?*anyopaque) callconv(.c) ?*Certificate,
    PEM_read_bio_PrivateKey: *const fn (*Bio, ?*anyopaque, Password, ?*anyopaque) callconv(.c) ?*Key,
    X509_free: *const fn (*Certificate) callconv(.c) void,
    EVP_PKEY_free: *const fn (*Key) callconv(.c) void,
    X509_get_X509_PUBKEY: *const fn (*Certificate) callconv(.c) ?*PublicKey,
    i2d_X509_PUBKEY: *const fn (*PublicKey, ?*[*]u8) callconv(.c) c_int,
    X509_get_ext_d2i: *const fn (*Certificate, c_int, ?*c_int, ?*c_int) callconv(.c) ?*Stack,
    GENERAL_NAMES_free: *const fn (*Stack) callconv(.c) void,
    GENERAL_NAME_get0_value: *const fn (*GeneralName, *c_int) callconv(.c) ?*anyopaque,
    ASN1_STRING_get0_data: *const fn (*Text) callconv(.c) ?[*]const u8,
    ASN1_STRING_length: *const fn (*Text) callconv(.c) c_int,
    OPENSSL_sk_new_null: *const fn () callconv(.c) ?*Stack,
    OPENSSL_sk_push: *const fn (*Stack, *anyopaque) callconv(.c) c_int,
    OPENSSL_sk_num: *const fn (?*Stack) callconv(.c) c_int,
    OPENSSL_sk_value: *const fn (*Stack, c_int) callconv(.c) ?*anyopaque,
    OPENSSL_sk_free: *const fn (*Stack) callconv(.c) void,
    X509_STORE_add_cert: *const fn (*Store, *Certificate) callconv(.c) c_int,
    X509_STORE_CTX_get0_untrusted: *const fn (*StoreContext) callconv(.c) ?*Stack,
    X509_STORE_CTX_set0_trusted_stack: *const fn (*StoreContext, *Stack) callconv(.c) void,
    X509_STORE_CTX_set_error: *const fn (*StoreContext, c_int) callconv(.c) void,
    X509_verify_cert: *const fn (*StoreContext) callconv(.c) c_int,
    X509_verify_cert_error_string: *const fn (c_long) callconv(.c) [*:0]const u8,

    TLS_method: *const fn () callconv(.c) *Method,
    SSL_CTX_new: *const fn (*Method) callconv(.c) ?*Context,
    SSL_CTX_free: *const fn (*Context) callconv(.c) void,
    SSL_CTX_ctrl: *const fn (*Context, c_int, c_long, ?*anyopaque) callconv(.c) c_long,
    SSL_CTX_set_options: *const fn (*Context, u64) callconv(.c) u64,
    SSL_CTX_set_verify: *const fn (*Context, c_int, ?*anyopaque) callconv(.c) void,
    SSL_CTX_set_cert_verify_callback: *const fn (*Context, Verify, ?*anyopaque) callconv(.c) void,
    SSL_CTX_get_cert_store: *const fn (*Context) callconv(.c) *Store,
    SSL_CTX_use_certificate: *const fn (*Context, *Certificate) callconv(.c) c_int,
    SSL_CTX_use_PrivateKey: *const fn (*Context, *Key) callconv(.c) c_int,
    SSL_CTX_check_private_key: *const fn (*Context) callconv(.c) c_int,
    SSL_CTX_set_num_tickets: *const fn (*Context, usize) callconv(.c) c_int,
    SSL_CTX_set_max_early_data: *const fn (*Context, u32) callconv(.c) c_int,
    SSL_CTX_set_recv_max_early_data: *const fn (*Context, u32) callconv(.c) c_int,
    SSL_new: *const fn (*Context) callconv(.c) ?*Ssl,
    SSL_free: *const fn (*Ssl) callconv(.c) void,
    SSL_set_bio: *const fn (*Ssl, *Bio, *Bio) callconv(.c) void,
    SSL_set_accept_state: *const fn (*Ssl) callconv(.c) void,
    SSL_set_connect_state: *const fn (*Ssl) callconv(.c) void,
    SSL_do_handshake: *const fn (*Ssl) callconv(.c) c_int,
    SSL_read_ex: *const fn (*Ssl, [*]u8, usize, *usize) callconv(.c) c_int,
    SSL_write_ex: *const fn (*Ssl, [*]const u8, usize, *usize) callconv(.c) c_int,
    SSL_shutdown: *const fn (*Ssl) callconv(.c) c_int,
    SSL_get_error: *const fn (*Ssl, c_int) callconv(.c) c_int,
    SSL_get_verify_result: *const fn (*Ssl) callconv(.c) c_long,
    SSL_get1_peer_certificate: *const fn (*Ssl) callconv(.c) ?*Certificate,
    SSL_export_keying_material: *const fn (
        *Ssl,
        [*]u8,
        usize,
        [*]const u8,
        usize,
        ?[*]const u8,
        usize,
        c_int,
    ) callconv(.c) c_int,
};

/// Names a library; then no other one is looked at.
pub const VARIABLE = "TRIMESH_LIBSSL";

/// What the loader is asked for. One library brings the other half, libcrypto, with it.
const FILES = [_][:0]const u8{ "libssl.so.3", "libssl.so.4" };

/// A loaded library; stays loaded for good, as its own clean-up at the exit does.
pub const Library = struct {
    call: Functions,
    /// "OpenSSL 3.0.19 27 Jan 2026, /usr/lib/...", or why there is none.
    about: [limits.TLS_TEXT_BYTES]u8,
    is_found: bool,

    /// Look for one.
    pub fn find() Library {
        var self: Library = .{ .call = undefined, .about = @splat(0), .is_found = false };
        const asked = loading.variable(VARIABLE) orelse "";
        if (asked.len > 0) {
            var path: [limits.PATH_BYTES]u8 = undefined;
            const named = std.fmt.bufPrintZ(&path, "{s}", .{asked}) catch {
                self.say("{s} is too long", .{VARIABLE});
                return self;
            };
            self.is_found = self.load(named);
        } else for (FILES) |file| {
            self.is_found = self.load(file);
            if (self.is_found) break;
        }
        return self;
    }

    fn load(self: *Library, path: [*:0]const u8) bool {
        const handle = loading.openApart(path) orelse {
            self.say("{s}; ", .{loading.reason()}); // names the file
            return false;
        };
        inline for (@typeInfo(Functions).@"struct".fields) |field| {
            const function = loading.symbol(handle, field.name) orelse {
                self.say("{s} has no {s}: OpenSSL 3.0 or newer is needed; ", .{ path, field.name });
                loading.close(handle);
                return false;
            };
            @field(self.call, field.name) = @ptrCast(@alignCast(function));
        }
        self.about = @splat(0);
        const file = loading.fileOf(@ptrCast(self.call.SSL_new)) orelse path;
        self.say("{s}, {s}", .{ self.call.OpenSSL_version(0), file });
        return true;
    }

    fn say(self: *Library, comptime format: []const u8, arguments: anytype) void {
        const said = std.mem.indexOfScalar(u8, &self.about, 0).?;
        const room = self.about[said .. self.about.len - 1];
        _ = std.fmt.bufPrint(room, format, arguments) catch {}; // cut
    }
};

test "this machine's library, or why there is none" {
    const library = Library.find();

    try std.testing.expect(std.mem.indexOfScalar(u8, &library.about, 0).? > 10);
    if (library.is_found) try std.testing.expect(library.call.OpenSSL_version_num() >= 0x3000_0000);
}
