//! One TLS session of two hosts, from the first byte to the last: PURE, driven by bytes and milliseconds. The engine
//! that knows TLS is handed in (`engine.zig`, or one of a test), and knows no sockets and no clock either.
//!
//!     client   handshake -> proof (joins only) -> greeting -> open -> closing -> closed
//!     server   handshake -> greeting -> asking -> open -> closing -> closed
//!
//! The client says its hello first. The server is told nothing but that until its owner has answered it (`answer`), and
//! says its own, with the verdict. From then on both sides send whatever they like.
//!
//! HS-1 Before `open` a peer has been sent nothing but TLS and one hello, and nothing but that was read from it.
//! HS-2 Whoever is dialled or dials proves a certificate; the one exception is the client of a join to a mesh that
//! makes certificates itself. The token of a join its owner checks. HS-3 The name in a certificate, the hello and whom
//! the owner expects are of one mesh and incarnation; names of other authorities the owner checks. HS-4 A session that
//! is not open after limit TLS_HALF_OPEN_MS, or has sent limit TLS_HALF_OPEN_BYTES before it is, fails; of those that
//! were dialled, limit TLS_HALF_OPEN_MAX exist at one time. HS-5 After the first failure nothing is read any more, and
//! the status stays.

const std = @import("std");
const assert = std.debug.assert;
const hellos = @import("hello.zig");
const limits = @import("../limits.zig");
const names = @import("name.zig");
const status = @import("../status.zig");
const Wire = @import("wire.zig").Wire;

const Hello = hellos.Hello;

/// What an engine has come to.
pub const Outcome = union(enum) {
    /// So many bytes; of a handshake: it is done.
    moved: usize,
    /// It needs more bytes of the peer.
    starved,
    /// It has no room for what it makes.
    full,
    /// The peer has said that it sends no more.
    closed,
    failed: Failure,
};

/// Why an engine cannot go on; words that complete "TLS: ".
pub const Failure = struct { status: i32, words: []const u8 };

/// Who the peer is, as its certificate says, which was checked.
pub const Peer = struct {
    is_certified: bool = false,
    /// The name of a mesh, or what a foreign authority has certified; "" = none.
    name: []const u8 = "",
};

pub const Role = enum(u32) { client = 0, server = 1 };

/// As in `trimesh.h`.
pub const State = enum(u32) {
    handshake = 1,
    /// Client of a join: `prove` is waited for.
    proof = 2,
    /// A hello is under way.
    greeting = 3,
    /// Server: `answer` is waited for.
    asking = 4,
    open = 5,
    /// We have said that we send no more.
    closing = 6,
    closed = 7,
    failed = 8,
};

/// How many sessions that were dialled are not open yet.
pub const HalfOpen = struct {
    count: u32 = 0,

    /// Count one more. Whether there was room.
    pub fn enter(self: *HalfOpen) bool {
        assert(self.count <= limits.TLS_HALF_OPEN_MAX);
        if (self.count >= limits.TLS_HALF_OPEN_MAX) return false;
        self.count += 1;
        return true;
    }
};

/// The caller's memory for one step, and what became of it. As in `trimesh.h`.
pub const Io = extern struct {
    wire_in: ?[*]const u8 = null,
    wire_in_size: u64 = 0,
    wire_out: ?[*]u8 = null,
    wire_out_size: u64 = 0,
    plain_in: ?[*]const u8 = null,
    plain_in_size: u64 = 0,
    plain_out: ?[*]u8 = null,
    plain_out_size: u64 = 0,
    wire_taken: u64 = 0,
    wire_made: u64 = 0,
    plain_taken: u64 = 0,
    plain_made: u64 = 0,

    fn slice(from: ?[*]const u8, size: u64) []const u8 {
        return if (from) |bytes| bytes[0..@intCast(size)] else "";
    }

    fn target(into: ?[*]u8, size: u64) []u8 {
        return if (into) |bytes| bytes[0..@intCast(size)] else &.{};
    }
};

