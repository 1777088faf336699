//! One side of a session between two hosts, as a state machine: PURE, bytes and ticks in, bytes and news out. It takes
//! no memory after its begin. `tests/relay/oracle/machine.py` is the same in Python, for the same wire.
//!
//! HM-1 Frames that have a number are taken by the peer once, in order, whatever becomes of connections: they are kept
//! until they are acknowledged, and leave again behind the resumption of a new connection. HM-2 What is kept is
//! bounded. HM-3 Of one channel at most limit HOST_WINDOW_BYTES are under way, or not yet taken by its reader. HM-4
//! What this side says of itself goes first, then channel 0, then the others in turn, a quantum each; small pieces of
//! several go in one frame, which is no difference for them. HM-5 Silence is counted in ticks, with and without a
//! connection. HM-6 After a violation, which has words, nothing is read any more.

const std = @import("std");
const assert = std.debug.assert;
const channels = @import("channels.zig");
const folds = @import("fold.zig");
const frames = @import("frame.zig");
const limits = @import("../limits.zig");
const resends = @import("resend.zig");

const Channel = channels.Channel;
const Header = frames.Header;
const Index = channels.Index;
const CONTROL = channels.CONTROL;

/// Why a session is over; as in `trimesh.h`.
pub const Ending = enum(u32) { lease = 1, bye = 2, closed = 3, protocol = 4 };

/// What has come, with channels by their index. Bytes lie where they were received.
pub const News = union(enum) {
    nothing,
    /// The peer has said what it expects: frames leave again.
    resumed,
    opened: struct { index: Index, purpose: []const u8 },
    data: struct { index: Index, bytes: []const u8 },
    /// Pieces of several channels, for `nextOf`.
    many: []const u8,
    /// The peer sends no more on a channel.
    closed: Index,
    /// Gone, both ways: to be forgotten by `forget`.
    reset: Index,
    bye,
};

/// One frame, of so many bytes.
pub const Got = struct { size: usize, news: News };

pub const Options = struct {
    is_dialler: bool,
    /// Drawn by who dials; else 0.
    session: u64,
    lease_ticks: u32,
};

pub const Memory = struct { kept: []u8, channels: []Channel, buckets: []channels.Index };

