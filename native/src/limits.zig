//! Every bound of the native library: name, value, unit (last word), reason. Those that Python shares carry the name of
//! `trimesh/limits/`; `tests/native/test_limits.py` compares the two through `tm_limit`.

const std = @import("std");

/// The contract of `trimesh.h`; one more at every change of it.
pub const ABI_VERSION: u32 = 16;

/// The bytes on the wire; one more at every change of them.
pub const PROTOCOL_VERSION: u8 = 8;

// ---- shared with trimesh/limits/ ----

/// Fixed header of every frame: four words.
pub const FRAME_HEADER_BYTES = 32;

/// One fragment; what a control frame may have to wait for.
pub const FRAME_PAYLOAD_BYTES_MAX = 69_632;

/// The head of one message.
pub const HEAD_BYTES_MAX = 49_152;

/// Bodies of one message.
pub const BODIES_MAX = 4_096;

/// All bodies of one message.
pub const MESSAGE_BYTES_MAX = 1 << 36;

/// One direction of a link.
pub const RING_BYTES = 1 << 18;

/// Part of a ring that data may not use.
pub const RING_CONTROL_RESERVE_BYTES = 1 << 14;

/// Links of one bus.
pub const LINKS_MAX = 1_024;

/// Smallest pooled segment. Bodies above one fragment travel in segments.
pub const SEGMENT_BYTES_MIN = 1 << 17;

/// Largest pooled segment. The copy into it takes the loop of the sender: 7 ms, 90 ms when its pages are new.
pub const SEGMENT_BYTES_MAX = 1 << 27;

/// Shared memory of all segments of one process.
pub const SEGMENT_POOL_BYTES_MAX = 1 << 31;

/// Shared memory of segments that are not held, kept for the next bodies.
pub const SEGMENT_IDLE_BYTES_MAX = 1 << 28;

/// Segments of one process: a descriptor of the sender each.
pub const SEGMENTS_MAX = 128;

/// Bytes in segments that one peer has been sent and has not looked at; a single larger body is let through.
pub const SEGMENT_FLIGHT_BYTES_MAX = 1 << 24;

/// The same of chunks of larger messages: what a small message has to wait for at the receiver, 0.3 ms each MiB.
pub const CHUNK_FLIGHT_BYTES_MAX = 1 << 22;

/// Rules of one table of planned faults: one for each direction of each link.
pub const FAULT_RULES_MAX = 1_024;

/// Grants of one process: a row of 128 bytes each in its ledger, 1 MiB in all.
pub const GRANTS_MAX = 8_192;

/// Blocks of one process: a descriptor each.
pub const BLOCKS_MAX = 256;

/// One block: what is asked for beyond it is a mistake, not a tensor.
pub const BLOCK_BYTES_MAX = 1 << 40;

/// Memory of blocks that were given back, kept for the next ones: making pages anew costs ten times the copy.
pub const BLOCK_IDLE_BYTES_MAX = 1 << 29;

/// Attachments of one process: as many as it may have links.
pub const ATTACHMENTS_MAX = 1_024;

/// Transfers of one process that are under way.
pub const TRANSFERS_MAX = 1_024;

/// Views of one process that are open: a mapping each, and the kernel allows 65,530 of those.
pub const VIEWS_MAX = 4_096;

/// Transfers up to this size are done in the call: 16 us by process_vm_readv, about what waking T2 and being woken
/// by it costs.
pub const INLINE_BYTES_MAX = 1 << 17;

/// A process that lives and does not answer for this long is called silent.
pub const MOVER_SILENCE_MS = 5_000;

/// What a handle says to readers with an RDMA adapter: 20 to 250 bytes for each adapter of a machine, which has 9 at
/// most.
pub const EXPORT_BYTES_MAX = 4_096;

/// Longest time that T0 may be asked to spin on its bell before it sleeps.
pub const SPIN_US_MAX = 10_000;

/// A wait of as many wakes is worth spinning through: where both sides spin, an answer takes one to two; where the
/// other side sleeps, or is slow, three to four.
pub const SPIN_WAKES = 4;

/// What a wake is thought to cost before one was measured: 12 to 30 us between two cores of most machines.
pub const SPIN_WAKE_NS = 25_000;

/// So short a wait is worth spinning through even where wakes are cheap: an answer takes 50 to 80 us while the other
/// side sleeps, and 30 as soon as both spin, which neither does before the other.
pub const SPIN_SHORT_NS = 100_000;

