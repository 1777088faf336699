//! UCX: which library it is, and the part of its C interface that is used here (ucp/api/ucp.h, unchanged since 1.11).
//!
//! Nothing of it is linked. Distributions build it with InfiniBand and without CUDA, its wheels the other way round,
//! and sites have their own (HPC-X): so one is looked for that fits this machine, and why others do not is kept for
//! people.

const std = @import("std");
const limits = @import("../limits.zig");
const loading = @import("../system/loading.zig");

/// One byte, as UCX packs it: a wider type would read what is left of a register.
pub const Status = i8;

pub const OK: Status = 0;
pub const IN_PROGRESS: Status = 1;
pub const ERR_NO_DEVICE: Status = -14;
pub const ERR_BUSY: Status = -15;
pub const ERR_CANCELED: Status = -16;

/// What operations return: nothing (done), a request (a pointer), or a negative status in the pointer's place.
pub const Pointer = usize;

/// A status that stands where a pointer does.
pub fn statusOf(pointer: Pointer) ?Status {
    if (pointer == 0) return OK;
    const last: isize = -100; // of the enumeration
    return if (pointer >= @as(usize, @bitCast(last))) @intCast(@as(isize, @bitCast(pointer))) else null;
}

pub const Config = opaque {};
pub const Context = opaque {};
pub const Worker = opaque {};
pub const Endpoint = opaque {};
pub const Memory = opaque {};
pub const Key = opaque {};

// Structs carry a mask of the fields that are meant; later versions append fields, which ours leave out or leave room
// for. The test below has the offsets of the headers of UCX 1.13.

/// Of `init_version`.
pub const ContextParameters = extern struct {
    mask: u64 = MASK_FEATURES | MASK_SHARED,
    features: u64 = FEATURE_RMA | FEATURE_WAKEUP,
    unused: [4]u64 = @splat(0),
    workers_shared: c_int = 1,
    more: [12]u64 = @splat(0),

    const MASK_FEATURES = 1 << 0;
    const MASK_SHARED = 1 << 5;
    const FEATURE_RMA = 1 << 1;
    const FEATURE_WAKEUP = 1 << 4;
};

/// Of `worker_create`.
pub const WorkerParameters = extern struct {
    mask: u64 = 1 << 0,
    thread_mode: c_int = SERIALIZED,
    more: [32]u64 = @splat(0),

    const SERIALIZED = 1;
};

/// Called while the worker makes progress, when a peer is lost.
pub const Lost = *const fn (argument: ?*anyopaque, endpoint: *Endpoint, status: Status) callconv(.c) void;

/// Of `ep_create`.
pub const EndpointParameters = extern struct {
    mask: u64 = MASK_ADDRESS | MASK_MODE | MASK_HANDLER,
    address: [*]const u8,
    mode: c_int = MODE_PEER,
    lost: Lost,
    argument: ?*anyopaque,
    more: [16]u64 = @splat(0),

    const MASK_ADDRESS = 1 << 0;
    const MASK_MODE = 1 << 1;
    const MASK_HANDLER = 1 << 2;
    const MODE_PEER = 1;
};

pub const PROTECT_LOCAL_READ = 1 << 0;
pub const PROTECT_LOCAL_WRITE = 1 << 1;
pub const PROTECT_REMOTE_READ = 1 << 8;
pub const PROTECT_REMOTE_WRITE = 1 << 9;

/// Kinds of memory, as UCX numbers them; a mask of them has the bits 1 << kind.
pub const MEMORY_HOST: c_int = 0;
pub const MEMORY_CUDA: c_int = 1;

/// Of `context_query`.
pub const ContextAttributes = extern struct {
    mask: u64 = MASK_MEMORY_TYPES,
    request_size: usize = 0,
    thread_mode: c_int = 0,
    memory_types: u64 = 0,
    more: [16]u64 = @splat(0),

    const MASK_MEMORY_TYPES = 1 << 2;
};

/// Of `mem_map`.
pub const MemoryParameters = extern struct {
    mask: u64 = MASK_ADDRESS | MASK_SIZE | MASK_PROTECTION,
    address: [*]u8,
    size: usize,
    flags: c_uint = 0,
    protection: c_uint,
    memory_type: c_int = 0,
    more: [8]u64 = @splat(0),

    const MASK_ADDRESS = 1 << 0;
    const MASK_SIZE = 1 << 1;
    const MASK_PROTECTION = 1 << 3;
    const MASK_MEMORY_TYPE = 1 << 4;

    /// Say which kind of memory it is, which UCX otherwise finds out.
    pub fn tell(self: *MemoryParameters, memory_type: c_int) void {
        self.mask |= MASK_MEMORY_TYPE;
        self.memory_type = memory_type;
    }
};

