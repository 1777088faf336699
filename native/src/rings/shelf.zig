//! The segments of one peer in this process: mapped when they are first named, kept, lent to whoever reads a body.
//! Mappings are private and writable: what is written here is seen here alone, and thrown away when the body is given
//! back, before the peer may fill the segment again (V1).
//!
//! SH-1 Nothing that a peer announces is believed: size and seals of the memory are looked at, so that no access to it
//! can fail later. SH-2 A segment is lent once at a time. SH-3 A mapping that is lent outlives the link.

const std = @import("std");
const assert = std.debug.assert;
const body = @import("../protocol/body.zig");
const limits = @import("../limits.zig");
const pagemap = @import("../system/pagemap.zig");
const segment = @import("segment.zig");
const socket = @import("../system/socket.zig");
const sys = @import("../system/sys.zig");

const Ref = body.Ref;
const Pages = [*]align(4096) u8;

const Place = struct {
    /// Null: nothing here.
    pages: ?Pages = null,
    bytes: u64 = 0,
    ref: Ref = .{ .place = 0, .generation = 0 },
    lent: bool = false,
    /// Given back, and the peer not told yet.
    returned: bool = false,
};

/// Memory that is lent.
pub const Lent = struct { pages: Pages, bytes: u64 };

pub const Shelf = struct {
    places: [limits.SEGMENTS_MAX]Place = @splat(.{}),
    returned_count: u32 = 0,
    /// Why `take` said error.Refused; completes "the peer sent".
    problem: []const u8 = "",

    pub const Error = error{Refused};

    fn refuse(self: *Shelf, problem: []const u8) Error {
        assert(problem.len > 0);
        self.problem = problem;
        return error.Refused;
    }

    /// Lend the memory of a body that a table has named. `spare_fd` is a descriptor that makes room for another one.
    pub fn take(self: *Shelf, fd: i32, word: u64, spare_fd: *i32) Error!Lent {
        const entry = body.Entry.decode(word) orelse return self.refuse("a body in a segment that cannot be");
        const ref = entry.segment orelse return self.refuse("a body in a segment that cannot be");
        const place = &self.places[ref.place];
        while (place.pages == null or place.ref.generation != ref.generation) { // bounded by what the socket holds
            if (!try self.adoptNext(fd, spare_fd)) return self.refuse("a body in a segment that it has not passed");
        }
        if (place.lent or place.returned) return self.refuse("a body in a segment that is in use"); // SH-2
        if (entry.size > place.bytes) return self.refuse("a body that is larger than its segment");
        assert(place.ref.place == ref.place);
        assert(place.bytes >= limits.SEGMENT_BYTES_MIN);
        assert(place.bytes <= limits.SEGMENT_BYTES_MAX);
        place.lent = true;
        return .{ .pages = place.pages.?, .bytes = place.bytes };
    }

    /// Map the next segment that the peer has passed. False: there is none.
    fn adoptNext(self: *Shelf, fd: i32, spare_fd: *i32) Error!bool {
        var said: segment.Announcement = undefined;
        sys.closeAt(spare_fd);
        const got = socket.receiveWithRights(fd, std.mem.asBytes(&said));
        defer for (got.fds[0..@min(got.fds_count, got.fds.len)]) |one| sys.close(one);
        if (got.n <= 0) return false;
        const ref = Ref.parse(said.ref) orelse return self.refuse("a segment that cannot be");
        if (got.n != @sizeOf(segment.Announcement) or said.reserved != 0)
            return self.refuse("a segment that cannot be");
        if (got.fds_count == 0 and got.truncated)
            return self.refuse("a segment for which this process has no descriptor");
        if (got.fds_count != 1 or got.truncated) return self.refuse("a segment with the wrong number of descriptors");
        try self.adopt(ref, said.bytes, got.fds[0]);
        return true;
    }

    fn adopt(self: *Shelf, ref: Ref, bytes: u64, fd: i32) Error!void {
        if (bytes < limits.SEGMENT_BYTES_MIN or bytes > limits.SEGMENT_BYTES_MAX or !std.math.isPowerOfTwo(bytes) or
            !sys.memfdIsSound(fd, bytes)) return self.refuse("a segment that is not what it should be"); // SH-1
        const place = &self.places[ref.place];
        if (place.lent or place.returned) return self.refuse("a segment in place of one that is in use");
        drop(place);
        const pages = sys.mapCopy(fd, @intCast(bytes)) orelse
            return self.refuse("a segment for which this process has no memory");
        place.* = .{ .pages = pages, .bytes = bytes, .ref = ref };
    }

    /// Take a body back. False: this one is not lent (any more).
    pub fn giveBack(self: *Shelf, ref: Ref, pages: usize) bool {
        const place = &self.places[ref.place];
        if (!place.lent or @intFromPtr(place.pages.?) != pages) return false;
        assert(!place.returned); // SH-2
        assert(self.returned_count < self.places.len);
        pagemap.dropWritten(place.pages.?, @intCast(place.bytes));
        place.lent = false;
        place.returned = true;
        self.returned_count += 1;
        return true;
    }

    /// Names of segments that were given back since the last time; the caller tells the peer.
    pub fn takeReturned(self: *Shelf, into: *[limits.SEGMENTS_MAX]Ref) []Ref {
        var n: u32 = 0;
        for (&self.places) |*place| {
            if (!place.returned) continue;
            place.returned = false;
            into[n] = place.ref;
            n += 1;
        }
        assert(n == self.returned_count);
        self.returned_count = 0;
        return into[0..n];
    }

    /// The peer has given up a segment. False: it is in use.
    pub fn retire(self: *Shelf, ref: Ref) bool {
        const place = &self.places[ref.place];
        if (place.pages == null or place.ref.generation != ref.generation) return true; // never mapped here
        if (place.lent) return false;
        if (place.returned) assert(self.returned_count > 0);
        if (place.returned) self.returned_count -= 1;
        drop(place);
        return true;
    }

    fn drop(place: *Place) void {
        assert(!place.lent); // SH-3
        if (place.pages) |pages| sys.unmap(pages, @intCast(place.bytes));
        place.* = .{};
    }

    /// Make what is lent this process's own, before it is copied: a forked child goes on looking at it when the peer
    /// has long filled the segment again.
    pub fn detachLent(self: *Shelf) void {
        for (&self.places) |*place| {
            assert(!(place.lent and place.returned));
            if (place.lent) sys.makePrivate(place.pages.?, @intCast(place.bytes));
        }
    }

    /// Unmap all but what is lent: that is unmapped by whoever gives it back (SH-3).
    pub fn deinit(self: *Shelf) void {
        for (&self.places) |*place| {
            if (!place.lent) drop(place);
        }
    }
};