/// One part in as many of a process's time may go into spins that were in vain.
pub const SPIN_VAIN_SHARE = 8;

/// As much may be spun in vain in a row, after a time without: forty ends of conversations.
pub const SPIN_VAIN_NS_MAX = 4_000_000;

/// One half-open link: a handshake with a long chain of certificates takes a tenth of it.
pub const TLS_HALF_OPEN_BYTES = 1 << 16;

/// From the first byte of a link until its peer is admitted: a handshake takes 2 ms here, and hosts may be far away.
pub const TLS_HALF_OPEN_MS = 5_000;

/// Half-open links of one door: 100 KiB each, and as many hosts may dial in the same moment.
pub const TLS_HALF_OPEN_MAX = 64;

/// The first thing that either side says inside TLS; fixed, so that nothing is parsed to find its end.
pub const TLS_HELLO_BYTES = 256;

/// Fixed header of every frame between two hosts.
pub const HOST_FRAME_HEADER_BYTES = 32;

/// Payload of one frame between two hosts: four records of TLS.
pub const HOST_FRAME_PAYLOAD_BYTES_MAX = 65_536;

/// What a channel between two hosts is for, in the frame that opens it.
pub const HOST_PURPOSE_BYTES_MAX = 4_096;

/// Bytes of one direction of a channel that are under way, or not taken yet by the process that they are for.
pub const HOST_WINDOW_BYTES = 1 << 18;

/// Frames of a session of hosts that are kept until the peer has them. Full is backpressure.
pub const HOST_RESEND_BYTES = 8 << 20;

/// Beyond that, for windows and ends of channels, which must pass when data has filled it.
pub const HOST_RESEND_RESERVE_BYTES = 1 << 20;

/// What one channel sends in its turn: a record of TLS.
pub const HOST_QUANTUM_BYTES = 1 << 14;

/// So much that has come is acknowledged at once, and so many frames.
pub const HOST_FOLD_BYTES = 2_048;
pub const HOST_ACK_BYTES = 1 << 20;
pub const HOST_ACK_FRAMES = 64;

/// Channels of a session of hosts that one side opens.
pub const HOST_CHANNELS_MAX = 16_384;

// ---- native only ----

/// Sessions of hosts of one relay: as many as a mesh may have hosts, 9 MiB each when all that may be kept is.
pub const HOST_SESSIONS_MAX = 1_024;

/// How often silence between hosts is counted.
pub const HOST_TICK_MS = 100;

/// Ticks after which a side that has sent nothing sends a beat.
pub const HOST_BEAT_TICKS = 5;

/// Encrypted bytes on their way in, and out: eight records.
pub const HOST_WIRE_BYTES = 1 << 17;

/// Frames that are made before TLS takes them; with what waits in `HOST_WIRE_BYTES` and `HOST_UNSENT_BYTES` it is what
/// a small message finds before it.
pub const HOST_FILL_BYTES = 1 << 16;

/// Bytes that the kernel takes for a connection before any of them has left, however fast we are.
pub const HOST_UNSENT_BYTES = 1 << 17;

/// Rounds of reading, encrypting and writing that one session has before the others: about 1 MiB each way, 1 ms.
pub const HOST_ROUNDS = 8;

/// News for Trio's thread that wait there; above it nothing is read from other hosts.
pub const HOST_EVENTS_BYTES = 1 << 20;

/// Largest record of TLS 1.3, so that its cost is shared by as many bytes as may be.
pub const TLS_RECORD_BYTES = 1 << 14;

/// What a record may have besides: 22 bytes with the ciphers of TLS 1.3; a record is made only where it has room.
pub const TLS_RECORD_OVERHEAD_BYTES = 64;

/// A smaller record is made only of what ends what was offered, not to fill a scrap of room.
pub const TLS_RECORD_BYTES_MIN = 1 << 10;

/// What an engine makes while there is no room for it: alerts, hellos, and a flight of the handshake.
pub const TLS_WAITING_BYTES = 1 << 15;

/// Why no TLS library is used: what is wrong with each that was looked at.
pub const TLS_TEXT_BYTES = 512;

/// Certificates of one chain, and of authorities: what a file of users can hold by mistake is a whole store of them.
pub const TLS_CERTIFICATES_MAX = 16;

/// A name in a certificate: what DNS allows.
pub const TLS_NAME_BYTES = 256;

/// Messages with bodies in segments of one link, under way, that are told apart; those beyond it count as one.
pub const FLIGHTS_MAX = 16;

/// Looks at the bell between two of the clock and of the other descriptors: 1 to 4 us, a system call each.
pub const SPINS = 32;

