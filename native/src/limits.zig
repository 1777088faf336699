//! Every bound of the native library: name, value, unit (last word), reason.

const std = @import("std");

/// The contract of `trimesh.h`; one more at every change of it.
pub const ABI_VERSION: u32 = 16;

/// The bytes on the wire; one more at every change of them.
pub const PROTOCOL_VERSION: u8 = 8;

// ---- Shared: reasons are in src/trimesh/limits.py, from which `python -m native.shared_limits` writes the values ----

pub const FRAME_HEADER_BYTES = 32;
pub const FRAME_PAYLOAD_BYTES_MAX = 69_632;
pub const HEAD_BYTES_MAX = 49_152;
pub const BODIES_MAX = 4_096;
pub const MESSAGE_BYTES_MAX = 1 << 36;
pub const LINKS_MAX = 1_024;
pub const RING_BYTES = 1 << 18;
pub const RING_CONTROL_RESERVE_BYTES = 1 << 14;
pub const SPIN_US_MAX = 10_000;
pub const SEGMENT_BYTES_MIN = 1 << 17;
pub const SEGMENT_BYTES_MAX = 1 << 27;
pub const SEGMENT_POOL_BYTES_MAX = 1 << 31;
pub const SEGMENT_IDLE_BYTES_MAX = 1 << 28;
pub const SEGMENTS_MAX = 128;
pub const SEGMENT_FLIGHT_BYTES_MAX = 1 << 24;
pub const CHUNK_FLIGHT_BYTES_MAX = 1 << 22;
pub const TLS_HALF_OPEN_BYTES = 1 << 16;
pub const TLS_HALF_OPEN_MS = 5_000;
pub const TLS_HALF_OPEN_MAX = 64;
pub const TLS_HELLO_BYTES = 256;
pub const GRANTS_MAX = 8_192;
pub const BLOCKS_MAX = 256;
pub const BLOCK_BYTES_MAX = 1 << 40;
pub const BLOCK_IDLE_BYTES_MAX = 1 << 29;
pub const ATTACHMENTS_MAX = 1_024;
pub const TRANSFERS_MAX = 1_024;
pub const VIEWS_MAX = 4_096;
pub const INLINE_BYTES_MAX = 1 << 17;
pub const EXPORT_BYTES_MAX = 4_096;
pub const MOVER_SILENCE_MS = 5_000;
pub const TCP_STRANGERS_SHARE = 8;
pub const FAULT_RULES_MAX = 1_024;
pub const HOST_FRAME_HEADER_BYTES = 32;
pub const HOST_FRAME_PAYLOAD_BYTES_MAX = 65_536;
pub const HOST_PURPOSE_BYTES_MAX = 4_096;
pub const HOST_WINDOW_BYTES = 262_144;
pub const HOST_RESEND_BYTES = 8 << 20;
pub const HOST_RESEND_RESERVE_BYTES = 1 << 20;
pub const HOST_QUANTUM_BYTES = 16_384;
pub const HOST_FOLD_BYTES = 2_048;
pub const HOST_ACK_BYTES = 1 << 20;
pub const HOST_ACK_FRAMES = 64;
pub const HOST_CHANNELS_MAX = 16_384;

// ---- Frames, rings and streams ----

/// Largest frame: a first frame with the largest head and the largest table of body sizes holds no body bytes, any
/// other payload is at most one fragment.
pub const FRAME_BYTES_MAX = FRAME_HEADER_BYTES + @max(FRAME_PAYLOAD_BYTES_MAX, HEAD_BYTES_MAX + 8 * BODIES_MAX);
/// Frames start at multiples of this, so that headers and size tables are read as whole words.
pub const FRAME_ALIGN_BYTES = 8;
/// Largest ring that options may request: offsets into a view (two copies and a page) stay within 32 bits.
pub const RING_BYTES_MAX = 1 << 26;
/// Page in front of the data of a ring, for its counters. Both supported machines can map at this grain.
pub const RING_HEADER_BYTES = 4_096;
/// Bytes of a stream link under way without credit: beats and credits, which are taken out of the stream as they come,
/// and one hello. A multiple of the bytes that one read may find between two frames.
pub const STREAM_SLACK_BYTES = RING_CONTROL_RESERVE_BYTES;
/// Whole frames that T1 sends in one system call: two fragments, so that a credit or a beat waits for no more.
pub const STREAM_BATCH_BYTES = 2 * (FRAME_PAYLOAD_BYTES_MAX + FRAME_HEADER_BYTES);
/// Reads and writes of one link before T1 serves the others.
pub const STREAM_ROUNDS = 8;
/// Records that `tm_poll` takes from one link before the others.
pub const POLL_LINK_RECORDS = 128;
/// Events that one wait of T1 takes.
pub const EVENTS_MAX = 64;
/// Messages of one link with bodies in segments, under way, that are told apart; further ones count as one.
pub const FLIGHTS_MAX = 16;
/// Messages that do without a new segment after the system has refused one: refusing can be as slow as making.
pub const SEGMENT_REFUSAL_MESSAGES = 64;
/// Lifelines of one process: controller, spawner, host agent, and the same again for a nested mesh.
pub const LIFELINES_MAX = 16;
/// Buses of one process. One in use; tests and simulations make more.
pub const BUSES_MAX = 64;
/// Text of the reason why a link went down.
pub const DETAIL_BYTES = 192;
/// Beats and leases that options may request: ticks are counted in 32 bits.
pub const BEAT_MS_MAX = 3_600_000;
/// Path of a library that a variable of the environment names: PATH_MAX of Linux.
pub const PATH_BYTES = 4_096;

