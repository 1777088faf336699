//! Bodies that travel in segments, as one local link deals with them: which message takes them, how many may be under
//! way, what is said to the peer about them and by it. `link` is a `*Link`: links/link.zig stands above.

const std = @import("std");
const assert = std.debug.assert;
const body = @import("../protocol/body.zig");
const frame = @import("../protocol/frame.zig");
const limits = @import("../limits.zig");
const ring = @import("ring.zig");
const session = @import("../protocol/session.zig");
const shelf = @import("shelf.zig");

/// Bodies in segments that were named up to `end` of our ring.
const Flight = struct { end: u64, bytes: u64 };

pub const Carriage = struct {
    /// What went in segments and the peer has not looked at, oldest first.
    flights: [limits.FLIGHTS_MAX]Flight = undefined,
    flights_count: u32 = 0,
    /// Bytes of all of them.
    flight_bytes: u64 = 0,
    /// A message waits until there are no more than these.
    wanted: u64 = std.math.maxInt(u64),
    /// Segments of the peer.
    shelf: shelf.Shelf = .{},
};

/// Send the first frame of a message, and its large bodies in segments where there are any. False: no room.
pub fn begin(link: anytype, lane: frame.Lane, message: session.Message, cursor: *session.Cursor) bool {
    assert(cursor.started == session.Cursor.NO);
    var first = message;
    if (link.kind == .local and message.hasLarge()) {
        // Room for any first frame: how long it is turns out when the bodies have been copied.
        if (!mayFly(link, message) or !link.ensureRoom(limits.FRAME_BYTES_MAX, lane)) return false;
        first.carrying = link.common.pool.load(first.bodies, link.slot, link.fd);
    }
    const span = ring.alignFrame(first.firstLength());
    assert(span <= limits.FRAME_BYTES_MAX); // for which there is room when bodies were loaded
    if (!first.carrying and !link.ensureRoom(span, lane)) return false;
    cursor.body_bytes = link.outbound.writeMessage(link.tx.place(), lane, first);
    assert(cursor.body_bytes <= message.total);
    cursor.started = if (first.carrying) session.Cursor.YES else session.Cursor.FRAMES_ONLY;
    link.tx.commit(span);
    if (first.carrying) {
        note(&link.carriage, .{ .end = link.tx.head, .bytes = first.carried() });
    }
    return true;
}

fn note(self: *Carriage, flight: Flight) void {
    assert(flight.bytes > 0);
    assert(self.flights_count <= self.flights.len);
    if (self.flights_count > 0) assert(self.flights[self.flights_count - 1].end < flight.end); // oldest first
    self.flight_bytes += flight.bytes;
    if (self.flights_count == self.flights.len) {
        const last = &self.flights[self.flights.len - 1];
        last.* = .{ .end = flight.end, .bytes = last.bytes + flight.bytes };
        return;
    }
    self.flights[self.flights_count] = flight;
    self.flights_count += 1;
}

/// Whether a message with bodies in segments may go to the peer now; a peer that does not read is not to take the whole
/// pool. If not, a space record will follow.
fn mayFly(link: anytype, message: session.Message) bool {
    assert(message.hasLarge());
    const self = &link.carriage;
    const max: u64 = if (message.chunk) limits.CHUNK_FLIGHT_BYTES_MAX else limits.SEGMENT_FLIGHT_BYTES_MAX;
    // Not before half of them have landed: one wake for several messages, and the peer is never out of work.
    const wanted = @min(max / 2, max -| message.total);
    assert(wanted < max);
    if (self.flight_bytes + message.total <= max or land(link) <= wanted) return true;
    if (link.down != .none) return false;
    link.blocked = true;
    self.wanted = wanted;
    link.tx.askForRoom();
    return land(link) <= wanted;
}

/// Whether so much has landed that what waits may fly; if not, the peer is asked to say when.
pub fn hasLanded(link: anytype) bool {
    const self = &link.carriage;
    if (self.flight_bytes != 0 and land(link) > self.wanted) {
        link.tx.askForRoom();
        if (land(link) > self.wanted) return false;
    }
    self.wanted = std.math.maxInt(u64);
    return true;
}

/// Forget what the peer has looked at; return the bytes that it has not.
fn land(link: anytype) u64 {
    const self = &link.carriage;
    _ = link.tx.outstanding() catch {
        _ = link.brokenRing();
        return std.math.maxInt(u64);
    };
    var landed: u32 = 0;
    while (landed < self.flights_count and self.flights[landed].end <= link.tx.tail) : (landed += 1) {
        self.flight_bytes -= self.flights[landed].bytes;
    }
    self.flights_count -= landed;
    std.mem.copyForwards(Flight, self.flights[0..self.flights_count], self.flights[landed..][0..self.flights_count]);
    if (self.flights_count == 0) assert(self.flight_bytes == 0) else assert(self.flights[0].end > link.tx.tail);
    return self.flight_bytes;
}

/// Tell the peer which bodies were given back. False: there is no room now.
pub fn sendReturned(link: anytype) bool {
    if (link.carriage.shelf.returned_count == 0 or link.state != .up) return true;
    const span = ring.alignFrame(session.Outbound.segmentsLength(link.carriage.shelf.returned_count));
    if (!link.ensureRoom(span, .control)) return false;
    var refs: [limits.SEGMENTS_MAX]body.Ref = undefined;
    link.outbound.writeSegments(link.tx.place(), .release, link.carriage.shelf.takeReturned(&refs));
    link.tx.commit(span);
    assert(link.carriage.shelf.returned_count == 0);
    return true;
}

/// Tell the peer that a segment is gone, if there is room: else it keeps a mapping that it does not need, until the
/// place is used again. True: it was told.
pub fn sendRetired(link: anytype, ref: body.Ref) bool {
    if (link.kind != .local or link.state != .up) return false;
    const span = ring.alignFrame(session.Outbound.segmentsLength(1));
    if ((link.tx.room(span, 0) catch return link.brokenRing()) < span) return false;
    link.outbound.writeSegments(link.tx.place(), .retire, &.{ref});
    link.tx.commit(span);
    return true;
}

/// The peer is done with segments of ours, or has given up some of its own.
pub fn receive(link: anytype, header: frame.Header, bytes: [*]const u8) bool {
    assert(header.kind == .release or header.kind == .retire);
    assert((header.length - frame.BYTES) % 4 == 0); // `decode` has looked
    assert(link.kind == .local); // SN-7
    for (0..(header.length - frame.BYTES) / 4) |i| {
        const ref = body.Ref.parse(std.mem.readInt(u32, bytes[frame.BYTES + 4 * i ..][0..4], .little)) orelse {
            link.fail("a segment that cannot be");
            return false;
        };
        if (header.kind == .release) {
            if (link.common.pool.release(ref, link.slot)) continue;
            link.fail("a segment back that it does not hold");
        } else {
            if (link.carriage.shelf.retire(ref)) continue;
            link.fail("the end of a segment in use");
        }
        return false;
    }
    return true;
}

/// Lend the memory of a body whose place a table has told. Null: the link has ended on it.
pub fn takeBody(link: anytype, word: u64, spare_fd: *i32) ?shelf.Lent {
    return link.carriage.shelf.take(link.fd, word, spare_fd) catch {
        link.fail(link.carriage.shelf.problem);
        return null;
    };
}