/// After so long a pause between two polls, or one as long as a wake, cores are counted at once: another thread may
/// have had this one, or a hypervisor, which is no reason to sleep. Ten times what a system call takes.
pub const SPIN_PAUSE_NS = 20_000;

/// Cores are counted again after this: 6 us each time.
pub const CORES_AGAIN_MS = 10;

/// Cores of a machine, as the kernel may be built for.
pub const CORES_MAX = 8_192;

/// Transfers into one process that may be under way at one time, and views of it, by all others together: one word of
/// its ledger each, 32 KiB, which a revocation reads through in microseconds.
pub const CLAIMS_MAX = 4_096;

/// Of one large transfer at a time, before the next one has its turn and before T2 looks whether it is to stop: 50 us
/// by a mapped block, 150 us by process_vm_readv, ten times that where pages are new.
pub const TRANSFER_CHUNK_BYTES = 1 << 20;

/// Transfers of this size and more go past the caches, of which a core has a few MiB for itself.
pub const HUGE_BYTES_MIN = 8 << 20;

/// Pieces that T2 moves before it looks after its sockets: a few milliseconds.
pub const ROUND_PIECES = 16;

/// Blocks of one process that is attached to that stay mapped: state dicts are a few blocks, not one each tensor.
pub const ATTACHMENT_BLOCKS_MAX = 64;

/// Text that says why carriers do not work for an attachment.
pub const WHY_NOT_BYTES = 512;

/// Tries to take the lock of a grant in the call, before T2 goes on trying: it is held for less than a microsecond.
pub const LOCK_TRIES = 200;

/// T2 tries such a lock again after this.
pub const LOCK_AGAIN_MS = 1;

/// Messages that do without a new segment after the system has refused one: refusing can be as slow as making.
pub const SEGMENT_REFUSAL_MESSAGES = 64;

/// Largest frame: a first frame with the largest head and the largest table of body sizes holds no body bytes, any
/// other payload is at most one fragment.
pub const FRAME_BYTES_MAX = FRAME_HEADER_BYTES + @max(FRAME_PAYLOAD_BYTES_MAX, HEAD_BYTES_MAX + 8 * BODIES_MAX);

/// Frames start at multiples of this, so that headers and size tables are read as whole words.
pub const FRAME_ALIGN_BYTES = 8;

/// Largest ring that options may ask for: offsets into a view (two copies and a page) stay within 32 bits.
pub const RING_BYTES_MAX = 1 << 26;

/// Page in front of the data of a ring, for its counters. Both supported machines can map at this grain.
pub const RING_HEADER_BYTES = 4_096;

/// Bytes of a stream link that may be under way without credit: beats and credits, which are taken out of the stream as
/// they come, and one hello. A multiple of what one read may find between two frames.
pub const STREAM_SLACK_BYTES = RING_CONTROL_RESERVE_BYTES;

/// Whole frames that T1 sends in one system call: two fragments, so that a credit or a beat waits for no more.
pub const STREAM_BATCH_BYTES = 2 * (FRAME_PAYLOAD_BYTES_MAX + FRAME_HEADER_BYTES);

/// Reads and writes that T1 gives to one link before it looks at the others.
pub const STREAM_ROUNDS = 8;

/// Records that `tm_poll` takes from one link before it looks at the others.
pub const POLL_LINK_RECORDS = 128;

/// Lifelines of one process: controller, spawner, host agent, and the same again for a nested mesh.
pub const LIFELINES_MAX = 16;

/// Buses of one process. One in use; tests and simulations make more.
pub const BUSES_MAX = 64;

/// Events that one wait of T1 takes.
pub const EVENTS_MAX = 64;

/// Text that says why a link went down.
pub const DETAIL_BYTES = 192;

/// Frames that the gate of an armed link looks ahead: what is beyond waits in the ring, and is late for that.
pub const FAULT_FRAMES_MAX = 1_024;

/// A planned delay is cut to this: sums of a few stay within 64 bits of nanoseconds.
pub const FAULT_SECONDS_MAX = 1e9;

/// While an armed link is held, its process looks this often whether it still is: healing rings no bell.
pub const FAULT_POLL_MS = 5;

/// Largest body of one request over TCP: what one connection moves before another has its turn, and what a revocation
/// may leave to be padded. Fewer bytes cost throughput, more buy none.
pub const TCP_BODY_BYTES_MAX = 1 << 20;

