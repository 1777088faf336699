//! The carrier `cma`: any memory of a process of this host, by process_vm_readv and process_vm_writev.
//!
//! CM-1 A pid and an address may have come to name something else: after the process has ended, or called exec. So the
//! head of the ledger is read beside every piece, from where the owner has it; only the right process has that there.

const std = @import("std");
const ledger = @import("../grants/ledger.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const Copier = @import("copier.zig").Copier;
const Access = @import("../grants/access.zig").Access;

const Head = ledger.Table.Head;
const Piece = process.Piece;

fn reach(access: *Access) bool {
    return access.own == null;
}

fn theirsAt(access: *const Access, offset: u64, bytes: usize) Piece {
    return .{ .address = access.address() + offset, .size = bytes };
}

fn get(access: *const Access, offset: u64, ours: []u8) i32 {
    return withHead(access, offset, ours);
}

fn put(access: *const Access, offset: u64, ours: []u8) i32 {
    const checked = withHead(access, 0, null);
    return if (checked == status.OK) rest(access, offset, ours, 0, process.writeMemory) else checked;
}

/// Read the head of the ledger: CM-1. And a piece of the range with it, unless none is wanted.
fn withHead(access: *const Access, offset: u64, wanted: ?[]u8) i32 {
    const said = access.table.?.head();
    var found: Head = undefined;
    const ours = [2]Piece{ .of(std.mem.asBytes(&found)), if (wanted) |bytes| .of(bytes) else undefined };
    const size = if (wanted) |bytes| bytes.len else 0;
    const head_there = Piece{ .address = said.address, .size = @sizeOf(Head) };
    const theirs = [2]Piece{ head_there, theirsAt(access, offset, size) };
    const count: usize = if (wanted == null) 1 else 2; // the kernel looks at addresses of nothing, too
    const n = process.readMemory(access.attachment.home.pid, ours[0..count], theirs[0..count]);
    if (n < @sizeOf(Head)) return if (n < 0 and n != -process.EFAULT) problem(access, n) else status.ERR_GONE;
    if (!std.meta.eql(found, said)) return status.ERR_GONE;
    const moved: usize = @as(usize, @intCast(n)) - @sizeOf(Head);
    return if (moved == size) status.OK else rest(access, offset, wanted.?, moved, process.readMemory);
}

const Move = *const fn (pid: u32, ours: []const Piece, theirs: []const Piece) i64;

/// Move what is left after `done` bytes; the kernel may stop short.
fn rest(access: *const Access, offset: u64, ours: []u8, done: usize, move: Move) i32 {
    var at = done;
    while (at < ours.len) { // bounded: every turn moves a byte at least
        const left = ours[at..];
        const n = move(access.attachment.home.pid, &.{Piece.of(left)}, &.{theirsAt(access, offset + at, left.len)});
        if (n <= 0) return problem(access, n);
        at += @intCast(n);
    }
    return status.OK;
}

fn problem(access: *const Access, rc: i64) i32 {
    if (rc == -process.ESRCH) return status.ERR_GONE;
    // Memory that is not there any more was taken away after a revocation, or with the process; or by a mistake.
    const now = access.look();
    if (now != status.OK) return now;
    return status.ofErrno(if (rc < 0) @intCast(rc) else -process.EFAULT);
}

pub const copier = Copier{ .reach = reach, .get = get, .put = put };
