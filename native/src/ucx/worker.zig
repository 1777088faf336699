//! One end of UCX in this process: what it registers, whom it reaches, and the progress of both. Used by one thread at
//! a time.

const std = @import("std");
const grants = @import("../grants/grants.zig");
const limits = @import("../limits.zig");
const loading = @import("../system/loading.zig");
const ucx = @import("library.zig");

/// Transports that are not used: those of one host we have better ones for, and with them, as over TCP, UCX's software
/// reads the memory, so that taking a registration back stops no reader.
const LEFT_OUT = "^sm,tcp,self";

/// Transports of adapters, by the beginnings of their names.
const ADAPTERS = [_][]const u8{ "rc_", "dc_", "ud_", "srd", "gga_" };

/// Why memory of a device is not registered, if it was not when last tried.
pub const Trouble = enum { none, unknown_kind, refused, no_adapter };

pub const Worker = struct {
    library: *const ucx.Library,
    context: *ucx.Context,
    /// Kinds of memory that UCX knows, as a mask.
    kinds: u64,
    /// Memory domains of adapters, one bit each.
    adapters: u64,
    trouble: Trouble,
    /// What `mem_map` has returned with the trouble `refused`.
    refusal: ucx.Status,
    handle: *ucx.Worker,
    /// Readable when there is progress to be made, after `arm`.
    bell: i32,

    /// Make one with the transports that the environment (UCX_TLS) names, else with all that reach memory by hardware.
    pub fn open(library: *const ucx.Library) error{Refused}!Worker {
        return openWith(library, if (loading.variable("UCX_TLS") == null) LEFT_OUT else null);
    }

    fn openWith(library: *const ucx.Library, chosen: ?[*:0]const u8) error{Refused}!Worker {
        const call = &library.call;
        var config: ?*ucx.Config = null;
        if (call.config_read(null, null, &config) != ucx.OK) return error.Refused;
        defer call.config_release(config.?);
        if (chosen) |names| {
            if (call.config_modify(config.?, "TLS", names) != ucx.OK) return error.Refused;
        }
        var context: ?*ucx.Context = null;
        if (call.init_version(ucx.API_MAJOR, ucx.API_MINOR, &.{}, config.?, &context) != ucx.OK) return error.Refused;
        errdefer call.cleanup(context.?);
        var handle: ?*ucx.Worker = null;
        if (call.worker_create(context.?, &.{}, &handle) != ucx.OK) return error.Refused;
        errdefer call.worker_destroy(handle.?);
        var bell: c_int = -1;
        if (call.worker_get_efd(handle.?, &bell) != ucx.OK) return error.Refused;
        var known: ucx.ContextAttributes = .{};
        if (call.context_query(context.?, &known) != ucx.OK) known.memory_types = 1 << ucx.MEMORY_HOST;
        var text: [limits.UCX_TEXT_BYTES * 8]u8 = undefined;
        return .{
            .library = library,
            .context = context.?,
            .kinds = known.memory_types,
            .adapters = domainsOfAdapters(loading.printed(&text, context.?, call.context_print_info)),
            .trouble = if (known.memory_types >> ucx.MEMORY_CUDA & 1 == 0) .unknown_kind else .none,
            .refusal = ucx.OK,
            .handle = handle.?,
            .bell = bell,
        };
    }

    /// End it, after everything made by it.
    pub fn close(self: *Worker) void {
        self.library.call.worker_destroy(self.handle);
        self.library.call.cleanup(self.context);
    }

    /// Make progress until there is none.
    pub fn progress(self: *Worker) void {
        var rounds: u32 = 0;
        while (self.library.call.worker_progress(self.handle) != 0) {
            rounds += 1;
            if (rounds == limits.UCX_PROGRESS_ROUNDS) return; // others of the thread have their turn, too
        }
    }

    /// Prepare to sleep: whether the bell will ring for whatever comes. What came between the last progress and the
    /// arming rings no bell, so one more look follows: without it, completions of verbs got lost.
    pub fn arm(self: *Worker) bool {
        if (self.library.call.worker_arm(self.handle) == ucx.ERR_BUSY) return false;
        return self.library.call.worker_progress(self.handle) == 0;
    }

    /// How others reach this worker: the bytes, a part of `into`.
    pub fn address(self: *Worker, into: []u8) error{ Refused, NoRoom }![]u8 {
        var bytes: ?[*]u8 = null;
        var size: usize = 0;
        if (self.library.call.worker_get_address(self.handle, &bytes, &size) != ucx.OK) return error.Refused;
        defer self.library.call.worker_release_address(self.handle, bytes.?);
        if (size > into.len) return error.NoRoom;
        @memcpy(into[0..size], bytes.?[0..size]);
        return into[0..size];
    }

    /// What it can move bytes by, e.g. "rc_verbs/rxe0:1, ud_verbs/rxe0:1".
    pub fn transports(self: *Worker, into: []u8) []const u8 {
        var text: [limits.UCX_TEXT_BYTES * 8]u8 = undefined;
        return namesOf(loading.printed(&text, self.context, self.library.call.context_print_info), into);
    }

    /// Register memory of this process: pins it, which takes as long as its pages are many.
    pub fn register(self: *Worker, bytes: []u8, writable: bool) error{Refused}!Registration {
        var protection: c_uint = ucx.PROTECT_LOCAL_READ | ucx.PROTECT_REMOTE_READ;
        if (writable) protection |= ucx.PROTECT_LOCAL_WRITE | ucx.PROTECT_REMOTE_WRITE;
        var memory: ?*ucx.Memory = null;
        const parameters: ucx.MemoryParameters = .{ .address = bytes.ptr, .size = bytes.len, .protection = protection };
        if (self.library.call.mem_map(self.context, &parameters, &memory) != ucx.OK) return error.Refused;
        return .{ .worker = self, .memory = memory.?, .kind = .host };
    }

    /// Register memory of a device, with an adapter that then reaches it itself. UCX also succeeds where only its own
    /// software reaches it: for readers, the processor of the owner would copy, and end the process if it cannot.
    pub fn registerDevice(self: *Worker, bytes: []u8, writable: bool, kind: grants.Memory) error{Refused}!Registration {
        std.debug.assert(kind == .cuda);
        self.trouble = .unknown_kind;
        if (self.kinds >> ucx.MEMORY_CUDA & 1 == 0) return error.Refused;
        var protection: c_uint = ucx.PROTECT_LOCAL_READ | ucx.PROTECT_REMOTE_READ;
        if (writable) protection |= ucx.PROTECT_LOCAL_WRITE | ucx.PROTECT_REMOTE_WRITE;
        var memory: ?*ucx.Memory = null;
        var parameters: ucx.MemoryParameters = .{ .address = bytes.ptr, .size = bytes.len, .protection = protection };
        parameters.tell(ucx.MEMORY_CUDA);
        self.trouble = .refused;
        self.refusal = self.library.call.mem_map(self.context, &parameters, &memory);
        if (self.refusal != ucx.OK) return error.Refused;
        const made = Registration{ .worker = self, .memory = memory.?, .kind = kind };
        errdefer made.end();
        self.trouble = .no_adapter;
        var key: [limits.EXPORT_BYTES_MAX]u8 = undefined;
        if (ucx.domainsOf(made.key(&key) catch return error.Refused) & self.adapters == 0) return error.Refused;
        self.trouble = .none;
        return made;
    }
};

