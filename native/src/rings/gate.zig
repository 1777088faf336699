//! What comes out of the ring of a link next, in a process that a test has armed: what the planned faults let through.
//! The gate moves the cursor of the ring to the frame that is to be read; the link reads it as ever. `link` is a
//! `*Link`: links/link.zig stands above.
//!
//! GA-1 Frames of one lane come in order; a goodbye comes after everything. GA-2 What is late, or held, stays in the
//! ring: a link holds no more than its ring, however late it is. GA-3 A frame is judged once, when it is first seen.
//! GA-4 The peer may write to what waits: the link checks it when it reads it.

const std = @import("std");
const assert = std.debug.assert;
const body = @import("../protocol/body.zig");
const faults = @import("../protocol/faults.zig");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");

const Signal = @import("../protocol/record.zig").Signal;

/// Move the cursor to the next frame that may be read. False: there is none now, or the link has ended on it.
pub noinline fn seek(link: anytype) bool {
    return link.gate.?.seek(link, sys.monotonicNs());
}

/// Whether the end of a link, which T1 has seen, has to wait for what is late or held. A lease that has run out, and
/// what the peer must not send, do not wait.
pub fn delaysEnd(link: anytype, signals: u32) bool {
    const gate = link.gate orelse return false;
    if (signals & (Signal.LEASE | Signal.PROTOCOL | Signal.NO_HELLO) != 0) return false;
    return gate.count > 0 or isHeld(link);
}

fn isHeld(link: anytype) bool {
    return link.common.arms.?.table.isHeld(link.inbound.epoch, link.common.epoch);
}

const Entry = struct {
    at: u64,
    due: u64,
    random: u64,
    head_size: u16,
    lane: frame.Lane,
    fate: faults.Fate,
    /// A goodbye, or what the link ends on.
    is_last: bool,
    is_done: bool,
};

