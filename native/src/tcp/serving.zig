//! The owner's side of one connection (tcp/wire.zig). PURE: says what is to be received or sent next, hears how much of
//! it was, and asks for a verdict on each request. Bodies never pass through here, only their place in the range.
//!
//! One request at a time: what a client sends ahead waits in the socket.
//!
//! TS-1 The verdict can be changed for the worse at any time (`spoil`): from then on no byte of the granted memory is
//! asked for, what is still owed of a body is padding, what still comes of one is discarded.

const std = @import("std");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const wire = @import("wire.zig");

/// Part of the granted range.
pub const Span = struct { offset: u64, size: u64 };

/// What is to be done with the socket next.
pub const Want = union(enum) {
    /// Fill this.
    receive: []u8,
    /// Send this. `more`: a body follows at once.
    send: struct { bytes: []const u8, more: bool },
    /// Receive a body into the granted range; send one from there.
    body_in: Span,
    body_out: Span,
    /// Receive so many bytes, or send so many zeros, without touching granted memory.
    discard: u64,
    padding: u64,
    /// Give a verdict on `request`.
    verdict,
    /// Close the connection.
    end,
};

const State = enum { hello, greeting, request, verdict, body_in, beginning, body_out, ending, ended };

pub const Serving = struct {
    epoch: u64,
    nonce: wire.Nonce,
    state: State = .hello,
    /// The head that comes in, or the last request.
    in: [wire.Request.BYTES]u8 = undefined,
    in_have: u32 = 0,
    out: [wire.ServerHello.BYTES]u8 = undefined,
    out_at: u32 = 0,
    out_end: u32 = 0,
    /// The request of this turn; valid from `verdict` until its answer is out.
    request: wire.Request = undefined,
    /// Requests so far.
    counter: u64 = 0,
    /// Body bytes of it that have been moved.
    moved: u64 = 0,
    verdict: i32 = status.OK,
    value: u64 = 0,
    /// The client wanted another process.
    mistaken: bool = false,
    /// Why it has ended; completes "the peer sent".
    problem: []const u8 = "",

    /// A connection that has just been made.
    pub fn init(epoch: u64, nonce: wire.Nonce) Serving {
        return .{ .epoch = epoch, .nonce = nonce };
    }

    /// What is to be done next.
    pub fn want(self: *Serving) Want {
        return switch (self.state) {
            .hello => .{ .receive = self.in[self.in_have..wire.ClientHello.BYTES] },
            .request => .{ .receive = self.in[self.in_have..] },
            .verdict => .verdict,
            .greeting, .beginning, .ending => .{ .send = .{
                .bytes = self.out[self.out_at..self.out_end],
                .more = self.state == .beginning,
            } },
            .body_in => if (self.isSound()) .{ .body_in = self.rest() } else .{ .discard = self.missing() },
            .body_out => if (self.isSound()) .{ .body_out = self.rest() } else .{ .padding = self.missing() },
            .ended => .end,
        };
    }

    fn isSound(self: *const Serving) bool {
        return self.verdict == status.OK;
    }

    /// Bytes of the body that are still to move.
    fn missing(self: *const Serving) u64 {
        return self.request.size - self.moved;
    }

    /// What is left of a range that was found to be inside of the grant.
    fn rest(self: *const Serving) Span {
        return .{ .offset = self.request.offset + self.moved, .size = self.missing() };
    }

    /// Whether it waits for a request, and none has begun: the peer may be silent as long as it likes.
    pub fn isIdle(self: *const Serving) bool {
        return self.state == .request and self.in_have == 0;
    }

    /// So many bytes were received of what was wanted.
    pub fn received(self: *Serving, n: u64) void {
        switch (self.state) {
            .hello, .request => {
                self.in_have += @intCast(n);
                const whole: u32 = if (self.state == .hello) wire.ClientHello.BYTES else wire.Request.BYTES;
                std.debug.assert(self.in_have <= whole);
                if (self.in_have < whole) return;
                self.in_have = 0;
                self.take() catch |problem| {
                    self.problem = wire.explain(problem);
                    self.state = .ended; // TW-2
                };
            },
            .body_in => {
                std.debug.assert(n <= self.missing());
                self.moved += n;
                if (self.missing() == 0) self.answer();
            },
            else => unreachable, // nothing was wanted
        }
    }

    fn take(self: *Serving) wire.Error!void {
        if (self.state == .hello) {
            const hello = try wire.ClientHello.decode(self.in[0..wire.ClientHello.BYTES]);
            (wire.ServerHello{ .epoch = self.epoch, .nonce = self.nonce }).encode(&self.out);
            self.mistaken = hello.epoch != self.epoch;
            return self.say(.greeting, wire.ServerHello.BYTES);
        }
        self.request = try wire.Request.decode(&self.in);
        if (self.request.counter != self.counter) return error.Counter;
        self.counter += 1;
        self.moved = 0;
        self.value = 0;
        self.verdict = status.OK;
        self.state = .verdict;
    }

    fn say(self: *Serving, state: State, bytes: u32) void {
        self.out_at = 0;
        self.out_end = bytes;
        self.state = state;
    }

    /// So many bytes were sent of what was wanted, and of the body that follows it.
    pub fn sent(self: *Serving, n: u64) void {
        var left = n;
        while (true) {
            switch (self.state) {
                .greeting, .beginning, .ending => {
                    const step: u32 = @intCast(@min(left, self.out_end - self.out_at));
                    self.out_at += step;
                    left -= step;
                    if (self.out_at < self.out_end) break;
                    self.state = switch (self.state) {
                        .greeting => if (self.mistaken) .ended else .request,
                        .beginning => .body_out,
                        else => .request,
                    };
                },
                .body_out => {
                    const step = @min(left, self.missing());
                    self.moved += step;
                    left -= step;
                    if (self.missing() > 0) break;
                    self.answer();
                },
                else => break,
            }
            if (left == 0 and self.state != .body_out) break; // an empty body is over at once
        }
        std.debug.assert(left == 0);
    }

    // ---- verdicts ----

    /// Whether the sender of the request knows this secret.
    pub fn isAuthentic(self: *const Serving, secret: *const wire.Secret) bool {
        std.debug.assert(self.state == .verdict);
        return wire.Request.isAuthentic(&self.in, &self.nonce, secret);
    }

    /// Let a READ or WRITE begin.
    pub fn admit(self: *Serving) void {
        std.debug.assert(self.state == .verdict);
        if (self.request.kind == .write) {
            self.state = .body_in;
            if (self.request.size == 0) self.answer();
            return;
        }
        std.debug.assert(self.request.kind == .read);
        self.put(.{ .counter = self.request.counter, .status = status.UNDER_WAY, .size = self.request.size });
        self.say(.beginning, wire.Answer.BYTES);
    }

    /// Say how a request ended that moves no body: it was refused, or it was an ADD or SWAP.
    pub fn conclude(self: *Serving, verdict: i32, value: u64) void {
        std.debug.assert(self.state == .verdict);
        self.verdict = verdict;
        self.value = value;
        // What a client has sent after a WRITE is its body, allowed or not.
        if (self.request.kind == .write and self.request.size > 0) {
            std.debug.assert(verdict != status.OK);
            self.state = .body_in;
        } else {
            self.answer();
        }
    }

    /// A request that was admitted must not go on. TS-1
    pub fn spoil(self: *Serving, verdict: i32) void {
        std.debug.assert(verdict != status.OK);
        switch (self.state) {
            .body_in, .beginning, .body_out => self.verdict = verdict,
            else => {},
        }
    }

    /// What is about to be said of a request that has just moved its last piece is wrong.
    pub fn amend(self: *Serving, verdict: i32) void {
        if (self.state != .ending or self.out_at > 0) return;
        self.verdict = verdict;
        self.answer();
    }

    /// The body that follows the head which is wanted to be sent.
    pub fn following(self: *const Serving) ?Span {
        if (self.state != .beginning or self.verdict != status.OK or self.request.size == 0) return null;
        return self.rest();
    }

    fn answer(self: *Serving) void {
        self.put(.{ .counter = self.request.counter, .status = self.verdict, .value = self.value });
        self.say(.ending, wire.Answer.BYTES);
    }

    fn put(self: *Serving, one: wire.Answer) void {
        one.encode(self.out[0..wire.Answer.BYTES]);
    }
};

comptime {
    std.debug.assert(wire.Answer.BYTES <= wire.ServerHello.BYTES);
    std.debug.assert(wire.ClientHello.BYTES <= wire.Request.BYTES);
}