/// Registered memory.
pub const Registration = struct {
    worker: *Worker,
    memory: *ucx.Memory,
    kind: grants.Memory,

    /// What others need to reach it: the bytes, a part of `into`.
    pub fn key(self: Registration, into: []u8) error{ Refused, NoRoom }![]u8 {
        const call = &self.worker.library.call;
        var bytes: ?[*]u8 = null;
        var size: usize = 0;
        if (call.rkey_pack(self.worker.context, self.memory, &bytes, &size) != ucx.OK) return error.Refused;
        defer call.rkey_buffer_release(bytes.?);
        if (size > into.len) return error.NoRoom;
        @memcpy(into[0..size], bytes.?[0..size]);
        return into[0..size];
    }

    /// Take it back: the adapter refuses whoever comes from now on, and breaks off who is at it.
    pub fn end(self: Registration) void {
        _ = self.worker.library.call.mem_unmap(self.worker.context, self.memory); // fails for a wrong handle only
    }
};

/// The way to another worker. Must not move.
pub const Endpoint = struct {
    worker: *Worker,
    handle: ?*ucx.Endpoint = null,
    /// Why the peer was lost; OK while it is not.
    lost: ucx.Status = ucx.OK,

    /// Begin to reach the worker that has the address. It is wired up by the first operations.
    pub fn open(self: *Endpoint, worker: *Worker, address: []const u8) error{Refused}!void {
        self.* = .{ .worker = worker };
        const parameters: ucx.EndpointParameters = .{ .address = address.ptr, .lost = &onLost, .argument = self };
        if (worker.library.call.ep_create(worker.handle, &parameters, &self.handle) != ucx.OK) return error.Refused;
    }

    fn onLost(argument: ?*anyopaque, handle: *ucx.Endpoint, status: ucx.Status) callconv(.c) void {
        _ = handle;
        const self: *Endpoint = @ptrCast(@alignCast(argument.?));
        self.lost = status;
    }

    /// End it now; operations under way end with an error, once there has been progress. Progress is to be made until
    /// the operation that is returned has ended, too.
    pub fn close(self: *Endpoint) Operation {
        const handle = self.handle orelse return .{ .call = &self.worker.library.call, .pointer = 0 };
        self.handle = null;
        return self.begun(self.worker.library.call.ep_close_nbx(handle, &ucx.RequestParameters.CLOSE_NOW));
    }

    /// Make what another worker's `Registration.key` gave usable here.
    pub fn unpack(self: *Endpoint, key: []const u8) error{Refused}!*ucx.Key {
        var unpacked: ?*ucx.Key = null;
        const status = self.worker.library.call.ep_rkey_unpack(self.handle.?, key.ptr, &unpacked);
        return if (status == ucx.OK) unpacked.? else error.Refused;
    }

    /// Forget a key.
    pub fn forget(self: *Endpoint, key: *ucx.Key) void {
        self.worker.library.call.rkey_destroy(key);
    }

    /// Begin to copy theirs to ours, which is registered or not.
    pub fn get(self: *Endpoint, into: []u8, from: u64, key: *ucx.Key, ours: ?Registration) Operation {
        const parameters = requestOf(ours);
        return self.begun(self.worker.library.call.get_nbx(self.handle.?, into.ptr, into.len, from, key, &parameters));
    }

    /// Begin to copy ours to theirs. It is there when a `flush` that began later has ended.
    pub fn put(self: *Endpoint, from: []const u8, into: u64, key: *ucx.Key, ours: ?Registration) Operation {
        const parameters = requestOf(ours);
        return self.begun(self.worker.library.call.put_nbx(self.handle.?, from.ptr, from.len, into, key, &parameters));
    }

    fn requestOf(ours: ?Registration) ucx.RequestParameters {
        const registration = ours orelse return .{};
        var parameters: ucx.RequestParameters = .with(registration.memory);
        if (registration.kind == .cuda) parameters.tell(ucx.MEMORY_CUDA);
        return parameters;
    }

    /// Begin to wait until all before is done over there.
    pub fn flush(self: *Endpoint) Operation {
        return self.begun(self.worker.library.call.ep_flush_nbx(self.handle.?, &.{}));
    }

    fn begun(self: *Endpoint, pointer: ucx.Pointer) Operation {
        return .{ .call = &self.worker.library.call, .pointer = pointer };
    }

    /// The transport that carries bulk data, e.g. "rc_verbs/rxe0:1"; "" if it cannot be told.
    pub fn transport(self: *Endpoint, into: []u8) []const u8 {
        var text: [limits.UCX_TEXT_BYTES * 8]u8 = undefined;
        const info = loading.printed(&text, self.handle.?, self.worker.library.call.ep_print_info);
        return bulkLane(info, into);
    }
};