/// Grants that were dropped whose names are remembered, 24 bytes each: when so many more were dropped, a reader that
/// comes by TCP is told that it was denied, no longer that its grant was revoked.
pub const FORMER_GRANTS_MAX = 1_024;

/// Requests that a client asks on one connection before the first of them is answered: the way there and back costs
/// nothing as long as the next request has come when one is done.
pub const TCP_WINDOW_REQUESTS = 4;

/// Bytes that T2 moves for one TCP connection before it looks at the others.
pub const TCP_TURN_BYTES = 2 << 20;

/// Connections to one process that is attached to: the second brings 64 MiB over the loopback from 3.3 to 5.9 GB/s, a
/// third less.
pub const TCP_STREAMS = 2;

/// A transfer of at least this size has them all.
pub const TCP_SPLIT_BYTES = 1 << 22;

/// Connections of one process to all that it is attached to: no transfer ever lacks one.
pub const TCP_STREAMS_MAX = TCP_STREAMS * TRANSFERS_MAX;

/// Connections that others have to one process, a descriptor each.
pub const TCP_CONNECTIONS_MAX = 512;

/// Of the descriptors that a process may have (`ulimit -n`), connections that have shown no secret take one in so many
/// at most: any user of the host can make them, and the rest is for the program's own files.
pub const TCP_STRANGERS_SHARE = 8;

/// But so many are let in, however few descriptors there are: with fewer, a client that has just come would make way
/// for those that T2 takes in the same turn, before T2 has read what the client sent.
pub const TCP_STRANGERS_MIN = TCP_ACCEPTS;

/// Connections that the kernel keeps until T2 takes them.
pub const TCP_BACKLOG = 128;

/// Connections that T2 takes before it looks at others.
pub const TCP_ACCEPTS = 16;

/// Each of the kernel's two buffers of a connection; it may give less.
pub const TCP_SOCKET_BYTES = 4 << 20;

/// Where bytes go that are not wanted, and zeros that stand for bytes which must not be sent.
pub const TCP_SCRAP_BYTES = 1 << 16;

/// How often T2 counts silence while there are connections.
pub const TCP_TICK_MS = 250;

/// The patience of both sides while something is owed.
pub const TCP_SILENCE_TICKS = MOVER_SILENCE_MS / TCP_TICK_MS;

/// A client closes a connection that it has not used for 5 s.
pub const TCP_IDLE_TICKS = 5_000 / TCP_TICK_MS;

/// An owner closes a connection that has not been used for a minute: its client is gone without a word.
pub const TCP_FORGOTTEN_TICKS = 60_000 / TCP_TICK_MS;

/// After a connection was lost, T2 looks this often whether its owner has ended,
pub const TCP_POLL_MS = 5;

/// so many times: sockets are closed less than a millisecond before the process counts as ended, on an idle machine.
pub const TCP_END_POLLS = 40;

/// Path of a library that a variable of the environment names: PATH_MAX of Linux.
pub const PATH_BYTES = 4_096;

/// Why UCX cannot be used: three libraries looked for, and what is wrong with each.
pub const UCX_TEXT_BYTES = 1_024;

/// Calls of UCX's progress in a row: each may carry on one operation, and others of the thread have their turn, too.
pub const UCX_PROGRESS_ROUNDS = 64;

/// Of one transfer by UCX at a time: one that is given up ends after two of them, 1 ms at 100 Gbit/s.
pub const UCX_PIECE_BYTES = 1 << 22;

/// Pieces of one transfer that are under way, so that the adapter always has the next one.
pub const UCX_PIECES = 2;

/// How often T2 looks at transfers by UCX that nothing is heard of.
pub const UCX_TICK_MS = 100;

/// An endpoint of UCX on which nothing has ended for this long is closed, and a new one asks what has become of the
/// grant: pieces take 0.1 s where adapters are emulated, and the way to a process 1 s.
pub const UCX_QUIET_MS = 2_000;

/// Endpoints of UCX that are not needed are closed after this: each holds memory of both adapters.
pub const UCX_IDLE_MS = 60_000;

/// T2 looks at UCX at least this often while anything is under way: a lost bell costs this, not a hang.
pub const UCX_POLL_MS = 50;

/// The same while others may come to what was exported.
pub const UCX_IDLE_POLL_MS = 1_000;

/// Rounds of progress that closing may take, a millisecond each.
pub const UCX_SHUT_ROUNDS = 1_000;

/// Beats and leases that options may ask for: ticks are counted in 32 bits.
pub const BEAT_MS_MAX = 3_600_000;

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