/// Of operations.
pub const RequestParameters = extern struct {
    mask: u32 = 0,
    flags: u32 = 0,
    unused: [5]u64 = @splat(0),
    memory_type: c_int = 0,
    unused_too: u64 = 0,
    memory: ?*Memory = null,
    more: [8]u64 = @splat(0),

    /// With memory of ours that is registered; versions before 1.13 take no notice.
    pub fn with(memory: *Memory) RequestParameters {
        return .{ .mask = MASK_MEMORY, .memory = memory };
    }

    /// Say which kind of memory ours is, which UCX otherwise finds out.
    pub fn tell(self: *RequestParameters, memory_type: c_int) void {
        self.mask |= MASK_MEMORY_TYPE;
        self.memory_type = memory_type;
    }

    const MASK_MEMORY_TYPE = 1 << 6;
    const MASK_MEMORY = 1 << 8;

    /// Of `ep_close_nbx`: end it now, and have all that is under way end.
    pub const CLOSE_NOW: RequestParameters = .{ .mask = 1 << 4, .flags = 1 };
};

/// What a key that was packed begins with: the memory domains that have registered its memory, one bit each (as of
/// UCX 1.10 to 1.22, ucp_rkey_pack).
pub fn domainsOf(key: []const u8) u64 {
    return if (key.len < 8) 0 else std.mem.readInt(u64, key[0..8], .little);
}

/// What a status means that memory of a device was refused with.
pub fn describe(status: Status) []const u8 {
    return switch (status) {
        -3 => "input or output error",
        -4 => "out of memory",
        -5 => "invalid parameter",
        -7 => "invalid address",
        -8 => "not implemented",
        -21 => "limit exceeded",
        -22 => "unsupported",
        else => "see ucs/type/status.h of UCX",
    };
}

/// The functions, by their names less "ucp_".
pub const Functions = struct {
    get_version_string: *const fn () callconv(.c) [*:0]const u8,
    config_read: *const fn (?[*:0]const u8, ?[*:0]const u8, *?*Config) callconv(.c) Status,
    config_modify: *const fn (*Config, [*:0]const u8, [*:0]const u8) callconv(.c) Status,
    config_release: *const fn (*Config) callconv(.c) void,
    init_version: *const fn (c_uint, c_uint, *const ContextParameters, *Config, *?*Context) callconv(.c) Status,
    cleanup: *const fn (*Context) callconv(.c) void,
    context_query: *const fn (*Context, *ContextAttributes) callconv(.c) Status,
    worker_create: *const fn (*Context, *const WorkerParameters, *?*Worker) callconv(.c) Status,
    worker_destroy: *const fn (*Worker) callconv(.c) void,
    worker_get_address: *const fn (*Worker, *?[*]u8, *usize) callconv(.c) Status,
    worker_release_address: *const fn (*Worker, [*]u8) callconv(.c) void,
    worker_get_efd: *const fn (*Worker, *c_int) callconv(.c) Status,
    worker_progress: *const fn (*Worker) callconv(.c) c_uint,
    worker_arm: *const fn (*Worker) callconv(.c) Status,
    context_print_info: *const fn (*Context, *anyopaque) callconv(.c) void,
    ep_create: *const fn (*Worker, *const EndpointParameters, *?*Endpoint) callconv(.c) Status,
    ep_close_nbx: *const fn (*Endpoint, *const RequestParameters) callconv(.c) Pointer,
    ep_flush_nbx: *const fn (*Endpoint, *const RequestParameters) callconv(.c) Pointer,
    ep_rkey_unpack: *const fn (*Endpoint, [*]const u8, *?*Key) callconv(.c) Status,
    ep_print_info: *const fn (*Endpoint, *anyopaque) callconv(.c) void,
    rkey_destroy: *const fn (*Key) callconv(.c) void,
    mem_map: *const fn (*Context, *const MemoryParameters, *?*Memory) callconv(.c) Status,
    mem_unmap: *const fn (*Context, *Memory) callconv(.c) Status,
    rkey_pack: *const fn (*Context, *Memory, *?[*]u8, *usize) callconv(.c) Status,
    rkey_buffer_release: *const fn ([*]u8) callconv(.c) void,
    get_nbx: *const fn (*Endpoint, [*]u8, usize, u64, *Key, *const RequestParameters) callconv(.c) Pointer,
    put_nbx: *const fn (*Endpoint, [*]const u8, usize, u64, *Key, *const RequestParameters) callconv(.c) Pointer,
    request_check_status: *const fn (Pointer) callconv(.c) Status,
    request_free: *const fn (Pointer) callconv(.c) void,
};

/// The oldest interface that has all of `Functions`.
pub const API_MAJOR = 1;
pub const API_MINOR = 11;

/// Names a library, or the folder that it lies in; then no other one is looked at.
pub const VARIABLE = "TRIMESH_UCX";
const FILE = "libucp.so.0";

