//! The open way of one transfer, or one view, into one granted range: from the claim, taken before the grant is looked
//! at, until it is given back (docs/design/memory.md). T0 opens it; T0 or T2 closes it.
//!
//! AC-1 An access is open only while it has a claim; what is kept without one is not looked at by it any more.
//! AC-2 The grant's word, and whether the owner lives and has its ledger, are looked at after every piece: bytes that
//! were moved before a change or an end are never called right.

const std = @import("std");
const assert = std.debug.assert;
const grants = @import("grants.zig");
const ledger = @import("ledger.zig");
const limits = @import("../limits.zig");
const process = @import("../system/process.zig");
const status = @import("../status.zig");
const sys = @import("../system/sys.zig");
const attachment_file = @import("attachment.zig");

const Attachment = attachment_file.Attachment;

/// This process, as claims name it.
pub const Self = struct { pid: u32, started: u64 };

pub const Access = struct {
    attachment: *Attachment,
    /// Null: this very process, where `own` is what counts.
    table: ?*ledger.Table,
    own: ?*grants.Grant,
    claim: ledger.Claim,
    claim_index: u32,
    /// The word while the grant is in force.
    word: u64,
    row: *ledger.Row,
    terms: ledger.Terms,
    offset: u64,
    /// Caches do not hold the whole of what is asked for.
    is_huge: bool,
    /// The first byte of the range, if it is mapped here. Set by a carrier.
    here: ?[*]u8,
    mapped: ?*attachment_file.Mapped,

    /// Take a claim and look. Null: `why` is the status.
    pub fn open(one: *Attachment, self: Self, own: *grants.Grants, wanted: *const ledger.Wanted, why: *i32) ?Access {
        why.* = status.ERR_DENIED;
        if (wanted.place >= limits.GRANTS_MAX) return null;
        var access = Access{
            .attachment = one,
            .table = null,
            .own = null,
            .claim = .{ .pid = self.pid, .started = self.started, .place = wanted.place },
            .claim_index = 0,
            .word = ledger.wordOf(wanted.generation, .granted),
            .row = &one.table.?.rows[wanted.place],
            .terms = undefined,
            .offset = wanted.offset,
            .is_huge = wanted.size >= limits.HUGE_BYTES_MIN,
            .here = null,
            .mapped = null,
        };
        if (one.table == own.table) {
            access.own = own.enter(wanted, why) orelse return null;
            access.terms = access.own.?.terms;
            access.check();
            return access;
        }
        why.* = status.ERR_GONE;
        if (one.hasEnded()) return null;
        why.* = status.ERR_LIMIT;
        access.table = one.table;
        access.claim_index = one.table.?.claim(access.claim) orelse return null;
        const word = access.row.now();
        access.terms = access.row.read();
        why.* = ledger.judge(word, &access.terms, wanted);
        if (why.* == status.OK) {
            access.check();
            return access;
        }
        access.close();
        return null;
    }

    /// What is so while it is open, of terms that were judged.
    fn check(self: *const Access) void {
        assert((self.own == null) != (self.table == null)); // AC-1
        assert(self.offset <= self.terms.size);
        assert(self.terms.address +% self.terms.size >= self.terms.address);
        assert(self.terms.block_offset +% self.terms.size >= self.terms.block_offset);
    }

    /// Have the range mapped, by the mapping of its block that all accesses share. False: it lies in none, or the block
    /// cannot be mapped.
    pub fn hold(self: *Access) bool {
        self.check();
        assert(self.mapped == null);
        const terms = &self.terms;
        if (self.own != null or terms.block == 0) return false;
        const mapped = self.attachment.hold(terms.block) orelse return false;
        // The size is the mapping's own: what the ledger says of the range is not believed.
        if (terms.block_offset > mapped.bytes or terms.size > mapped.bytes - terms.block_offset) {
            Attachment.letGo(mapped);
            return false;
        }
        assert(terms.block_offset + self.offset <= mapped.bytes);
        self.mapped = mapped;
        self.here = mapped.pages.? + @as(usize, @intCast(terms.block_offset + self.offset));
        return true;
    }

    /// Whether what was moved so far counts: AC-2.
    pub fn look(self: *const Access) i32 {
        assert(self.own != null or self.table != null); // AC-1
        if (self.own) |own| return if (own.now() == self.word) status.OK else status.ERR_REVOKED;
        if (process.hasEnded(self.attachment.pid_fd)) return status.ERR_GONE;
        if (self.mapped != null and !self.attachment.hasLedger()) return status.ERR_GONE;
        return if (self.row.now() == self.word) status.OK else status.ERR_REVOKED;
    }

    /// The address of the range in its owner.
    pub fn address(self: *const Access) u64 {
        assert(self.offset <= self.terms.size);
        return self.terms.address + self.offset;
    }

    /// Take the lock of the grant for one atomic operation. False: another process has it.
    pub fn tryLock(self: *const Access) bool {
        assert(self.own != null or self.table != null); // AC-1
        return self.row.tryLock(self.claim);
    }

    /// Take the lock off a process that has ended.
    pub fn breakLock(self: *const Access) void {
        self.row.breakLock();
    }

    /// Give the lock back.
    pub fn unlock(self: *const Access) void {
        assert(self.own != null or self.table != null); // AC-1
        self.row.unlock(self.claim);
    }

    /// Leave. The owner may then use the memory for something else.
    pub fn close(self: *Access) void {
        if (self.mapped) |mapped| Attachment.letGo(mapped);
        self.leaveGrant(); // last
        self.* = undefined;
    }

    /// Leave the grant and stay with what is mapped. The owner may use the memory for something else.
    pub fn leaveGrant(self: *Access) void {
        assert(self.own == null or self.table == null);
        if (self.own) |own| own.leave();
        if (self.table) |table| table.leave(self.claim_index, self.claim);
        self.own = null;
        self.table = null;
    }
};