/// An operation that has begun; ended by `take`.
pub const Operation = struct {
    call: *const ucx.Functions,
    pointer: ucx.Pointer,

    /// How it ended, once; null while it is under way. A request is then forgotten.
    pub fn take(self: *Operation) ?ucx.Status {
        if (ucx.statusOf(self.pointer)) |status| return status;
        const status = self.call.request_check_status(self.pointer);
        if (status == ucx.IN_PROGRESS) return null;
        self.call.request_free(self.pointer);
        self.pointer = @bitCast(@as(isize, status));
        return status;
    }
};

/// Of what UCX prints of a context, the transports: "# resource 0  : md 0  dev 0  flags -- rc_verbs/rxe0:1".
fn namesOf(info: []const u8, into: []u8) []const u8 {
    var size: usize = 0;
    var lines = std.mem.splitScalar(u8, info, '\n');
    while (lines.next()) |line| {
        if (std.mem.indexOf(u8, line, "resource") == null) continue;
        const at = (std.mem.lastIndexOfScalar(u8, line, ' ') orelse continue) + 1;
        const separator: []const u8 = if (size == 0) "" else ", ";
        const added = std.fmt.bufPrint(into[size..], "{s}{s}", .{ separator, line[at..] }) catch break;
        size += added.len;
    }
    return into[0..size];
}