/// The frames of one link that have come and not passed. All zero is a gate without any.
pub const Gate = struct {
    entries: [limits.FAULT_FRAMES_MAX]Entry,
    first: u32,
    count: u32,
    /// Place in the ring behind the last entry.
    judged: u64,
    last_due: [2]u64,

    /// Begin with what comes from here on.
    pub fn reset(self: *Gate, cursor: u64) void {
        assert(cursor % limits.FRAME_ALIGN_BYTES == 0);
        self.first = 0;
        self.count = 0;
        self.judged = cursor;
        self.last_due = .{ 0, 0 };
    }

    fn entry(self: *Gate, i: u32) *Entry {
        assert(i < self.entries.len);
        assert(i <= self.count); // the next one is made in its place
        return &self.entries[(self.first + i) % self.entries.len];
    }

    fn seek(self: *Gate, link: anytype, now: u64) bool {
        self.lookAhead(link, now);
        if (self.count == 0 or isHeld(link)) return false;
        const one = self.front(now) orelse return false;
        assert(!one.is_done);
        assert(one.due <= now);
        assert(link.rx.tail <= one.at); // GA-2: its bytes were not given back
        assert(one.at <= self.judged);
        link.rx.cursor = one.at;
        switch (one.fate) {
            .arrives => one.is_done = true,
            .lost => {
                link.lose();
                return false;
            },
            .repeated => one.fate = .arrives, // it stays, and so comes again
            .damaged => {
                damage(link, one);
                one.is_done = true;
            },
        }
        return true;
    }

    /// Put the cursor where everything before has been read.
    pub fn leave(self: *Gate, link: anytype) void {
        while (self.count > 0 and self.entry(0).is_done) {
            self.first = (self.first + 1) % @as(u32, self.entries.len);
            self.count -= 1;
        }
        link.rx.cursor = if (self.count > 0) self.entry(0).at else self.judged;
        assert(link.rx.tail <= link.rx.cursor);
        assert(link.rx.cursor <= self.judged);
    }

    /// Judge the frames that are new.
    fn lookAhead(self: *Gate, link: anytype, now: u64) void {
        const common = link.common;
        while (self.count < self.entries.len) {
            link.rx.cursor = self.judged;
            const available = link.rx.available() catch return self.passOn();
            if (available == 0) return;
            if (available < frame.BYTES) return self.passOn();
            const bytes = link.rx.place();
            const header = frame.decode(bytes[0..frame.BYTES]) catch return self.passOn();
            if (header.span() > available) return self.passOn();
            const is_content = header.kind == .message or header.kind == .fragment;
            const weight = header.span() + carried(header, bytes);
            const verdict = common.arms.?.table.judge(link.inbound.epoch, common.epoch, weight, now, is_content);
            const lane = @intFromEnum(header.lane);
            const due = @max(verdict.due, self.last_due[lane]);
            self.last_due[lane] = due;
            self.entry(self.count).* = .{
                .at = self.judged,
                .due = due,
                .random = verdict.random,
                .head_size = header.head_size,
                .lane = header.lane,
                .fate = verdict.fate,
                .is_last = header.kind == .bye,
                .is_done = false,
            };
            self.count += 1;
            self.judged += header.span();
            assert(self.judged - link.rx.tail <= link.rx.map.capacity); // GA-2
        }
    }

    /// What cannot be judged is read after all that came before it; the link ends on it, with the reason.
    fn passOn(self: *Gate) void {
        if (self.count > 0 and self.entry(self.count - 1).at == self.judged) return; // seen before
        assert(self.count < self.entries.len);
        self.entry(self.count).* = .{
            .at = self.judged,
            .due = @max(self.last_due[0], self.last_due[1]),
            .random = 0,
            .head_size = 0,
            .lane = .control,
            .fate = .arrives,
            .is_last = true,
            .is_done = false,
        };
        self.count += 1;
    }

    /// The first frame of each lane that waits; a goodbye only when nothing is before it (GA-1).
    fn fronts(self: *Gate) [2]?*Entry {
        var found = [2]?*Entry{ null, null };
        for (0..self.count) |i| {
            const one = self.entry(@intCast(i));
            if (one.is_done) continue;
            if (one.is_last and (found[0] != null or found[1] != null)) break;
            const lane = @intFromEnum(one.lane);
            if (found[lane] == null) found[lane] = one else assert(found[lane].?.at < one.at); // GA-1
            if (one.is_last or (found[0] != null and found[1] != null)) break;
        }
        return found;
    }

    fn front(self: *Gate, now: u64) ?*Entry {
        var best: ?*Entry = null;
        for (self.fronts()) |place| {
            const one = place orelse continue;
            if (one.due > now) continue;
            if (best == null or one.due < best.?.due or (one.due == best.?.due and one.at < best.?.at)) best = one;
        }
        return best;
    }

    /// When this link is to be looked at again; null: when its bell rings.
    pub fn wakeAt(self: *Gate, link: anytype, now: u64) ?u64 {
        const soon = now + limits.FAULT_POLL_MS * std.time.ns_per_ms;
        if (isHeld(link)) return soon;
        var at: ?u64 = null;
        for (self.fronts()) |place| {
            const one = place orelse continue;
            at = @min(at orelse std.math.maxInt(u64), one.due);
        }
        return at;
    }
};

/// Bytes of a message that do not come in frames.
fn carried(header: frame.Header, at: [*]const u8) u64 {
    if (header.kind != .message) return 0;
    assert(header.sizesOffset() + 8 * @as(u32, header.n_bodies) <= header.length or header.n_bodies == 0);
    var bytes: u64 = 0;
    for (0..header.n_bodies) |i| {
        const word = std.mem.readInt(u64, at[header.sizesOffset() + 8 * i ..][0..8], .little);
        const one = body.Entry.decode(word) orelse continue;
        if (one.segment != null) bytes +|= one.size;
    }
    return bytes;
}

/// Damage a frame where it lies: a bit of its header, which the frame decoder sees, or the first byte of its head,
/// which the one above sees. What users send is not damaged: nothing on one host would notice.
fn damage(link: anytype, one: *const Entry) void {
    assert(one.fate == .damaged);
    assert(link.rx.cursor == one.at);
    const bytes = link.rx.map.at(one.at);
    if (one.head_size > 0 and one.random & 1 == 0) {
        bytes[frame.BYTES] = 0xC1; // the byte that no head of the runtime begins with
    } else {
        const bit = (one.random >> 8) % (8 * frame.BYTES);
        assert(bit / 8 < frame.BYTES); // what follows is the user's
        bytes[@intCast(bit / 8)] ^= @as(u8, 1) << @intCast(bit % 8);
    }
}