pub const Machine = struct {
    options: Options,
    session: u64,
    kept: resends.Resend,
    table: channels.Table,
    turns: channels.Line("next_turn", "in_turns") = .{},
    chores: channels.Line("next_chore", "in_chores") = .{},
    next_theirs: u32,
    /// The smallest number that this side has not opened.
    next_own: u32,
    is_connected: bool = false,
    is_resumed: bool = false,
    /// The session is being closed here; BYE is on its way; the peer's has come.
    is_closing: bool = false,
    has_said_bye: bool = false,
    has_bye: bool = false,
    owes_resumption: bool = false,
    owes_beat: bool = false,
    /// Frames without a number, on their way out.
    own: [2 * frames.BYTES + frames.RESUME_BYTES]u8 = undefined,
    own_at: usize = 0,
    own_end: usize = 0,
    expected: u64 = 0,
    unacknowledged_frames: u32 = 0,
    unacknowledged_bytes: u64 = 0,
    silent_ticks: u32 = 0,
    quiet_ticks: u32 = 0,
    frames_received: u64 = 0,
    bytes_sent: u64 = 0,
    bytes_received: u64 = 0,
    resent: u64 = 0,
    /// Frames below it left on a connection before.
    resend_end: u64 = 0,
    duplicates: u64 = 0,
    /// A frame that is being made of small pieces of several channels.
    fold: folds.Fold = .{},
    /// Why `receive` has said error.Protocol; completes "the peer sent".
    problem: []const u8 = "",

    /// Begin without a connection. The memory is zeros, but for `kept`.
    pub fn init(options: Options, memory: Memory) Machine {
        assert(options.is_dialler == (options.session != 0));
        assert(options.lease_ticks > 0);
        assert(memory.kept.len == resends.MEMORY_BYTES);
        return .{
            .options = options,
            .session = options.session,
            .kept = .{ .memory = memory.kept },
            .table = .init(memory.channels, memory.buckets),
            .next_own = if (options.is_dialler) 1 else 2,
            .next_theirs = if (options.is_dialler) 2 else 1,
        };
    }

    /// The channel of an index.
    pub fn at(self: *Machine, index: Index) *Channel {
        assert(index < self.table.used);
        return &self.table.all[index];
    }

    // ---- connections and time ----

    /// Begin with a new connection.
    pub fn connect(self: *Machine) void {
        self.is_connected = true;
        self.is_resumed = false;
        self.owes_resumption = true;
        self.owes_beat = false;
        self.own_at = 0;
        self.own_end = 0;
        self.quiet_ticks = 0;
        self.kept.rewind();
        assert(self.kept.unsent == self.kept.kept); // HM-1
    }

    /// The connection has ended.
    pub fn disconnect(self: *Machine) void {
        self.is_connected = false;
        self.is_resumed = false;
    }

    /// Time has passed. Why the session is over, if it is.
    pub fn tick(self: *Machine) ?Ending {
        self.silent_ticks +|= 1;
        self.quiet_ticks +|= 1;
        if (self.quiet_ticks >= limits.HOST_BEAT_TICKS) self.owes_beat = true;
        if (self.isParted() or (self.has_said_bye and !self.is_connected)) return .closed;
        if (self.silent_ticks < self.options.lease_ticks) return null;
        return if (self.has_bye) .bye else .lease;
    }

    /// Whether the peer has got everything, the end included.
    pub fn isParted(self: *const Machine) bool {
        assert((self.kept.kept == 0) == (self.kept.oldest == self.kept.next));
        return self.has_said_bye and self.kept.kept == 0;
    }

    /// Whether the peer's end has come, and the peer has been told so.
    pub fn hasAnsweredBye(self: *const Machine) bool {
        return self.has_bye and !self.owes_beat and self.own_at == self.own_end;
    }

    // ---- channels ----

    /// Open a channel by a number that its owner has drawn. Null: not now, there is no room.
    pub fn open(self: *Machine, number: u32, purpose: []const u8) ?Index {
        assert((number % 2 == 1) == self.options.is_dialler);
        assert(number >= self.next_own);
        assert(purpose.len <= limits.HOST_PURPOSE_BYTES_MAX);
        if (!self.is_resumed) return null;
        const there = self.kept.place(purpose.len, resends.KEPT_BYTES_MAX) orelse return null;
        const index = self.table.add(number) orelse return null;
        self.next_own = number + 2;
        @memcpy(there[frames.BYTES..], purpose);
        self.kept.commit(there, .{ .kind = .open, .size = @intCast(purpose.len), .channel = number });
        return index;
    }

    /// There may be bytes to read for a channel.
    pub fn ready(self: *Machine, index: Index) void {
        assert(self.at(index).is_used);
        self.at(index).is_ready = true;
        self.takeTurn(index);
    }

    fn takeTurn(self: *Machine, index: Index) void {
        if (index != CONTROL and self.at(index).mayRead()) self.turns.join(self.table.all, index);
    }

    /// Bytes that have come were taken: as many may follow.
    pub fn consumed(self: *Machine, index: Index, bytes: usize) void {
        const one = self.at(index);
        one.consumed += bytes;
        one.check();
        if (one.peer_closed or one.allowed - one.consumed > limits.HOST_WINDOW_BYTES / 2) return;
        one.owes_window = true;
        self.chores.join(self.table.all, index);
    }

    /// End a channel at once, both ways; the peer is told.
    pub fn reset(self: *Machine, index: Index) void {
        assert(index != CONTROL);
        assert(self.at(index).is_used);
        assert(!self.at(index).is_reset);
        self.turns.leave(self.table.all, index);
        self.at(index).is_reset = true;
        self.chores.join(self.table.all, index);
    }

    /// Whether both directions have ended.
    pub fn isOver(self: *Machine, index: Index) bool {
        assert(self.at(index).is_used);
        return self.at(index).has_closed and self.at(index).peer_closed;
    }

    /// Forget a channel that is over, or that the peer has reset.
    pub fn forget(self: *Machine, index: Index) void {
        assert(index != CONTROL);
        self.turns.leave(self.table.all, index);
        self.chores.leave(self.table.all, index);
        self.table.remove(index);
    }

    // ---- what is sent ----

    pub const Chore = union(enum) { said, closed: Index };

    /// Make one frame that says something of a channel. Null: there is none, or no room.
    pub fn doChore(self: *Machine) ?Chore {
        if (!self.is_resumed or self.has_said_bye) return null;
        const there = self.kept.place(frames.WINDOW_BYTES, resends.KEPT_BYTES_MAX) orelse return null;
        const index = self.chores.shift(self.table.all) orelse return null;
        const one = self.at(index);
        one.check();
        if (one.is_reset) {
            assert(index != CONTROL);
            self.kept.commit(there, .{ .kind = .reset, .channel = one.number });
            self.table.remove(index);
            return .said;
        }
        if (one.owes_window) {
            one.owes_window = false;
            const allowed = one.consumed + limits.HOST_WINDOW_BYTES;
            assert(allowed >= one.allowed); // a window that shrinks would be a violation
            one.allowed = allowed;
            std.mem.writeInt(u64, there[frames.BYTES..][0..8], one.allowed, .little);
            self.kept.commit(there, .{ .kind = .window, .size = frames.WINDOW_BYTES, .channel = one.number });
            if (one.is_finished and !one.has_closed) self.chores.join(self.table.all, index);
            return .said;
        }
        if (!one.is_finished or one.has_closed or index == CONTROL) return .said;
        one.has_closed = true;
        self.kept.commit(there, .{ .kind = .close, .channel = one.number });
        return .{ .closed = index };
    }

    /// Whose bytes are to be read next: channel 0, then the others in turn. Null: of none.
    pub fn nextTurn(self: *Machine) ?Index {
        if (!self.is_resumed or self.has_said_bye) return null;
        if (self.at(CONTROL).mayRead()) return CONTROL;
        return if (self.turns.first == channels.NONE) null else self.turns.first;
    }

    /// Where to read the bytes of a channel whose turn it is, which may be fewer. Null: too many are kept.
    pub fn place(self: *Machine, index: Index) ?[]u8 {
        const one = self.at(index);
        assert(one.mayRead());
        const most: usize = @intCast(@min(limits.HOST_QUANTUM_BYTES, one.granted - one.sent));
        assert(most > 0);
        if (index != CONTROL) if (self.fold.place(most)) |there| return there;
        self.endFold();
        const there = self.kept.place(most, limits.HOST_RESEND_BYTES) orelse return null;
        return there[frames.BYTES..];
    }

    /// So many bytes were read to `to`, which was the place: they leave, and the next channel has its turn.
    pub fn give(self: *Machine, index: Index, to: []u8, bytes: usize) void {
        assert(bytes > 0);
        assert(bytes <= to.len);
        const one = self.at(index);
        if (self.fold.count > 0) {
            self.fold.add(one.number, bytes);
        } else {
            const whole = (to.ptr - frames.BYTES)[0 .. to.len + frames.BYTES];
            const is_folded = index != CONTROL and self.fold.begin(whole, one.number, bytes);
            if (!is_folded) self.kept.commit(whole, .{ .kind = .data, .size = @intCast(bytes), .channel = one.number });
        }
        one.sent += bytes;
        one.check();
        self.bytes_sent += bytes;
        if (index == CONTROL) return;
        self.turns.leave(self.table.all, index);
        self.takeTurn(index);
    }

    /// No more is read for now: what was folded leaves. Called before anything else is kept.
    pub fn endFold(self: *Machine) void {
        if (self.fold.end()) |header| self.kept.commit(self.fold.whole, header);
    }

    /// There is nothing to read for a channel now.
    pub fn dry(self: *Machine, index: Index) void {
        self.at(index).is_ready = false;
        self.turns.leave(self.table.all, index);
    }

    /// Nothing will be read for a channel any more.
    pub fn finish(self: *Machine, index: Index) void {
        self.dry(index);
        const one = self.at(index);
        one.is_finished = true;
        if (index != CONTROL and !one.is_reset) self.chores.join(self.table.all, index);
    }

    /// End the session behind all that there is to read now; called until it is true.
    pub fn bye(self: *Machine) bool {
        if (self.has_said_bye) return true;
        if (!self.is_resumed or self.nextTurn() != null or self.chores.first != channels.NONE) return false;
        const there = self.kept.place(0, resends.KEPT_BYTES_MAX) orelse return false;
        self.kept.commit(there, .{ .kind = .bye });
        self.has_said_bye = true;
        return true;
    }

    /// What leaves next on the connection; about `most` bytes.
    pub fn outgoing(self: *Machine, most: usize) []const u8 {
        assert(self.own_at <= self.own_end);
        assert(self.own_end <= self.own.len);
        if (!self.is_connected) return "";
        if (self.kept.rest > 0 and self.hasOwn()) return self.kept.begun();
        self.makeOwn();
        if (self.own_at < self.own_end) return self.own[self.own_at..self.own_end];
        return if (self.is_resumed) self.kept.outgoing(self.expected, most) else "";
    }

    fn isAckDue(self: *const Machine) bool {
        return self.unacknowledged_frames >= limits.HOST_ACK_FRAMES or
            self.unacknowledged_bytes >= limits.HOST_ACK_BYTES;
    }

    fn owesBeat(self: *const Machine) bool {
        return self.is_resumed and (self.owes_beat or (self.kept.unsent == 0 and self.isAckDue()));
    }

    /// The side that was dialled learns the number of the session first.
    fn owesResumption(self: *const Machine) bool {
        return self.owes_resumption and self.session != 0;
    }

    fn hasOwn(self: *const Machine) bool {
        return self.own_at < self.own_end or self.owesResumption() or self.owesBeat();
    }

    fn makeOwn(self: *Machine) void {
        if (self.own_at < self.own_end) return;
        self.own_at = 0;
        self.own_end = 0;
        if (self.owesResumption()) {
            self.owes_resumption = false;
            const is_new = self.expected == 0 and self.kept.next == 0;
            const payload = self.own[frames.BYTES..][0..frames.RESUME_BYTES];
            std.mem.writeInt(u64, payload[0..8], self.session, .little);
            std.mem.writeInt(u64, payload[8..16], self.expected, .little);
            std.mem.writeInt(u64, payload[16..24], if (is_new) frames.FLAG_NEW else 0, .little);
            self.say(.{ .kind = .resumption, .size = frames.RESUME_BYTES });
        } else if (self.owesBeat()) {
            self.owes_beat = false;
            self.say(.{ .kind = .beat });
        }
    }

    fn say(self: *Machine, header: Header) void {
        assert(!header.kind.isNumbered()); // what has a number is kept: HM-1
        assert(self.own_at == 0);
        assert(self.own_end == 0);
        var said = header;
        said.ack = self.expected;
        frames.encode(said, self.own[0..frames.BYTES]);
        self.own_end = said.span();
    }

    /// So many bytes of it have left.
    pub fn sent(self: *Machine, bytes: usize) void {
        if (bytes == 0) return;
        assert(self.is_connected);
        self.quiet_ticks = 0;
        if (self.kept.rest == 0 and self.own_at < self.own_end) {
            self.own_at += bytes;
            assert(self.own_at <= self.own_end);
        } else {
            const before = self.kept.leaving;
            self.kept.sent(bytes);
            self.resent += @min(self.kept.leaving, self.resend_end) -| @min(before, self.resend_end);
        }
        self.unacknowledged_frames = 0;
        self.unacknowledged_bytes = 0;
    }

    // ---- what has come ----

    /// Read one frame from the beginning of `bytes`. Null: it has not come as a whole.
    pub fn receive(self: *Machine, bytes: []const u8) error{Protocol}!?Got {
        assert(self.problem.len == 0); // HM-6
        if (bytes.len < frames.BYTES) return null;
        const header = frames.decode(bytes[0..frames.BYTES]) catch |why| return self.violated(frames.explain(why));
        if (self.is_resumed == (header.kind == .resumption)) {
            return self.violated("a connection that does not begin with one resumption");
        }
        if (bytes.len < header.span()) return null;
        self.silent_ticks = 0;
        const payload = bytes[frames.BYTES..header.span()];
        return .{ .size = header.span(), .news = try self.take(header, payload) };
    }

    fn violated(self: *Machine, problem: []const u8) error{Protocol} {
        assert(problem.len > 0);
        self.problem = problem;
        return error.Protocol;
    }

    fn take(self: *Machine, header: Header, payload: []const u8) error{Protocol}!News {
        if (header.kind == .resumption) {
            try self.resumed(header.ack, payload[0..frames.RESUME_BYTES]);
            return .resumed;
        }
        if (!self.kept.release(header.ack)) return self.violated("an acknowledgement of what it was not sent");
        if (!header.kind.isNumbered()) return .nothing;
        if (header.number > self.expected) return self.violated("a frame whose number is not the next");
        if (header.number < self.expected) {
            self.duplicates += 1;
            return .nothing;
        }
        self.expected += 1;
        self.frames_received += 1;
        self.unacknowledged_frames += 1;
        self.unacknowledged_bytes += payload.len;
        return self.takeNew(header, payload);
    }

    fn resumed(self: *Machine, ack: u64, payload: *const [frames.RESUME_BYTES]u8) error{Protocol}!void {
        const session = std.mem.readInt(u64, payload[0..8], .little);
        const flags = std.mem.readInt(u64, payload[16..24], .little);
        const is_new = flags & frames.FLAG_NEW != 0;
        if (flags & ~frames.FLAG_NEW != 0) return self.violated("a resumption with unknown flags");
        if (self.session == 0 and is_new) self.session = session;
        if (session == 0 or session != self.session) return self.violated("a resumption of another session");
        if (is_new and self.expected > 0) return self.violated("a beginning of a session that has begun");
        if (std.mem.readInt(u64, payload[8..16], .little) != ack) {
            return self.violated("a resumption that expects another frame than it acknowledges");
        }
        self.resend_end = @max(self.resend_end, self.kept.left);
        if (!self.kept.releaseBefore(ack)) return self.violated("an acknowledgement of what it was not sent");
        assert(self.session != 0);
        self.is_resumed = true;
    }

    fn takeNew(self: *Machine, header: Header, payload: []const u8) error{Protocol}!News {
        switch (header.kind) {
            .bye => {
                self.has_bye = true;
                self.owes_beat = true;
                return .bye;
            },
            .open => return self.opened(header.channel, payload),
            .many => {
                if (!frames.isMany(payload)) return self.violated("bytes of several channels that are none");
                return .{ .many = payload };
            },
            else => {},
        }
        const index = self.table.find(header.channel) orelse {
            const is_own = (header.channel % 2 == 1) == self.options.is_dialler;
            const next = if (is_own) self.next_own else self.next_theirs;
            if (header.channel >= next) return self.violated("a frame for a channel that was not opened");
            return .nothing; // it has crossed the end of its channel
        };
        const one = self.at(index);
        if (one.is_reset) return .nothing;
        switch (header.kind) {
            .data => {
                one.received += payload.len;
                if (one.peer_closed) return self.violated("bytes on a channel that it had closed");
                if (one.received > one.allowed) return self.violated("more bytes on a channel than it was granted");
                one.check();
                self.bytes_received += payload.len;
                return .{ .data = .{ .index = index, .bytes = payload } };
            },
            .window => {
                const granted = std.mem.readInt(u64, payload[0..8], .little);
                if (granted < one.granted) return self.violated("a window that shrinks");
                one.granted = granted;
                self.takeTurn(index);
                return .nothing;
            },
            .reset => return if (self.isOver(index)) .nothing else .{ .reset = index },
            .close => {
                if (one.peer_closed) return self.violated("the end of a channel twice");
                one.peer_closed = true;
                return .{ .closed = index };
            },
            .resumption, .beat, .bye, .open, .many => unreachable, // above
        }
    }

    /// Take one of several channels away, as if it had come by itself. Null: there is none any more.
    pub fn nextOf(self: *Machine, rest: *[]const u8) error{Protocol}!?News {
        assert(self.problem.len == 0); // HM-6
        const piece = frames.nextPiece(rest) orelse return null;
        const header = Header{ .kind = .data, .size = @intCast(piece.bytes.len), .channel = piece.channel };
        return try self.takeNew(header, piece.bytes);
    }

    fn opened(self: *Machine, number: u32, purpose: []const u8) error{Protocol}!News {
        const is_own = (number % 2 == 1) == self.options.is_dialler;
        if (is_own or number < self.next_theirs) return self.violated("a channel whose number is not one of its own");
        if (number > std.math.maxInt(u32) - 2) return self.violated("a channel beyond the last number");
        assert(number % 2 == self.next_theirs % 2);
        const index = self.table.add(number) orelse return self.violated("more channels than a session may have");
        self.next_theirs = number + 2;
        return .{ .opened = .{ .index = index, .purpose = purpose } };
    }
};