/// Where sites put theirs, then where the loader looks.
const PLACES = [_][:0]const u8{ "/opt/hpcx/ucx/lib/" ++ FILE, FILE };

/// A loaded library; stays loaded for good, as its threads and handlers may.
pub const Library = struct {
    call: Functions,
    path: []const u8,
    version: []const u8,

    /// Look for one. `extra` is a file to look at last, `why_not` gets what is wrong with each that did not fit.
    pub fn find(extra: ?[*:0]const u8, why_not: *Text) ?Library {
        // Read when it is loaded. It would patch this process's memory functions and take over its signals.
        loading.setDefault("UCX_MEM_EVENTS", "n");
        loading.setDefault("UCX_HANDLE_ERRORS", "none");
        loading.setDefault("UCX_ERROR_SIGNALS", "");
        // It would print to standard output what our statuses say as well.
        loading.setDefault("UCX_LOG_LEVEL", "fatal");
        if (loading.variable(VARIABLE)) |asked| {
            var buffer: [limits.PATH_BYTES]u8 = undefined;
            const suffix: []const u8 = if (std.mem.indexOf(u8, asked, ".so") == null) "/" ++ FILE else "";
            const path = std.fmt.bufPrintZ(&buffer, "{s}{s}", .{ asked, suffix }) catch {
                why_not.add("{s} is too long; ", .{VARIABLE});
                return null;
            };
            return load(path, why_not);
        }
        for (PLACES) |path| return load(path, why_not) orelse continue;
        return load(extra orelse return null, why_not);
    }

    fn load(path: [*:0]const u8, why_not: *Text) ?Library {
        const handle = loading.open(path) orelse {
            why_not.add("{s}; ", .{loading.reason()}); // names the file
            return null;
        };
        var self: Library = undefined;
        inline for (@typeInfo(Functions).@"struct".fields) |field| {
            const function = loading.symbol(handle, "ucp_" ++ field.name) orelse {
                why_not.add("{s} has no ucp_{s}: UCX 1.11 or newer is needed; ", .{ path, field.name });
                loading.close(handle);
                return null;
            };
            @field(self.call, field.name) = @ptrCast(@alignCast(function));
        }
        self.path = std.mem.span(loading.fileOf(@ptrCast(self.call.init_version)) orelse path);
        self.version = std.mem.span(self.call.get_version_string());
        return self;
    }
};

/// Words for people, cut where they get too long.
pub const Text = struct {
    bytes: [limits.UCX_TEXT_BYTES]u8 = @splat(0),
    len: usize = 0,

    /// Append.
    pub fn add(self: *Text, comptime format: []const u8, arguments: anytype) void {
        const room = self.bytes[self.len .. self.bytes.len - 1]; // a zero is left at the end
        const written = std.fmt.bufPrint(room, format, arguments) catch room;
        self.len += written.len;
    }

    /// What was appended.
    pub fn get(self: *const Text) [:0]const u8 {
        return self.bytes[0..self.len :0];
    }
};

test "structs lie as UCX's own" {
    try std.testing.expectEqual(48, @offsetOf(ContextParameters, "workers_shared"));
    try std.testing.expectEqual(8, @offsetOf(WorkerParameters, "thread_mode"));
    try std.testing.expectEqual(24, @offsetOf(EndpointParameters, "lost"));
    try std.testing.expectEqual(32, @offsetOf(EndpointParameters, "argument"));
    try std.testing.expectEqual(24, @offsetOf(ContextAttributes, "memory_types"));
    try std.testing.expectEqual(28, @offsetOf(MemoryParameters, "protection"));
    try std.testing.expectEqual(32, @offsetOf(MemoryParameters, "memory_type"));
    try std.testing.expectEqual(48, @offsetOf(RequestParameters, "memory_type"));
    try std.testing.expectEqual(64, @offsetOf(RequestParameters, "memory"));
    // Never shorter than the version that has the fields: it may copy the whole of them.
    try std.testing.expect(@sizeOf(ContextParameters) >= 80 and @sizeOf(WorkerParameters) >= 200);
    try std.testing.expect(@sizeOf(EndpointParameters) >= 104 and @sizeOf(MemoryParameters) >= 40);
    try std.testing.expect(@sizeOf(RequestParameters) >= 72 and @sizeOf(ContextAttributes) >= 72);
}

test "a status in the place of a pointer" {
    try std.testing.expectEqual(OK, statusOf(0));
    try std.testing.expectEqual(ERR_NO_DEVICE, statusOf(@bitCast(@as(isize, ERR_NO_DEVICE))));
    try std.testing.expectEqual(null, statusOf(0x7f00_0000_1000));
}

test "text is cut" {
    var text: Text = .{};
    for (0..limits.UCX_TEXT_BYTES) |_| text.add("word ", .{});
    try std.testing.expectEqual(limits.UCX_TEXT_BYTES - 1, text.get().len);
}