// ---- Planned faults ----

/// Frames that the gate of an armed link looks ahead: further ones wait in the ring, and are late for that.
pub const FAULT_FRAMES_MAX = 1_024;
/// A planned delay is cut to this: sums of a few stay within 64 bits of nanoseconds.
pub const FAULT_SECONDS_MAX = 1e9;
/// Interval at which a process polls whether an armed link is still held: healing rings no bell.
pub const FAULT_POLL_MS = 5;

// ---- Spinning ----

/// A wait of as many wakes is worth spinning through: where both sides spin, an answer takes one to two; where the
/// other side sleeps, or is slow, three to four.
pub const SPIN_WAKES = 4;
/// Assumed cost of a wake before one was measured: 12 to 30 us between two cores of most machines.
pub const SPIN_WAKE_NS = 25_000;
/// So short a wait is worth spinning through even where wakes are cheap: an answer takes 50 to 80 us while the other
/// side sleeps, and 30 as soon as both spin, which neither does before the other.
pub const SPIN_SHORT_NS = 100_000;
/// One part in as many of a process's time may go into spins in vain.
pub const SPIN_VAIN_SHARE = 8;
/// Time in vain that may be spun in a row, after a time without: forty ends of conversations.
pub const SPIN_VAIN_NS_MAX = 4_000_000;
/// Reads of the bell between two polls of the clock and of the other descriptors: 1 to 4 us, a system call each.
pub const SPINS = 32;
/// After so long a pause between two polls, or one as long as a wake, cores are counted at once: another thread may
/// have had this one, or a hypervisor, which is no reason to sleep. Ten times a system call.
pub const SPIN_PAUSE_NS = 20_000;
/// Cores are counted again after this: 6 us each time.
pub const CORES_AGAIN_MS = 10;
/// Cores of a machine, as the kernel may be built for.
pub const CORES_MAX = 8_192;

// ---- Sessions of hosts and TLS ----

/// Sessions of hosts of one relay: as many as a mesh may have hosts, at most 9 MiB each.
pub const HOST_SESSIONS_MAX = 1_024;
/// Interval at which silence between hosts is counted.
pub const HOST_TICK_MS = 100;
/// Ticks after which a side that has sent nothing sends a beat.
pub const HOST_BEAT_TICKS = 5;
/// Encrypted bytes on their way in, and out: eight records.
pub const HOST_WIRE_BYTES = 1 << 17;
/// Frames made before TLS takes them; with the queues of `HOST_WIRE_BYTES` and `HOST_UNSENT_BYTES` they are before a
/// small message.
pub const HOST_FILL_BYTES = 1 << 16;
/// Bytes that the kernel takes for a connection before any of them has left, however fast we are.
pub const HOST_UNSENT_BYTES = 1 << 17;
/// Rounds of reading, encrypting and writing of one session before the others: about 1 MiB each way, 1 ms.
pub const HOST_ROUNDS = 8;
/// News that wait for Trio's thread; above it nothing is read from other hosts.
pub const HOST_EVENTS_BYTES = 1 << 20;
/// Largest record of TLS 1.3, so that as many bytes as possible share its cost.
pub const TLS_RECORD_BYTES = 1 << 14;
/// Overhead of a record: 22 bytes with the ciphers of TLS 1.3; a record is made only where it has room.
pub const TLS_RECORD_OVERHEAD_BYTES = 64;
/// A smaller record is made only of the end of the offered bytes, not to fill a scrap of room.
pub const TLS_RECORD_BYTES_MIN = 1 << 10;
/// Output of an engine while there is no room for it: alerts, hellos, and a flight of the handshake.
pub const TLS_WAITING_BYTES = 1 << 15;
/// Text of the reason why no TLS library is used: the fault of each that was tried.
pub const TLS_TEXT_BYTES = 512;
/// Certificates of one chain, and of authorities: a file of users can hold a whole store of them by mistake.
pub const TLS_CERTIFICATES_MAX = 16;
/// A name in a certificate: as long as DNS allows.
pub const TLS_NAME_BYTES = 256;