test "transports of a context" {
    const info =
        \\# UCP context
        \\#     resource 0  :  md 0  dev 0  flags -- rc_verbs/rxe0:1
        \\#     resource 1  :  md 0  dev 0  flags -- ud_verbs/rxe0:1
    ;
    var into: [64]u8 = undefined;
    try std.testing.expectEqualStrings("rc_verbs/rxe0:1, ud_verbs/rxe0:1", namesOf(info, &into));
    var short: [20]u8 = undefined;
    try std.testing.expectEqualStrings("rc_verbs/rxe0:1", namesOf(info, &short));
}

/// Of what UCX prints of a context, the memory domains of adapters: "# resource 0 : md 3 dev 0 flags -- rc_verbs/...".
fn domainsOfAdapters(info: []const u8) u64 {
    var found: u64 = 0;
    var lines = std.mem.splitScalar(u8, info, '\n');
    while (lines.next()) |line| {
        if (std.mem.indexOf(u8, line, "resource") == null) continue;
        const name = line[(std.mem.lastIndexOfScalar(u8, line, ' ') orelse continue) + 1 ..];
        const is_adapter = for (ADAPTERS) |prefix| {
            if (std.mem.startsWith(u8, name, prefix)) break true;
        } else false;
        if (!is_adapter) continue;
        const at = std.mem.indexOf(u8, line, " md ") orelse continue;
        var words = std.mem.tokenizeScalar(u8, line[at + 4 ..], ' ');
        const domain = std.fmt.parseInt(u6, words.next() orelse continue, 10) catch continue;
        found |= @as(u64, 1) << domain;
    }
    return found;
}

test "memory domains of adapters" {
    const info =
        \\#            md 0  :  component 0  mlx5_0
        \\#      resource 0  :  md 0  dev 0  flags -- rc_verbs/mlx5_0:1
        \\#      resource 1  :  md 2  dev 0  flags -- ud_mlx5/mlx5_1:1
        \\#      resource 2  :  md 3  dev 1  flags -- cuda_copy/cuda
        \\#      resource 3  :  md 64 dev 1  flags -- rc_mlx5/many:1
        \\#      resource 4  :  md x  dev 1  flags -- rc_mlx5/torn:1
    ;
    try std.testing.expectEqual(0b101, domainsOfAdapters(info));
    try std.testing.expectEqual(0, domainsOfAdapters("# resource"));
}

/// Of what UCX prints of an endpoint, the lane for one-sided bulk data: "lane[0]:  3:rc_verbs/rxe0:1.0 ... rma_bw#0".
fn bulkLane(info: []const u8, into: []u8) []const u8 {
    var best: []const u8 = "";
    var lines = std.mem.splitScalar(u8, info, '\n');
    while (lines.next()) |line| {
        const at = std.mem.indexOf(u8, line, "lane[") orelse continue;
        var words = std.mem.tokenizeScalar(u8, line[at..], ' ');
        _ = words.next(); // "lane[0]:"
        const word = words.next() orelse continue;
        const colon = std.mem.indexOfScalar(u8, word, ':') orelse continue;
        const dot = std.mem.lastIndexOfScalar(u8, word, '.') orelse word.len;
        if (dot <= colon) continue;
        const is_bulk = std.mem.indexOf(u8, line, "rma_bw") != null;
        if (best.len == 0 or is_bulk) best = word[colon + 1 .. dot];
        if (is_bulk) break;
    }
    const n = @min(best.len, into.len);
    @memcpy(into[0..n], best[0..n]);
    return into[0..n];
}

test "the lane for bulk data is found" {
    const info =
        \\#
        \\# UCP endpoint
        \\#                 lane[0]:  1:ud_verbs/rxe0:1.0 md[1]           -> addr[1].md[1]/ib/sysdev[255] am am_bw#0
        \\#                 lane[1]:  0:rc_verbs/rxe0:1.0 md[0]           -> addr[0].md[0]/ib/sysdev[255] rma_bw#0
        \\#
    ;
    var into: [64]u8 = undefined;
    try std.testing.expectEqualStrings("rc_verbs/rxe0:1", bulkLane(info, &into));
    try std.testing.expectEqualStrings("", bulkLane("lane[", &into));
    try std.testing.expectEqualStrings("", bulkLane("# lane[0]:", &into));
}
