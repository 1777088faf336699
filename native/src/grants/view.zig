//! Views: parts of blocks, of other processes or of this one, mapped for a while where they lie. Each is a mapping of
//! its own, so that it can be read-only, and holds a claim on its grant as long as it is open. One that is *shared* is
//! by the mapping that transfers have, which stays: what was touched once does not fault again in the next view. One
//! that is *kept* is by that mapping, too, and has no claim: its owner may change or reuse the memory, and when the
//! owner has ended it stays as it was.

const std = @import("std");
const assert = std.debug.assert;
const block = @import("block.zig");
const limits = @import("../limits.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const attachment = @import("attachment.zig");
const Access = @import("access.zig").Access;

const View = struct {
    generation: u32,
    is_open: bool,
    pages: [*]align(4096) u8,
    /// 0: they are not its own.
    bytes: u64,
    access: Access,
};

/// As in trimesh.h.
pub const Mode = enum(u32) { read = 0, write = 1, shared = 2, kept = 3 };

/// As in trimesh.h.
pub const Opened = extern struct { bytes: ?[*]u8, handle: u64 };

/// All views of a process. All zero is none.
pub const Views = struct {
    rows: [limits.VIEWS_MAX]View,
    /// Places from here on were never used.
    used: u32,

    /// Open a view of the range of an access, which is the view's from then on. Returns a status.
    pub fn open(
        self: *Views,
        access: *Access,
        size: u64,
        mode: Mode,
        blocks: *block.Blocks,
        out: *Opened,
    ) i32 {
        assert(access.own != null or access.table != null);
        const terms = &access.terms;
        const own = if (access.own == null) null else blocks.find(terms.block);
        if (size > limits.BLOCK_BYTES_MAX or terms.block_offset > limits.BLOCK_BYTES_MAX) return status.ERR_DENIED;
        if (terms.block == 0 or (access.own != null and own == null)) return status.ERR_UNREACHABLE;
        const place = self.freePlace() orelse return status.ERR_LIMIT;
        if ((mode == .shared or mode == .kept) and access.hold()) return self.openShared(place, access, mode, out);
        const writable = mode == .write;
        const at = terms.block_offset + access.offset; // judged: no overflow
        const first = std.mem.alignBackward(u64, at, 4096);
        const bytes = std.mem.alignForward(u64, @max(1, size) + (at - first), 4096);
        assert(at - first < 4096);
        assert(bytes - (at - first) >= size);
        assert(bytes % 4096 == 0);
        const mapped = if (own) |one|
            sys.mapLazily(one.fd, @intCast(bytes), @intCast(first), writable)
        else
            access.attachment.mapPart(terms.block, first, bytes, writable);
        const pages = mapped orelse {
            const now = access.look();
            return if (now != status.OK) now else status.ERR_UNREACHABLE;
        };
        const now = access.look(); // a process that has ended meanwhile may have left its pid and numbers to another
        if (now != status.OK) {
            sys.unmap(pages, @intCast(bytes));
            return now;
        }
        out.bytes = pages + @as(usize, @intCast(at - first));
        if (mode == .kept) access.leaveGrant();
        out.handle = self.fill(place, pages, bytes, access);
        return status.OK;
    }

    fn openShared(self: *Views, place: u32, access: *Access, mode: Mode, out: *Opened) i32 {
        assert(mode == .shared or mode == .kept);
        assert(access.here != null);
        const now = access.look();
        if (now != status.OK) return now; // who closes the access lets go of the mapping
        if (mode == .kept) access.leaveGrant();
        out.* = .{ .bytes = access.here, .handle = self.fill(place, access.mapped.?.pages.?, 0, access) };
        return status.OK;
    }

    /// Have a place hold an open view. Its handle.
    fn fill(self: *Views, place: u32, pages: [*]align(4096) u8, bytes: u64, access: *const Access) u64 {
        const row = &self.rows[place];
        assert(!row.is_open);
        assert(bytes > 0 or access.mapped != null); // something keeps the pages
        row.* = .{
            .generation = row.generation + 1,
            .is_open = true,
            .pages = pages,
            .bytes = bytes,
            .access = access.*,
        };
        return @as(u64, row.generation) << 32 | place;
    }

    fn freePlace(self: *Views) ?u32 {
        assert(self.used <= limits.VIEWS_MAX);
        for (self.rows[0..self.used], 0..) |*row, place| {
            if (!row.is_open and row.generation < std.math.maxInt(u32)) return @intCast(place);
        }
        if (self.used == limits.VIEWS_MAX) return null;
        self.used += 1;
        return self.used - 1;
    }

    /// Close a view. Null: there is no such view; else whose it was.
    pub fn close(self: *Views, handle: u64) ?*attachment.Attachment {
        const place = handle & 0xFFFF_FFFF;
        if (place >= self.used) return null;
        const row = &self.rows[@intCast(place)];
        if (!row.is_open or row.generation != handle >> 32) return null;
        return closeRow(row);
    }

    fn closeRow(row: *View) *attachment.Attachment {
        assert(row.is_open);
        const of = row.access.attachment;
        if (row.bytes > 0) sys.unmap(row.pages, @intCast(row.bytes));
        row.access.close();
        row.is_open = false;
        return of;
    }
};
