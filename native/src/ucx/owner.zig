//! What this process lets others reach through RDMA adapters. Used under the lock of ucx/ucx.zig.
//!
//! OW-1 To revoke is to change the row, then to take the registration back: the adapter refuses who comes later, and
//! breaks off who is at it. So there is nothing to wait for.

const std = @import("std");
const exporting = @import("export.zig");
const grants = @import("../grants/grants.zig");
const limits = @import("../limits.zig");
const sys = @import("../system/sys.zig");
const worker_file = @import("worker.zig");

const Name = exporting.Name;
const Registration = worker_file.Registration;
const Row = exporting.Row;
const Worker = worker_file.Worker;

const ROWS_BYTES = limits.GRANTS_MAX * @sizeOf(Row);

pub const Owner = struct {
    worker: *Worker,
    rows: *[limits.GRANTS_MAX]Row,
    rows_registration: Registration,
    /// Of the grants that were exported.
    registrations: [limits.GRANTS_MAX]?Registration,
    count: u32,

    /// Have the rows read by others.
    pub fn init(self: *Owner, worker: *Worker) error{ Refused, NoMemory }!void {
        const pages = sys.mapPrivate(ROWS_BYTES) orelse return error.NoMemory;
        errdefer sys.unmap(pages, ROWS_BYTES);
        self.worker = worker;
        self.rows = @ptrCast(pages);
        self.rows_registration = try worker.register(pages[0..ROWS_BYTES], false);
        self.registrations = @splat(null);
        self.count = 0;
    }

    /// Take everything back.
    pub fn deinit(self: *Owner) void {
        for (self.registrations, 0..) |_, place| self.revoke(@intCast(place));
        self.rows_registration.end();
        sys.unmap(@ptrCast(@alignCast(self.rows)), ROWS_BYTES);
    }

    /// Register a grant, unless it is, and write what a handle needs; the bytes, a part of `into`.
    pub fn exportGrant(self: *Owner, name: Name, range: grants.Range, into: []u8) error{ Refused, NoRoom }![]u8 {
        const bytes = @as([*]u8, @ptrFromInt(range.address))[0..@intCast(range.size)];
        const place = &self.registrations[name.place];
        const is_new = place.* == null;
        const is_writable = range.rights & exporting.RIGHT_WRITE != 0;
        if (is_new) place.* = switch (range.memory) {
            .host => try self.worker.register(bytes, is_writable),
            .cuda => try self.worker.registerDevice(bytes, is_writable, .cuda),
        };
        errdefer if (is_new) {
            place.*.?.end();
            place.* = null;
        };
        var buffers: [3][limits.EXPORT_BYTES_MAX]u8 = undefined;
        const one = exporting.Export{
            .row = @intFromPtr(&self.rows[name.place]),
            .worker = try self.worker.address(&buffers[0]),
            .row_key = try self.rows_registration.key(&buffers[1]),
            .key = try place.*.?.key(&buffers[2]),
        };
        const written = one.encode(&name.secret, into) orelse return error.NoRoom;
        if (is_new) {
            self.rows[name.place].grant(name, bytes, range.rights);
            self.count += 1;
        }
        return written;
    }

    /// Let no access to a grant stay open, if it was exported: OW-1.
    pub fn revoke(self: *Owner, place: u32) void {
        const registration = self.registrations[place] orelse return;
        self.rows[place].revoke();
        registration.end();
        self.registrations[place] = null;
        self.count -= 1;
    }
};
