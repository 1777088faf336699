//! The client's side of one connection (tcp/wire.zig). PURE: says what is to be sent and received next, hears how much
//! of it was, and tells how each request ended. Both directions go on at the same time. Bodies never pass through here:
//! each request carries the number of a transfer and where in it its bytes belong.
//!
//! TA-1 Requests are answered in the order in which they were asked, and only when all of them has left. TA-2 What is
//! asked for is at most TCP_WINDOW_REQUESTS ahead of the answers.

const std = @import("std");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const wire = @import("wire.zig");

const WINDOW = limits.TCP_WINDOW_REQUESTS;

/// A request that has no answer yet.
pub const Pending = struct {
    request: wire.Request,
    bytes: [wire.Request.BYTES]u8,
    /// What it belongs to; the caller's.
    about: u32,
    /// Where in the caller's memory its body begins.
    local: u64,
};

/// Part of the body of a request, in the caller's memory.
pub const Span = struct { about: u32, local: u64, size: u64 };

pub const Send = union(enum) {
    nothing,
    /// Send this. `more`: a body follows at once.
    head: struct { bytes: []const u8, more: bool },
    body: Span,
};

pub const Receive = union(enum) {
    /// Fill this.
    head: []u8,
    body: Span,
};

pub const Event = union(enum) {
    none,
    /// Requests can be asked now.
    greeted,
    /// Another process answers: the one that was wanted is no more.
    stranger,
    ended: struct { about: u32, request: wire.Request, status: i32, value: u64 },
};

pub const Asking = struct {
    epoch: u64,
    nonce: wire.Nonce = undefined,
    greeted: bool = false,
    hello: [wire.ClientHello.BYTES]u8,
    hello_at: u32 = 0,
    /// The request number n is at n % WINDOW.
    pendings: [WINDOW]Pending = undefined,
    /// Requests that were asked, have left whole, were answered.
    asked: u64 = 0,
    left: u64 = 0,
    answered: u64 = 0,
    /// Of the request that is leaving: bytes of its head, and of its body, that have left.
    head_at: u32 = 0,
    body_out: u64 = 0,
    /// What is being heard: a head, or the body after it.
    in: [wire.ServerHello.BYTES]u8 = undefined,
    in_have: u32 = 0,
    hearing: enum { head, body, ending } = .head,
    body_in: u64 = 0,

    /// A connection to the process of this epoch.
    pub fn init(epoch: u64) Asking {
        var self = Asking{ .epoch = epoch, .hello = undefined };
        (wire.ClientHello{ .epoch = epoch }).encode(&self.hello);
        return self;
    }

    // ---- asking ----

    /// How many more requests can be asked now.
    pub fn room(self: *const Asking) u64 {
        return if (self.greeted) WINDOW - (self.asked - self.answered) else 0;
    }

    /// Whether everything that was asked is answered.
    pub fn isSettled(self: *const Asking) bool {
        return self.asked == self.answered;
    }

    /// Whether something can be asked, nothing is, and nothing of an answer has come.
    pub fn isIdle(self: *const Asking) bool {
        return self.greeted and self.isSettled() and self.in_have == 0;
    }

    /// Ask; the counter of `request` is set here. There must be room. TA-2
    pub fn ask(self: *Asking, request: wire.Request, secret: *const wire.Secret, about: u32, local: u64) void {
        std.debug.assert(self.room() > 0);
        const pending = &self.pendings[self.asked % WINDOW];
        pending.* = .{ .request = request, .bytes = undefined, .about = about, .local = local };
        pending.request.counter = self.asked;
        pending.request.encode(&self.nonce, secret, &pending.bytes);
        self.asked += 1;
    }

    // ---- sending ----

    /// What is to be sent next.
    pub fn toSend(self: *const Asking) Send {
        if (self.hello_at < self.hello.len)
            return .{ .head = .{ .bytes = self.hello[self.hello_at..], .more = false } };
        if (self.left == self.asked) return .nothing;
        const pending = &self.pendings[self.left % WINDOW];
        if (self.head_at < pending.bytes.len)
            return .{ .head = .{ .bytes = pending.bytes[self.head_at..], .more = bodyOf(pending) > 0 } };
        return .{ .body = .{
            .about = pending.about,
            .local = pending.local + self.body_out,
            .size = bodyOf(pending) - self.body_out,
        } };
    }

    fn bodyOf(pending: *const Pending) u64 {
        return if (pending.request.kind == .write) pending.request.size else 0;
    }

    /// So many bytes were sent of it.
    pub fn sent(self: *Asking, n: u64) void {
        switch (self.toSend()) {
            .nothing => unreachable, // nothing was to be sent
            .head => |head| {
                std.debug.assert(n <= head.bytes.len);
                if (self.hello_at < self.hello.len) {
                    self.hello_at += @intCast(n);
                    return;
                }
                self.head_at += @intCast(n);
            },
            .body => |body| {
                std.debug.assert(n <= body.size);
                self.body_out += n;
            },
        }
        const pending = &self.pendings[self.left % WINDOW];
        if (self.head_at < pending.bytes.len or self.body_out < bodyOf(pending)) return;
        self.left += 1;
        self.head_at = 0;
        self.body_out = 0;
    }

    // ---- hearing ----

    /// Where what comes next belongs.
    pub fn toReceive(self: *Asking) Receive {
        if (self.hearing == .body) {
            const pending = &self.pendings[self.answered % WINDOW];
            return .{ .body = .{
                .about = pending.about,
                .local = pending.local + self.body_in,
                .size = pending.request.size - self.body_in,
            } };
        }
        const whole: u32 = if (self.greeted) wire.Answer.BYTES else wire.ServerHello.BYTES;
        return .{ .head = self.in[self.in_have..whole] };
    }

    /// So many bytes of it came. An error ends the connection.
    pub fn received(self: *Asking, n: u64) wire.Error!Event {
        if (self.hearing == .body) {
            self.body_in += n;
            const size = self.pendings[self.answered % WINDOW].request.size;
            std.debug.assert(self.body_in <= size);
            if (self.body_in == size) self.hearing = .ending;
            return .none;
        }
        self.in_have += @intCast(n);
        const whole: u32 = if (self.greeted) wire.Answer.BYTES else wire.ServerHello.BYTES;
        std.debug.assert(self.in_have <= whole);
        if (self.in_have < whole) return .none;
        self.in_have = 0;
        return if (self.greeted) self.hear() else self.greet();
    }

    fn greet(self: *Asking) wire.Error!Event {
        const hello = try wire.ServerHello.decode(&self.in);
        if (hello.epoch != self.epoch) return .stranger;
        self.nonce = hello.nonce;
        self.greeted = true;
        return .greeted;
    }

    fn hear(self: *Asking) wire.Error!Event {
        if (self.answered == self.left) return error.Counter; // TA-1
        const pending = &self.pendings[self.answered % WINDOW];
        const answer = try wire.Answer.decode(self.in[0..wire.Answer.BYTES], pending.request, self.hearing == .ending);
        if (answer.status == status.UNDER_WAY) {
            self.body_in = 0;
            self.hearing = if (answer.size > 0) .body else .ending;
            return .none;
        }
        self.hearing = .head;
        self.answered += 1;
        return .{ .ended = .{
            .about = pending.about,
            .request = pending.request,
            .status = answer.status,
            .value = answer.value,
        } };
    }
};

comptime {
    std.debug.assert(wire.Answer.BYTES <= wire.ServerHello.BYTES);
}