// ---- tests ----

const testing = std.testing;

fn announce(socket_fd: i32, ref: Ref, bytes: u64, fd: i32) void {
    const said = segment.Announcement{ .ref = ref.word(), .bytes = bytes };
    _ = socket.sendDescriptor(socket_fd, std.mem.asBytes(&said), fd);
}

test "what is written into a body is gone when the segment comes again" {
    const pair = socket.socketPair();
    defer for (pair) |fd| sys.close(fd);
    const size = limits.SEGMENT_BYTES_MIN;
    const fd = sys.memfd("test", size);
    defer sys.close(fd);
    const shared = sys.mapShared(fd, size).?;
    defer sys.unmap(shared, size);
    @memset(shared[0..size], 1);
    const ref = Ref{ .place = 5, .generation = 1 };
    const word = (body.Entry{ .size = 100_000, .segment = ref }).encode();
    var spare: i32 = -1;
    var shelf = Shelf{};
    defer shelf.deinit();
    announce(pair[0], ref, size, fd);

    const pages = (try shelf.take(pair[1], word, &spare)).pages;
    @memset(pages[0..size], 2);
    try testing.expectEqual(1, shared[0]);
    try testing.expectError(error.Refused, shelf.take(pair[1], word, &spare));
    try testing.expect(!shelf.retire(ref));
    try testing.expect(shelf.giveBack(ref, @intFromPtr(pages)));
    try testing.expect(!shelf.giveBack(ref, @intFromPtr(pages)));
    var refs: [limits.SEGMENTS_MAX]Ref = undefined;
    try testing.expectEqualSlices(Ref, &.{ref}, shelf.takeReturned(&refs));
    @memset(shared[0..size], 3);

    const again = (try shelf.take(pair[1], word, &spare)).pages;
    for (again[0..size]) |byte| try testing.expectEqual(3, byte);
    shelf.detachLent();
    @memset(shared[0..size], 4);
    try testing.expectEqual(3, again[size - 1]);
    try testing.expect(shelf.giveBack(ref, @intFromPtr(again)));
    try testing.expect(shelf.retire(ref));
}

test "segments that are not what they should be are refused" {
    const size = limits.SEGMENT_BYTES_MIN;
    const good = sys.memfd("test", size);
    defer sys.close(good);
    const ref = Ref{ .place = 5, .generation = 1 };
    const word = (body.Entry{ .size = 100_000, .segment = ref }).encode();
    const small = (body.Entry{ .size = size + 1, .segment = ref }).encode();
    const cases = [_]struct { ref: Ref = ref, bytes: u64 = size, fd: i32 = -1, word: ?u64 = null }{
        .{ .bytes = 2 * size },
        .{ .bytes = size - 4096 },
        .{ .bytes = 0 },
        .{ .bytes = std.math.maxInt(u64) },
        .{ .fd = sys.eventfd() },
        .{ .ref = .{ .place = 5, .generation = 2 } }, // another one than is named
        .{ .ref = .{ .place = limits.SEGMENTS_MAX, .generation = 1 } },
        .{ .word = small },
        .{ .word = 100_000 },
    };
    for (cases) |case| {
        const pair = socket.socketPair();
        defer for (pair) |fd| sys.close(fd);
        var spare: i32 = -1;
        var shelf = Shelf{};
        defer shelf.deinit();
        announce(pair[0], case.ref, case.bytes, if (case.fd < 0) good else case.fd);
        try testing.expectError(error.Refused, shelf.take(pair[1], case.word orelse word, &spare));
        try testing.expect(shelf.problem.len > 0);
        sys.close(case.fd);
    }
}
