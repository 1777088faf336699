//! What a grant is to readers that come through an RDMA adapter: the words that travel in its handle, and a row that
//! they read themselves, before and after they move anything. PURE.
//!
//! XP-1 The row says what may be done, not the handle: who forges a handle gains nothing. XP-2 The fields of a row are
//! complete before its word says `granted`, and change only under another word: who finds the same word after the bytes
//! as before them has got what was granted. XP-3 Secrets do not stand in rows: all readers of a process can read all of
//! them. A tag does that only who has the secret can compute. XP-4 So is an export marked as a whole: UCX trusts what
//! it unpacks, so bytes that were not made with the secret never get there.

const std = @import("std");
const limits = @import("../limits.zig");
const status = @import("../status.zig");

const SipHash = std.crypto.auth.siphash.SipHash64(2, 4);
const Mark = std.crypto.auth.siphash.SipHash128(2, 4);

pub const RIGHT_READ: u32 = 1;
pub const RIGHT_WRITE: u32 = 2;

/// What a grant is known by.
pub const Name = struct { place: u32, generation: u32, secret: [16]u8 };

/// Shared: fixed layout. One for each place of the ledger, zero when nothing was exported.
pub const Row = extern struct {
    /// Generation and `granted`.
    word: u64 align(64) = 0,
    tag: u64 = 0,
    address: u64 = 0,
    size: u64 = 0,
    rights: u64 = 0,
    reserved: [3]u64 = @splat(0),

    /// Fill it. The name is not known elsewhere yet.
    pub fn grant(self: *Row, name: Name, bytes: []const u8, rights: u32) void {
        self.tag = tagOf(name);
        self.address = @intFromPtr(bytes.ptr);
        self.size = bytes.len;
        self.rights = rights;
        @atomicStore(u64, &self.word, wordOf(name.generation), .release); // XP-2
    }

    /// Let nothing begin.
    pub fn revoke(self: *Row) void {
        @atomicStore(u64, &self.word, 0, .seq_cst);
    }

    /// Whether a copy of a row allows something: a status.
    pub fn judge(self: *const Row, name: Name, rights: u32, offset: u64, size: u64) i32 {
        if (self.word != wordOf(name.generation)) return status.ERR_REVOKED;
        if (self.tag != tagOf(name)) return status.ERR_DENIED;
        if (self.rights & rights != rights) return status.ERR_DENIED;
        if (offset > self.size or size > self.size - offset) return status.ERR_DENIED;
        return status.OK;
    }
};

fn wordOf(generation: u32) u64 {
    return @as(u64, generation) << 32 | 1;
}

fn tagOf(name: Name) u64 {
    var hash = SipHash.init(&name.secret);
    hash.update(std.mem.asBytes(&name.place));
    hash.update(std.mem.asBytes(&name.generation));
    return hash.finalInt();
}

/// What travels in a handle: sizes, then as many bytes.
pub const Export = struct {
    /// Where the row is.
    row: u64,
    /// How the owner's worker is reached.
    worker: []const u8,
    /// What opens the rows, and the range.
    row_key: []const u8,
    key: []const u8,

    const VERSION: u16 = 1;
    const HEAD_BYTES = 16;
    const MARK_BYTES = 16;

    /// Write it; the bytes that it takes, a part of `into`. Null: there is no room.
    pub fn encode(self: Export, secret: *const [16]u8, into: []u8) ?[]u8 {
        const parts = [_][]const u8{ self.worker, self.row_key, self.key };
        var size: usize = HEAD_BYTES + MARK_BYTES;
        for (parts) |part| size += part.len;
        if (size > into.len or size > limits.EXPORT_BYTES_MAX) return null;
        std.mem.writeInt(u16, into[0..2], VERSION, .little);
        std.mem.writeInt(u64, into[8..16], self.row, .little);
        var at: usize = HEAD_BYTES;
        for (parts, 1..) |part, n| {
            std.mem.writeInt(u16, into[2 * n ..][0..2], @intCast(part.len), .little);
            @memcpy(into[at..][0..part.len], part);
            at += part.len;
        }
        Mark.create(into[at..][0..MARK_BYTES], into[0..at], secret);
        return into[0..size];
    }

    /// Read what was sent; it refers to `sent`. Null: it is none, or was not made for who has this secret: XP-4.
    pub fn decode(secret: *const [16]u8, sent: []const u8) ?Export {
        if (sent.len < HEAD_BYTES + MARK_BYTES or sent.len > limits.EXPORT_BYTES_MAX) return null;
        const bytes = sent[0 .. sent.len - MARK_BYTES];
        var mark: [MARK_BYTES]u8 = undefined;
        Mark.create(&mark, bytes, secret);
        if (!std.crypto.timing_safe.eql([MARK_BYTES]u8, mark, sent[bytes.len..][0..MARK_BYTES].*)) return null;
        if (std.mem.readInt(u16, bytes[0..2], .little) != VERSION) return null;
        var parts: [3][]const u8 = undefined;
        var at: usize = HEAD_BYTES;
        for (&parts, 1..) |*part, n| {
            const size = std.mem.readInt(u16, bytes[2 * n ..][0..2], .little);
            if (size == 0 or size > bytes.len - at) return null;
            part.* = bytes[at..][0..size];
            at += size;
        }
        if (at != bytes.len) return null;
        const row = std.mem.readInt(u64, bytes[8..16], .little);
        return .{ .row = row, .worker = parts[0], .row_key = parts[1], .key = parts[2] };
    }
};