pub const Options = struct {
    role: Role,
    /// What we say; of a server: what it says in its answer.
    hello: Hello,
    /// Certificates carry names of a mesh (HS-3); false: they are of an authority of the user's.
    has_names: bool = true,
    /// There is no TLS (`plain.zig`).
    is_plain: bool = false,
    /// The incarnation that is wanted; 0 = any.
    expected: u64 = 0,
    /// Counts this session until it is open.
    half_open: ?*HalfOpen = null,
};

/// A session over an engine with `handshake(*Wire)`, `read(*Wire, []u8)`, `write(*Wire, []const u8)` (of at most one
/// record), each an `Outcome`; `shut(*Wire)`; `peer()`; and `deinit()`.
pub fn Session(comptime Engine: type) type {
    return struct {
        engine: Engine,
        options: Options,
        state: State = .handshake,
        wire: Wire = .{},
        /// What the peer has said; its incarnation is 0 until then.
        peer_hello: Hello = .{ .incarnation = 0 },
        peer: Peer = .{},
        said: [hellos.BYTES]u8 = undefined,
        heard: [hellos.BYTES]u8 = undefined,
        said_bytes: usize = 0,
        heard_bytes: usize = 0,
        has_spoken: bool = false, // the peer, a first byte
        is_counted: bool = false,
        age_ms: u64 = 0,
        status: i32 = status.OK,
        detail: [limits.DETAIL_BYTES]u8 = @splat(0),

        const Self = @This();

        /// Begin one. False: there are too many half-open ones; the engine is then still the caller's.
        pub fn init(self: *Self, engine: Engine, options: Options) bool {
            assert(options.half_open == null or options.role == .server); // HS-4
            if (options.half_open) |half_open| if (!half_open.enter()) return false;
            self.* = .{ .engine = engine, .options = options, .is_counted = options.half_open != null };
            return true;
        }

        /// Forget the session and its keys.
        pub fn deinit(self: *Self) void {
            self.uncount();
            self.engine.deinit();
            self.* = undefined;
        }

        /// Read and make as much as there is and has room. The caller offers again what was not taken.
        pub fn step(self: *Self, io: *Io) void {
            self.wire.begin(Io.slice(io.wire_in, io.wire_in_size), Io.target(io.wire_out, io.wire_out_size));
            io.plain_taken = 0;
            io.plain_made = 0;
            while (self.advance()) {}
            if (self.state == .open) self.encrypt(io);
            if (self.state == .open or self.state == .closing) self.decrypt(io);
            if (self.isHalfOpen() and self.wire.isOverdrawn()) {
                self.fail(status.ERR_TOO_LARGE, "a peer that is not admitted has sent more than {d} bytes", .{
                    limits.TLS_HALF_OPEN_BYTES,
                });
            }
            io.wire_taken = self.wire.taken;
            io.wire_made = self.wire.made;
            assert(io.wire_taken <= io.wire_in_size);
            assert(io.wire_made <= io.wire_out_size);
            assert(io.plain_taken <= io.plain_in_size);
            assert(io.plain_made <= io.plain_out_size);
            if (self.isHalfOpen()) assert(io.plain_taken + io.plain_made == 0); // HS-1
            self.wire.end();
        }

        /// Time has passed.
        pub fn tick(self: *Self, ms: u64) void {
            if (!self.isHalfOpen()) return;
            self.age_ms +|= ms;
            if (self.age_ms < limits.TLS_HALF_OPEN_MS) return;
            self.fail(status.ERR_TLS_LATE, "not admitted after {d} ms, in state {s}", .{
                limits.TLS_HALF_OPEN_MS, @tagName(self.state),
            });
        }

        /// Client of a join: say which token, and what proves that it is known. A status.
        pub fn prove(self: *Self, token: *const [16]u8, proof: *const [32]u8) i32 {
            if (self.state != .proof) return status.ERR_STATE;
            self.options.hello.kind = @intFromEnum(hellos.Kind.join);
            self.options.hello.token = token.*;
            self.options.hello.proof = proof.*;
            self.say();
            return status.OK;
        }

        /// Server: admit the peer whose hello has come, or say why not. A status.
        pub fn answer(self: *Self, verdict: hellos.Verdict) i32 {
            if (self.state != .asking or verdict == .none) return status.ERR_STATE;
            self.refuseWith(verdict);
            return status.OK;
        }

        /// Say that we send no more. What has been taken is sent before it. A status.
        pub fn close(self: *Self) i32 {
            switch (self.state) {
                .open => {
                    self.engine.shut(&self.wire);
                    self.state = .closing;
                },
                .closing, .closed => {},
                .failed => return self.status,
                else => self.fail(status.ERR_CANCELLED, "ended here before it was open", .{}),
            }
            return status.OK;
        }

        /// The connection has ended: nothing comes any more, and nothing leaves.
        pub fn end(self: *Self) void {
            switch (self.state) {
                .closed, .failed => {},
                else => self.fail(status.ERR_TLS_CUT, "the connection has ended in state {s} without a word", .{
                    @tagName(self.state),
                }),
            }
        }

        /// Whether frames of this sender may come on this session (HS-3).
        pub fn isFrom(self: *const Self, incarnation: u64) bool {
            return self.hasOpened() and self.peer_hello.incarnation == incarnation;
        }

        /// Whether the peer was admitted.
        pub fn hasOpened(self: *const Self) bool {
            return switch (self.state) {
                .open, .closing, .closed => true,
                else => false,
            };
        }

        fn isHalfOpen(self: *const Self) bool {
            return @intFromEnum(self.state) < @intFromEnum(State.open);
        }

        // ---- before it is open ----

        /// Go one state further, if there is what it takes. Whether it did.
        fn advance(self: *Self) bool {
            return switch (self.state) {
                .handshake => self.shake(),
                .greeting => switch (self.options.role) {
                    .client => self.speak() and self.listen(),
                    .server => self.listen(),
                },
                else => false,
            };
        }

        fn shake(self: *Self) bool {
            assert(self.state == .handshake);
            if (!self.has_spoken and self.wire.in.len > 0) {
                self.has_spoken = true;
                // Records of a handshake or an alert: OpenSSL's own words for anything else are a riddle.
                const first = self.wire.in[0];
                const is_tls = first == 0x16 or first == 0x15;
                if (is_tls and self.options.is_plain) {
                    self.fail(status.ERR_TLS_PLAINTEXT, "what came is TLS, and this side was told to do without", .{});
                    return false;
                }
                if (!is_tls and !self.options.is_plain) {
                    self.fail(status.ERR_TLS_PLAINTEXT, "what came is no TLS: its first byte is 0x{x:0>2}", .{first});
                    return false;
                }
            }
            switch (self.engine.handshake(&self.wire)) {
                .moved => {},
                .starved, .full => return false,
                .closed => {
                    self.fail(status.ERR_TLS_CUT, "the peer has left during the handshake", .{});
                    return false;
                },
                .failed => |failure| {
                    self.failAs(failure);
                    return false;
                },
            }
            self.peer = self.engine.peer();
            if (!self.isCertain()) return false;
            if (self.options.role == .server) {
                self.state = .greeting;
            } else if (self.options.hello.kind == @intFromEnum(hellos.Kind.join)) {
                self.state = .proof;
            } else self.say();
            return true;
        }

        /// HS-2 and the part of HS-3 that is known before the hello.
        fn isCertain(self: *Self) bool {
            if (!self.peer.is_certified) {
                if (self.options.role == .server) return true; // its hello is to be a join
                self.fail(status.ERR_TLS_CERTIFICATE, "the server has shown no certificate", .{});
                return false;
            }
            if (!self.options.has_names) return true;
            const name = names.Name.parse(self.peer.name) orelse {
                const other = self.peer.name;
                self.fail(status.ERR_TLS_NAME, "the peer's certificate has no name of a mesh, but '{s}'", .{other});
                return false;
            };
            const expected = self.options.expected;
            if (expected != 0 and name.incarnation != expected) {
                self.fail(status.ERR_TLS_NAME, "the certificate is of incarnation {x:0>16}, wanted is {x:0>16}", .{
                    name.incarnation, expected,
                });
                return false;
            }
            return true;
        }

        fn say(self: *Self) void {
            assert(self.options.role == .client);
            assert(self.state == .handshake or self.state == .proof);
            self.options.hello.encode(&self.said);
            self.said_bytes = 0;
            self.state = .greeting;
        }

        /// Send what is left of our hello. Whether all of it is out.
        fn speak(self: *Self) bool {
            assert(self.said_bytes <= hellos.BYTES);
            while (self.said_bytes < hellos.BYTES) {
                switch (self.engine.write(&self.wire, self.said[self.said_bytes..])) {
                    .moved => |n| self.said_bytes += n,
                    .starved, .full => return false,
                    .closed => unreachable, // of reading only
                    .failed => |failure| {
                        self.failAs(failure);
                        return false;
                    },
                }
            }
            return true;
        }

        /// Read what is left of the peer's hello. Whether all of it is there, and right.
        fn listen(self: *Self) bool {
            assert(self.state == .greeting);
            assert(self.heard_bytes < hellos.BYTES); // more is heard when it is open
            while (self.heard_bytes < hellos.BYTES) {
                switch (self.engine.read(&self.wire, self.heard[self.heard_bytes..])) {
                    .moved => |n| self.heard_bytes += n,
                    .starved, .full => return false,
                    .closed => {
                        self.fail(status.ERR_TLS_CUT, "the peer has left before its hello", .{});
                        return false;
                    },
                    .failed => |failure| {
                        self.failAs(failure);
                        return false;
                    },
                }
            }
            const hello = Hello.decode(&self.heard) catch |problem| {
                self.fail(status.ERR_PEER, "the peer sent {s}", .{hellos.explain(problem)});
                return false;
            };
            if (!self.isWhoItSays(&hello)) return false;
            self.peer_hello = hello;
            if (self.options.role == .server) self.state = .asking else self.conclude(@enumFromInt(hello.verdict));
            return true;
        }

        /// HS-3.
        fn isWhoItSays(self: *Self, hello: *const Hello) bool {
            const is_join = hello.kind == @intFromEnum(hellos.Kind.join);
            // Where certificates are a mesh's own, who joins has none yet; others show one always, and a token, too.
            const is_bare = !self.peer.is_certified;
            if (self.options.role == .server and (if (self.options.has_names) is_join != is_bare else is_bare)) {
                self.fail(status.ERR_TLS_CERTIFICATE, "{s}", .{if (!is_join)
                    "a peer has neither a certificate nor a token"
                else if (is_bare)
                    "a peer asks to join without a certificate"
                else
                    "a peer with a certificate asks to join"});
                return false;
            }
            if (self.options.role == .client and is_join) { // it would pass by the check of names
                self.fail(status.ERR_PEER, "the peer sent an answer that asks to join", .{});
                return false;
            }
            if (!self.options.has_names or is_join) return true;
            const name = names.Name.parse(self.peer.name).?; // `isCertain`
            if (name.incarnation == hello.incarnation and std.mem.eql(u8, &name.mesh, &hello.mesh)) return true;
            self.fail(status.ERR_TLS_NAME, "the certificate is of incarnation {x:0>16}, the hello says {x:0>16}{s}", .{
                name.incarnation,
                hello.incarnation,
                if (std.mem.eql(u8, &name.mesh, &hello.mesh)) "" else ", and another mesh",
            });
            return false;
        }

        /// Client: the server has answered.
        fn conclude(self: *Self, verdict: hellos.Verdict) void {
            assert(self.options.role == .client);
            assert(self.state == .greeting);
            if (verdict == .admitted) return self.open();
            self.fail(status.ERR_TLS_REFUSED, "the other side refused: {s}", .{verdict.words()});
        }

        fn refuseWith(self: *Self, verdict: hellos.Verdict) void {
            assert(self.options.role == .server);
            assert(self.state == .asking);
            assert(verdict != .none);
            var hello = self.options.hello;
            hello.verdict = @intFromEnum(verdict);
            hello.kind = @intFromEnum(hellos.Kind.member);
            if (!self.peer.is_certified and verdict != .admitted) { // a stranger hears of no versions
                const bare = Hello{ .incarnation = hello.incarnation, .mesh = hello.mesh, .verdict = hello.verdict };
                hello = bare;
            }
            hello.encode(&self.said);
            self.said_bytes = 0;
            const is_said = self.speak(); // into what waits, which has room for it and for the end
            if (self.state == .failed) return; // HS-5
            if (verdict == .admitted) return self.open();
            if (is_said) self.engine.shut(&self.wire);
            self.fail(status.ERR_DENIED, "refused here: {s}", .{verdict.words()});
        }

        fn open(self: *Self) void {
            assert(self.state == switch (self.options.role) {
                .client => State.greeting,
                .server => State.asking,
            });
            assert(self.status == status.OK);
            self.state = .open;
            self.wire.allowed = std.math.maxInt(u64);
            self.uncount();
        }

        fn uncount(self: *Self) void {
            if (!self.is_counted) return;
            self.is_counted = false;
            assert(self.options.half_open.?.count > 0);
            self.options.half_open.?.count -= 1;
        }

        // ---- while it is open ----

        /// One record after the other, each straight into the caller's memory.
        fn encrypt(self: *Self, io: *Io) void {
            assert(self.state == .open); // HS-1
            const from = Io.slice(io.plain_in, io.plain_in_size);
            while (io.plain_taken < from.len) {
                const rest = from[@intCast(io.plain_taken)..];
                const room = self.wire.room() -| limits.TLS_RECORD_OVERHEAD_BYTES;
                const n = @min(rest.len, room, limits.TLS_RECORD_BYTES);
                if (n == 0 or (n < rest.len and n < limits.TLS_RECORD_BYTES_MIN)) return; // a scrap of room is left
                switch (self.engine.write(&self.wire, rest[0..n])) {
                    .moved => |moved| io.plain_taken += moved,
                    .starved, .full, .closed => return,
                    .failed => |failure| return self.failAs(failure),
                }
            }
        }

        fn decrypt(self: *Self, io: *Io) void {
            assert(self.state == .open or self.state == .closing); // HS-1
            const into = Io.target(io.plain_out, io.plain_out_size);
            while (io.plain_made < into.len) {
                switch (self.engine.read(&self.wire, into[@intCast(io.plain_made)..])) {
                    .moved => |moved| io.plain_made += moved,
                    .starved, .full => return,
                    .closed => return self.leave(),
                    .failed => |failure| return self.failAs(failure),
                }
            }
        }

        /// The peer has said that it sends no more: nor do we.
        fn leave(self: *Self) void {
            assert(self.state == .open or self.state == .closing);
            if (self.state == .open) self.engine.shut(&self.wire);
            self.state = .closed;
        }

        // ---- the end ----

        fn failAs(self: *Self, failure: Failure) void {
            self.fail(failure.status, "{s}: {s}", .{ if (self.options.is_plain) "no TLS" else "TLS", failure.words });
        }

        fn fail(self: *Self, why: i32, comptime format: []const u8, arguments: anytype) void {
            assert(why != status.OK);
            if (self.state == .failed) return; // HS-5
            assert(self.status == status.OK);
            self.state = .failed;
            self.status = why;
            self.uncount();
            const room = self.detail[0 .. self.detail.len - 1]; // a zero is left at the end
            _ = std.fmt.bufPrint(room, format, arguments) catch {}; // cut
        }
    };
}