// ---- Transfers ----

/// Transfers into one process under way, and views of it, by all others together: one word of its ledger each, 32 KiB,
/// which a revocation reads through in microseconds.
pub const CLAIMS_MAX = 4_096;
/// Piece of one large transfer before the next one has its turn and T2 checks whether it is to stop: 50 us by a mapped
/// block, 150 us by process_vm_readv, ten times that where pages are new.
pub const TRANSFER_CHUNK_BYTES = 1 << 20;
/// Transfers of this size and more go past the caches, of which a core has a few MiB for itself.
pub const HUGE_BYTES_MIN = 8 << 20;
/// Pieces that T2 moves before it polls its sockets: a few milliseconds.
pub const ROUND_PIECES = 16;
/// Mapped blocks of one attached process: state dicts are a few blocks, not one each tensor.
pub const ATTACHMENT_BLOCKS_MAX = 64;
/// Text of the reasons why carriers do not work for an attachment.
pub const WHY_NOT_BYTES = 512;
/// Tries to take the lock of a grant in the call, before T2 goes on trying: it is held for less than a microsecond.
pub const LOCK_TRIES = 200;
/// T2 tries such a lock again after this.
pub const LOCK_AGAIN_MS = 1;
/// Names of dropped grants that are remembered, 24 bytes each: after so many more a reader that comes by TCP is denied,
/// and no longer learns that its grant was revoked.
pub const FORMER_GRANTS_MAX = 1_024;

// ---- The carrier TCP ----

/// Largest body of one request: one connection moves it before another has its turn, and a revocation may leave it to
/// be padded. Fewer bytes cost throughput, more buy none.
pub const TCP_BODY_BYTES_MAX = 1 << 20;
/// Requests of a client on one connection before the first is answered: the round trip costs nothing as long as the
/// next request has come when one is done.
pub const TCP_WINDOW_REQUESTS = 4;
/// Bytes that T2 moves for one connection before the others.
pub const TCP_TURN_BYTES = 2 << 20;
/// Connections to one attached process: the second brings 64 MiB over the loopback from 3.3 to 5.9 GB/s, a third less.
pub const TCP_STREAMS = 2;
/// A transfer of at least this size has them all.
pub const TCP_SPLIT_BYTES = 1 << 22;
/// Connections of one process to all that it is attached to: no transfer ever lacks one.
pub const TCP_STREAMS_MAX = TCP_STREAMS * TRANSFERS_MAX;
/// Connections that others have to one process, a descriptor each.
pub const TCP_CONNECTIONS_MAX = 512;
/// Strangers that are let in, however few descriptors there are (`TCP_STRANGERS_SHARE`): with fewer, a client that has
/// just come would make way for those that T2 takes in the same turn, before T2 has read what the client sent.
pub const TCP_STRANGERS_MIN = TCP_ACCEPTS;
/// Connections that the kernel keeps until T2 takes them.
pub const TCP_BACKLOG = 128;
/// Connections that T2 accepts before it serves others.
pub const TCP_ACCEPTS = 16;
/// Each of the kernel's two buffers of a connection; it may give less.
pub const TCP_SOCKET_BYTES = 4 << 20;
/// Buffer for discarded bytes, and for zeros in place of bytes that must not be sent.
pub const TCP_SCRAP_BYTES = 1 << 16;
/// Interval at which T2 counts silence while there are connections.
pub const TCP_TICK_MS = 250;
/// Patience of both sides while something is owed.
pub const TCP_SILENCE_TICKS = MOVER_SILENCE_MS / TCP_TICK_MS;
/// A client closes a connection that it has not used for 5 s.
pub const TCP_IDLE_TICKS = 5_000 / TCP_TICK_MS;
/// An owner closes a connection that has not been used for a minute: its client is gone without a word.
pub const TCP_FORGOTTEN_TICKS = 60_000 / TCP_TICK_MS;
/// Interval at which T2 polls, after a connection was lost, whether its owner has ended.
pub const TCP_POLL_MS = 5;
/// Number of such polls: sockets are closed less than 1 ms before the process counts as ended, on an idle machine.
pub const TCP_END_POLLS = 40;