const testing = std.testing;
const NAME = Name{ .place = 3, .generation = 7, .secret = @splat(9) };

test "an export comes back" {
    const one = Export{ .row = 0x7f00_1234_5678_9abc, .worker = "worker", .row_key = "rows", .key = "k" };
    var into: [limits.EXPORT_BYTES_MAX]u8 = undefined;
    const bytes = one.encode(&NAME.secret, &into).?;

    const back = Export.decode(&NAME.secret, bytes).?;
    try testing.expectEqual(one.row, back.row);
    try testing.expectEqualStrings("worker", back.worker);
    try testing.expectEqualStrings("rows", back.row_key);
    try testing.expectEqualStrings("k", back.key);

    try testing.expectEqual(null, one.encode(&NAME.secret, into[0 .. bytes.len - 1]));
    const long: [limits.EXPORT_BYTES_MAX]u8 = @splat(1);
    var larger: [2 * limits.EXPORT_BYTES_MAX]u8 = undefined;
    const too_long = Export{ .row = 0, .worker = &long, .row_key = "r", .key = "k" };
    try testing.expectEqual(null, too_long.encode(&NAME.secret, &larger));
}

test "an export that was changed is none" {
    const one = Export{ .row = 1, .worker = "worker", .row_key = "rows", .key = "k" };
    var into: [limits.EXPORT_BYTES_MAX]u8 = @splat(0);
    const bytes = one.encode(&NAME.secret, &into).?;

    for (0..bytes.len) |size| try testing.expectEqual(null, Export.decode(&NAME.secret, bytes[0..size]));
    try testing.expectEqual(null, Export.decode(&NAME.secret, into[0 .. bytes.len + 1]));
    try testing.expectEqual(null, Export.decode(&@splat(8), bytes));
    for (bytes) |*byte| {
        byte.* ^= 1;
        try testing.expectEqual(null, Export.decode(&NAME.secret, bytes));
        byte.* ^= 1;
    }
}

test "sizes of an export are looked at, whoever made it" {
    const one = Export{ .row = 1, .worker = "worker", .row_key = "rows", .key = "k" };
    var into: [limits.EXPORT_BYTES_MAX]u8 = undefined;
    const bytes = one.encode(&NAME.secret, &into).?;
    for ([_]u16{ 0, 1, 5, 7, 12, 255, 65535 }) |size| {
        for (1..4) |n| {
            const kept = std.mem.readInt(u16, bytes[2 * n ..][0..2], .little);
            if (kept == size) continue;
            std.mem.writeInt(u16, bytes[2 * n ..][0..2], size, .little);
            const head = bytes[0 .. bytes.len - Export.MARK_BYTES];
            Mark.create(bytes[head.len..][0..Export.MARK_BYTES], head, &NAME.secret);
            try testing.expectEqual(null, Export.decode(&NAME.secret, bytes));
            std.mem.writeInt(u16, bytes[2 * n ..][0..2], kept, .little);
        }
    }
}

test "a row allows what was granted, to whom it was granted" {
    var bytes: [100]u8 = undefined;
    var row: Row = .{};
    try testing.expectEqual(status.ERR_REVOKED, row.judge(NAME, RIGHT_READ, 0, 1));

    row.grant(NAME, &bytes, RIGHT_READ);

    try testing.expectEqual(status.OK, row.judge(NAME, RIGHT_READ, 0, 100));
    try testing.expectEqual(status.OK, row.judge(NAME, RIGHT_READ, 100, 0));
    try testing.expectEqual(status.ERR_DENIED, row.judge(NAME, RIGHT_READ, 1, 100));
    try testing.expectEqual(status.ERR_DENIED, row.judge(NAME, RIGHT_READ, std.math.maxInt(u64), 2));
    try testing.expectEqual(status.ERR_DENIED, row.judge(NAME, RIGHT_WRITE, 0, 1));
    var other = NAME;
    other.secret[15] ^= 1;
    try testing.expectEqual(status.ERR_DENIED, row.judge(other, RIGHT_READ, 0, 1));
    other = NAME;
    other.generation += 1;
    try testing.expectEqual(status.ERR_REVOKED, row.judge(other, RIGHT_READ, 0, 1));
    row.revoke();
    try testing.expectEqual(status.ERR_REVOKED, row.judge(NAME, RIGHT_READ, 0, 1));
}
