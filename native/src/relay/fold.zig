//! One frame made of small pieces of several channels, in the memory from which it leaves. PURE.

const std = @import("std");
const assert = std.debug.assert;
const frames = @import("frame.zig");
const limits = @import("../limits.zig");

pub const Fold = struct {
    /// Memory of the frame, header first.
    whole: []u8 = &.{},
    /// Of the payload.
    bytes: usize = 0,
    count: usize = 0,

    /// Where to read the next piece, of up to `most` bytes. Null: there is no fold, or no room in it.
    pub fn place(self: *const Fold, most: usize) ?[]u8 {
        assert(most > 0);
        if (self.count == 0) return null;
        const left = self.whole.len -| (frames.BYTES + self.bytes + frames.PIECE_BYTES);
        if (left < limits.HOST_FOLD_BYTES) return null;
        return self.whole[self.whole.len - left ..][0..@min(most, left)];
    }

    /// Begin with bytes that lie behind the header of a frame in `whole`. False: too many, or there is no room.
    pub fn begin(self: *Fold, whole: []u8, channel: u32, bytes: usize) bool {
        assert(self.count == 0);
        assert(bytes > 0);
        assert(whole.len <= frames.BYTES_MAX);
        if (bytes > limits.HOST_FOLD_BYTES or whole.len < 2 * limits.HOST_FOLD_BYTES) return false;
        const payload = whole[frames.BYTES..];
        std.mem.copyBackwards(u8, payload[frames.PIECE_BYTES..][0..bytes], payload[0..bytes]);
        self.* = .{ .whole = whole };
        self.add(channel, bytes);
        return true;
    }

    /// So many bytes were read at the place.
    pub fn add(self: *Fold, channel: u32, bytes: usize) void {
        assert(bytes > 0);
        assert(frames.BYTES + self.bytes + frames.PIECE_BYTES + bytes <= self.whole.len);
        const there = self.whole[frames.BYTES + self.bytes ..];
        frames.encodePiece(channel, bytes, there[0..frames.PIECE_BYTES]);
        self.bytes += frames.PIECE_BYTES + bytes;
        self.count += 1;
    }

    /// The header of the frame, which is that of `data` if there is but one piece. Null: there is none.
    pub fn end(self: *Fold) ?frames.Header {
        defer self.count = 0;
        if (self.count == 0) return null;
        assert(self.bytes > self.count * frames.PIECE_BYTES); // no piece is empty
        const payload = self.whole[frames.BYTES..][0..self.bytes];
        if (self.count > 1) return .{ .kind = .many, .size = @intCast(payload.len) };
        var rest: []const u8 = payload;
        const piece = frames.nextPiece(&rest).?; // made here
        std.mem.copyForwards(u8, payload[0..piece.bytes.len], piece.bytes);
        return .{ .kind = .data, .size = @intCast(piece.bytes.len), .channel = piece.channel };
    }
};