// ---- The carrier UCX ----

/// Text of the reason why UCX cannot be used: three libraries tried, and the fault of each.
pub const UCX_TEXT_BYTES = 1_024;
/// Calls of UCX's progress in a row: each may carry on one operation, and others of the thread have their turn, too.
pub const UCX_PROGRESS_ROUNDS = 64;
/// Piece of one transfer: one that is given up ends after two of them, 1 ms at 100 Gbit/s.
pub const UCX_PIECE_BYTES = 1 << 22;
/// Pieces of one transfer under way, so that the adapter always has the next one.
pub const UCX_PIECES = 2;
/// Interval at which T2 checks transfers that make no progress.
pub const UCX_TICK_MS = 100;
/// An endpoint on which nothing has ended for this long is closed, and a new one asks for the state of the grant:
/// pieces take 0.1 s where adapters are emulated, and the way to a process 1 s.
pub const UCX_QUIET_MS = 2_000;
/// Endpoints that are not needed are closed after this: each holds memory of both adapters.
pub const UCX_IDLE_MS = 60_000;
/// Longest interval at which T2 polls UCX while anything is under way: a lost bell costs this, not a hang.
pub const UCX_POLL_MS = 50;
/// The same while others may reach exported memory.
pub const UCX_IDLE_POLL_MS = 1_000;
/// Rounds of progress that closing may take, a millisecond each.
pub const UCX_SHUT_ROUNDS = 1_000;

comptime {
    std.debug.assert(FRAME_BYTES_MAX % FRAME_ALIGN_BYTES == 0);
    std.debug.assert(HEAD_BYTES_MAX <= std.math.maxInt(u16));
    std.debug.assert(BODIES_MAX <= std.math.maxInt(u16));
    std.debug.assert(HEAD_BYTES_MAX < FRAME_PAYLOAD_BYTES_MAX);
    std.debug.assert(std.math.isPowerOfTwo(RING_BYTES));
    // A writer is woken when its ring is half empty: then every frame fits, also beside the control reserve.
    std.debug.assert(FRAME_BYTES_MAX + RING_CONTROL_RESERVE_BYTES <= RING_BYTES / 2);
    // Credits are given for half a window: then the largest frame can leave on what is left.
    std.debug.assert(FRAME_BYTES_MAX <= (RING_BYTES - STREAM_SLACK_BYTES) / 2);
    std.debug.assert(2 * RING_BYTES_MAX + RING_HEADER_BYTES <= std.math.maxInt(u32));
    std.debug.assert(LINKS_MAX % 64 == 0);
    std.debug.assert(std.math.isPowerOfTwo(SEGMENT_BYTES_MIN) and std.math.isPowerOfTwo(SEGMENT_BYTES_MAX));
    std.debug.assert(SEGMENT_BYTES_MIN > FRAME_PAYLOAD_BYTES_MAX and SEGMENT_BYTES_MAX <= SEGMENT_POOL_BYTES_MAX);
    std.debug.assert(SEGMENT_BYTES_MAX <= SEGMENT_IDLE_BYTES_MAX);
    std.debug.assert(SEGMENTS_MAX % 64 == 0 and SEGMENTS_MAX <= 256);
    std.debug.assert(GRANTS_MAX <= 1 << 13); // bits of a claim
    std.debug.assert(CLAIMS_MAX >= 2 * TRANSFERS_MAX); // one reader alone does not take them all
    std.debug.assert(INLINE_BYTES_MAX <= TRANSFER_CHUNK_BYTES);
    std.debug.assert(HOST_QUANTUM_BYTES <= HOST_FRAME_PAYLOAD_BYTES_MAX and HOST_WINDOW_BYTES <= HOST_RESEND_BYTES);
    std.debug.assert(2 * HOST_CHANNELS_MAX + 1 < std.math.maxInt(u16)); // indices of channels
}

/// Value of a bound by its name.
pub fn lookup(name: []const u8) ?i64 {
    @setEvalBranchQuota(10_000);
    inline for (comptime std.meta.declarations(@This())) |declared| {
        const value = @field(@This(), declared.name);
        switch (@typeInfo(@TypeOf(value))) {
            .comptime_int, .int => if (std.mem.eql(u8, name, declared.name)) return value,
            else => {},
        }
    }
    return null;
}

test "lookup knows names and refuses others" {
    try std.testing.expectEqual(@as(?i64, 32), lookup("FRAME_HEADER_BYTES"));
    try std.testing.expectEqual(@as(?i64, null), lookup("NO_SUCH"));
}
