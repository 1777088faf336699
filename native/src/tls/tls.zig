//! TLS of this process: its library, found once; credentials; the sessions over them.
//!
//! TL-1 In a forked child nothing of it works: two processes that go on with the keys of one session would give them
//! away. TL-2 Credentials outlive their sessions: those that another thread has taken over keep them, too.

const std = @import("std");
const credentials = @import("credentials.zig");
const engine = @import("engine.zig");
const openssl = @import("openssl.zig");
const plain = @import("plain.zig");
const random_bytes = @import("../system/random.zig");
const session = @import("session.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const Wire = @import("wire.zig").Wire;

/// What a session is over: TLS, or bytes as they are.
pub const Carrier = union(enum) {
    tls: engine.Engine,
    plain: plain.Plain,

    /// See `session.Session`.
    pub fn handshake(self: *Carrier, wire: *Wire) session.Outcome {
        return switch (self.*) {
            inline else => |*one| one.handshake(wire),
        };
    }

    /// See `session.Session`.
    pub fn read(self: *Carrier, wire: *Wire, into: []u8) session.Outcome {
        return switch (self.*) {
            inline else => |*one| one.read(wire, into),
        };
    }

    /// See `session.Session`.
    pub fn write(self: *Carrier, wire: *Wire, from: []const u8) session.Outcome {
        return switch (self.*) {
            inline else => |*one| one.write(wire, from),
        };
    }

    /// See `session.Session`.
    pub fn shut(self: *Carrier, wire: *Wire) void {
        switch (self.*) {
            inline else => |*one| one.shut(wire),
        }
    }

    /// See `session.Session`.
    pub fn peer(self: *Carrier) session.Peer {
        return switch (self.*) {
            inline else => |*one| one.peer(),
        };
    }

    /// See `session.Session`.
    pub fn deinit(self: *Carrier) void {
        switch (self.*) {
            inline else => |*one| one.deinit(),
        }
    }

    /// What only the two ends of this session know. False: not before the handshake is done.
    pub fn exporter(self: *Carrier, into: *[engine.EXPORTER_BYTES]u8) bool {
        return switch (self.*) {
            inline else => |*one| one.exporter(into),
        };
    }
};

pub const Session = session.Session(Carrier);

const Found = struct { library: openssl.Library, method: ?*openssl.BioMethod };

var lock: sys.Mutex = .{};
var found: ?Found = null;

/// The library of this process; the first call looks for it, a few milliseconds.
pub fn library() *const Found {
    lock.lock();
    defer lock.unlock();
    if (found == null) {
        found = .{ .library = openssl.Library.find(), .method = null };
        const one = &found.?;
        if (one.library.is_found) one.method = engine.bioMethod(&one.library);
    }
    return &found.?;
}

pub const Tls = struct {
    /// Null: sessions are plain.
    own: ?credentials.Credentials,
    half_open: session.HalfOpen,
    /// Of the caller's thread.
    sessions: u32,
    /// All sessions, and the owner of the credentials until it forgets them.
    holders: std.atomic.Value(u32),
    /// One word, 1 here and 0 in every forked child.
    alive: *u32,

    /// Make credentials. A status; `why` then says in words what is wrong.
    pub fn create(options: credentials.Options, out: *?*Tls, why: *[]const u8) i32 {
        const one = library();
        const method = one.method orelse {
            why.* = "no TLS library was found";
            return status.ERR_UNREACHABLE;
        };
        const rc = make(out);
        if (rc < 0) return rc;
        const self = out.*.?;
        self.own = undefined;
        self.own = @as(credentials.Credentials, undefined);
        const made = self.own.?.init(&one.library, method, options, why);
        if (made < 0) {
            out.* = null;
            self.giveBack();
        }
        return made;
    }

    /// Make what plain sessions have in the place of credentials. A status.
    pub fn createPlain(out: *?*Tls) i32 {
        return make(out);
    }

    fn make(out: *?*Tls) i32 {
        const memory = sys.mapPrivate(@sizeOf(Tls)) orelse return status.ofErrno(-sys.ENOMEM);
        const self: *Tls = @ptrCast(@alignCast(memory));
        self.alive = @ptrCast(@alignCast(sys.mapWipedOnFork() orelse {
            sys.unmap(memory, @sizeOf(Tls));
            return status.ofErrno(-sys.ENOMEM);
        }));
        self.alive.* = 1;
        self.own = null;
        self.half_open = .{};
        self.sessions = 0;
        self.holders = .init(1);
        out.* = self;
        return status.OK;
    }

    fn giveBack(self: *Tls) void {
        sys.unmap(@ptrCast(@alignCast(self.alive)), 4096);
        sys.unmap(@ptrCast(@alignCast(self)), @sizeOf(Tls));
    }

    /// Forget the credentials. TM_ERR_STATE: sessions are left (TL-2).
    pub fn destroy(self: *Tls) i32 {
        if (self.sessions > 0) return status.ERR_STATE;
        self.letGo();
        return status.OK;
    }

    fn letGo(self: *Tls) void {
        if (self.holders.fetchSub(1, .acq_rel) > 1) return;
        if (self.own) |*own| own.deinit();
        self.giveBack();
    }

    /// Whether this process is a forked child of the one that made it (TL-1).
    pub fn isForked(self: *const Tls) bool {
        return self.alive.* != 1;
    }

    /// Begin a session. A status.
    pub fn open(self: *Tls, options: session.Options, out: *?*Held) i32 {
        const memory = sys.mapPrivate(@sizeOf(Held)) orelse return status.ofErrno(-sys.ENOMEM);
        const held: *Held = @ptrCast(@alignCast(memory));
        const rc = self.begin(held, options);
        if (rc < 0) {
            sys.unmap(memory, @sizeOf(Held));
            return rc;
        }
        held.tls = self;
        self.sessions += 1;
        _ = self.holders.fetchAdd(1, .monotonic);
        out.* = held;
        return status.OK;
    }

    fn begin(self: *Tls, held: *Held, options: session.Options) i32 {
        var all = options;
        var its: Carrier = undefined;
        if (self.own) |*own| {
            if (options.role == .server and own.server == null) return status.ERR_STATE;
            its = .{ .tls = engine.Engine.init(own, options.role) orelse return status.ofErrno(-sys.ENOMEM) };
        } else {
            if (options.has_names) return status.ERR_ARGUMENT; // of certificates
            var random: [plain.RANDOM_BYTES]u8 = undefined;
            const rc = random_bytes.fill(&random);
            if (rc < 0) return status.ofErrno(rc);
            its = .{ .plain = plain.Plain.init(options.role, &random) };
            all.is_plain = true;
        }
        if (options.role == .server) all.half_open = &self.half_open;
        if (held.session.init(its, all)) return status.OK;
        its.deinit();
        return status.ERR_LIMIT;
    }
};

/// A session and what it belongs to.
pub const Held = struct {
    tls: *Tls,
    session: Session,

    /// Forget it.
    pub fn free(self: *Held) void {
        self.tls.sessions -= 1;
        self.release();
    }

    /// Another thread takes it over, which calls `release` instead of `free`. It counts as open, so the caller's counts
    /// are not touched there.
    pub fn handOver(self: *Held) void {
        std.debug.assert(!self.session.is_counted);
        self.tls.sessions -= 1;
    }

    /// The other thread has not got it.
    pub fn takeBack(self: *Held) void {
        self.tls.sessions += 1;
    }

    /// Forget one that was handed over.
    pub fn release(self: *Held) void {
        const its = self.tls;
        self.session.deinit();
        sys.unmap(@ptrCast(@alignCast(self)), @sizeOf(Held));
        its.letGo();
    }
};
