/* The contract of libtrimesh, the native library of trimesh.
 *
 * One *bus* per process incarnation joins it to its peers by *links*. Two threads work on a bus: T0, the caller (in
 * Python the thread of the Trio loop), which sends and receives inline, and T1, a thread of the library, which
 * watches lifelines, processes, heartbeats and leases and moves the bytes of links whose peer is not on this host. T1
 * never calls back; everything that happened comes out of `tm_poll`.
 *
 * Rules that hold for every function:
 *  - It never blocks, except where it says so.
 *  - Functions that take a bus are called by one thread at a time (T0). A forked child gets TM_ERR_FORKED.
 *  - The result is a status: TM_OK, a positive status (nothing failed, look at its name), or a negative one (an error).
 *    Statuses from -1000 downwards are -1000 - errno of the system call that failed.
 *  - Handles are opaque. A link handle is a number that is never valid again after `tm_link_free`.
 *  - Text is UTF-8, zero-terminated, owned by the library.
 *
 * cffi reads what stands between the two markers, so only plain declarations stand there. */
#ifndef TRIMESH_H
#define TRIMESH_H

#include <stdint.h>

/* cdef-begin */

/* ---- statuses (append only) ---- */

#define TM_OK 0
#define TM_FULL 1             /* no room now, or no hello yet: a TM_RECORD_SPACE or _UP record will follow */
#define TM_UNDER_WAY 2        /* of a transfer: a record will follow, and ring the mover's bell */

#define TM_ERR_ARGUMENT -1    /* a value outside of its range */
#define TM_ERR_LINK -2        /* no such link: it was freed, or never was */
#define TM_ERR_DOWN -3        /* the link has ended */
#define TM_ERR_LIMIT -4       /* a table is full (links, grants, attachments ...), or too many are at one process */
#define TM_ERR_FORKED -5      /* this process is a forked child of the one that made the bus */
#define TM_ERR_STATE -6       /* not allowed now: a message is unfinished, a batch is still borrowed */
#define TM_ERR_TOO_LARGE -7   /* a head, a body table or a message above its limit */
#define TM_ERR_THREAD -8      /* the system gave no thread */
#define TM_ERR_PEER -9        /* the peer broke the protocol: the link has ended, see its detail */
/* of transfers */
#define TM_ERR_GONE -10       /* the process that granted it has ended */
#define TM_ERR_REVOKED -11    /* the grant was revoked, before or meanwhile */
#define TM_ERR_DENIED -12     /* wrong secret, no such right, or out of its range */
#define TM_ERR_UNREACHABLE -13 /* no carrier that both have and that this grant allows */
#define TM_ERR_SILENT -14     /* the process lives, but has not answered for limit MOVER_SILENCE_MS (tcp); or whoever is
                                 at an atomic operation of the same grant has not ended it for as long */
#define TM_ERR_CANCELLED -15  /* given up, or its attachment was ended */
/* of TLS */
#define TM_ERR_TLS -16        /* the peer broke TLS */
#define TM_ERR_TLS_PLAINTEXT -17 /* what came is no TLS */
#define TM_ERR_TLS_VERSION -18 /* the peer does not speak TLS 1.3 */
#define TM_ERR_TLS_CERTIFICATE -19 /* it has shown no certificate of the authority, or none that is valid now */
#define TM_ERR_TLS_NAME -20   /* its certificate is of another incarnation or mesh than it says, or than was wanted */
#define TM_ERR_TLS_REFUSED -21 /* the other side has refused this one */
#define TM_ERR_TLS_LATE -22   /* it was not admitted within limit TLS_HALF_OPEN_MS */
#define TM_ERR_TLS_CUT -23    /* the connection has ended, and not by the peer's word */
#define TM_ERR_DEVICE -24     /* memory of a device, there or here, which no allowed carrier moves: `why_no_device` */
#define TM_ERR_ERRNO -1000    /* TM_ERR_ERRNO - errno */

/* ---- the library ---- */

/* Version of this contract; the caller refuses another one. */
uint32_t tm_abi_version(void);

/* Value of a bound of limits.zig by its name, e.g. "RING_BYTES"; -1 for an unknown name. */
int64_t tm_limit(const char *name);

/* ---- the bus ---- */

typedef struct tm_bus tm_bus;

typedef struct {
    uint64_t epoch;           /* this process incarnation; not 0 */
    uint64_t host;            /* identity of this host, told to peers; 0 = not known */
    uint32_t links_max;       /* 1 .. limit LINKS_MAX */
    uint32_t ring_bytes;      /* one direction of a link; a power of two, limit RING_BYTES .. 2^26 */
    uint32_t beat_ms;         /* interval of heartbeats */
    uint32_t lease_ms;        /* silence after which a peer counts as stopped; at least 2 beats */
    uint32_t stall_ms;        /* tell peers when the caller has not polled for this long; 0 = never */
    uint32_t spin_us;         /* `tm_before_wait` spins for at most this long; 0 = never; up to limit SPIN_US_MAX */
} tm_bus_options;

/* Make a bus and start T1. The bus is the caller's until `tm_bus_destroy`. */
int32_t tm_bus_create(const tm_bus_options *options, tm_bus **bus_out);

/* Stop and join T1, end all links, unmap and close everything. Blocks until T1 has ended (it never waits itself).
 * In a forked child it does nothing. The handle is dead afterwards. */
int32_t tm_bus_destroy(tm_bus *bus);

/* The descriptor on which the caller waits (readable) after `tm_arm` returned 0. Owned by the bus. */
int32_t tm_bus_bell(tm_bus *bus);

/* Kill this process's group (SIGKILL), or end this process if it leads no group, as soon as the process behind `pidfd`
 * has ended. Done by T1, whatever T0 is doing. The descriptor is duplicated. */
int32_t tm_lifeline_add(tm_bus *bus, int32_t pidfd);

/* ---- links ---- */

#define TM_LINK_LOCAL 1       /* a unix socket to a process of this host: shared-memory rings beside it */
#define TM_LINK_STREAM 2      /* any connected stream socket: T1 moves the bytes */

typedef struct {
    uint64_t peer_epoch;      /* refuse a peer of another epoch; 0 = take any */
    int32_t fd;               /* connected stream socket; taken over on success only */
    uint32_t kind;            /* TM_LINK_* */
    uint32_t lease, lease_ms; /* 1: the peer's silence ends the link; after so long, 0 = as the bus has it */
    uint32_t hello_ms, zero;  /* end the link if no hello came in this time; 0 = wait for ever */
} tm_link_options;

/* Begin a link and send our hello. TM_RECORD_UP follows when the peer's has come. */
int32_t tm_link_open(tm_bus *bus, const tm_link_options *options, uint32_t *link_out);

/* End the link with TM_RECORD_DOWN (EXITED) as soon as the process behind `pidfd` has ended. Duplicated. */
int32_t tm_link_watch_pid(tm_bus *bus, uint32_t link, int32_t pidfd);

/* This side will say goodbye, when it has sent what it still has: until then that of the peer does not end the link. */
int32_t tm_link_leave(tm_bus *bus, uint32_t link);

/* Say goodbye after everything sent so far. TM_FULL: no room yet, try again after the next SPACE or UP record.
 * Nothing can be sent after it; what the peer still sends is delivered. TM_RECORD_DOWN (CLOSED) follows when the peer
 * has said goodbye too, or has ended, or has neither sent nor taken anything for as long as a lease. */
int32_t tm_link_close(tm_bus *bus, uint32_t link);

/* End the link now, without a record, and give back everything it held; views borrowed from it stay until
 * `tm_poll_done`. To be called also after a TM_RECORD_DOWN. */
int32_t tm_link_free(tm_bus *bus, uint32_t link);

typedef struct {
    uint64_t peer_epoch, peer_host; /* known after TM_RECORD_UP */
    uint32_t peer_pid;        /* verified by the kernel on a local link, else what the peer said */
    uint32_t view_bytes;      /* size of the view that offsets of records refer to */
    const uint8_t *view;      /* valid until `tm_link_free` (see there) */
    const char *detail;       /* why the link is down, or "" */
    uint64_t messages_sent, messages_received;
    uint64_t bytes_sent, bytes_received; /* heads and bodies */
    uint64_t frames_dropped;  /* frames of another epoch, and duplicates */
} tm_link_info;

int32_t tm_link_get_info(tm_bus *bus, uint32_t link, tm_link_info *info_out);

/* ---- sending ---- */

#define TM_LANE_CONTROL 0
#define TM_LANE_DATA 1
#define TM_LANE_CHUNK 2         /* DATA, with bodies: a chunk of a larger message; TM_FLAG_CHUNK there */

typedef struct {
    const uint8_t *bytes;
    uint64_t size;
    uint32_t segment;         /* zero it; the library keeps there where a copy of the bytes is */
    uint32_t reserved;        /* 0 */
} tm_span;

/* Where a message that did not fit at once goes on; zero it for a new message. */
typedef struct {
    uint64_t body_bytes;      /* body bytes already in frames */
    uint64_t started;         /* not 0: the first frame is out */
} tm_cursor;

/* Send a message, or the rest of one. Bytes are copied before it returns, as many whole frames as fit.
 * TM_OK: all of it is out. TM_FULL: call again with the same arguments after a SPACE record; another DATA message is
 * refused (TM_ERR_STATE) until then, CONTROL ones are not. Peers are woken by `tm_flush`. */
int32_t tm_link_send(tm_bus *bus, uint32_t link, uint32_t lane, const uint8_t *head, uint32_t head_size,
                     tm_span *bodies, uint32_t n_bodies, tm_cursor *cursor_io);

/* On local links bodies above FRAME_PAYLOAD_BYTES_MAX are copied once into shared memory, however many links they are
 * sent on; `bodies` remembers it, so it is the same array for all links and all calls for a message. To be called when
 * the message has left on all of them, or is given up. */
int32_t tm_bodies_done(tm_bus *bus, tm_span *bodies, uint32_t n_bodies);

/* The same for a message without bodies, all or nothing. */
int32_t tm_link_send_head(tm_bus *bus, uint32_t link, uint32_t lane, const uint8_t *head, uint32_t head_size);

/* Begin one DATA message on each of `links`; `statuses_out` and `cursors_out` get what `tm_link_send` said for each. */
int32_t tm_links_send(tm_bus *bus, const uint32_t *links, uint32_t n_links, const uint8_t *head, uint32_t head_size,
                      tm_span *bodies, uint32_t n_bodies, int32_t *statuses_out, tm_cursor *cursors_out);

/* Wake the peers of everything sent since the last flush, those that sleep. */
int32_t tm_flush(tm_bus *bus);

/* ---- receiving ---- */

#define TM_RECORD_MESSAGE 1   /* first (often only) frame of a message */
#define TM_RECORD_FRAGMENT 2  /* more body bytes of the DATA message that began before */
#define TM_RECORD_UP 3        /* the peer's hello has come: sending works */
#define TM_RECORD_SPACE 4     /* after TM_FULL: there is room again */
#define TM_RECORD_DOWN 5      /* the link has ended; `flags` holds TM_DOWN_*; the last record of a link */
#define TM_RECORD_STALLED 6   /* the peer's caller has not polled for `flags` milliseconds; 0: it does again */

#define TM_FLAG_MORE 1        /* fragments follow */
#define TM_FLAG_CONTROL 2     /* came on the CONTROL lane */
#define TM_FLAG_CHUNK 4        /* was sent as TM_LANE_CHUNK; counts as no message of `tm_link_info` */

#define TM_DOWN_CLOSED 1
#define TM_DOWN_EOF 2
#define TM_DOWN_EXITED 3
#define TM_DOWN_LEASE 4
#define TM_DOWN_PROTOCOL 5

/* Offsets count from the start of the link's view. Body bytes of a message are all bodies one after the other; the
 * table of their sizes (n_bodies times uint64, little endian) is at `sizes_offset`; a size above 2^63 is no size but
 * names a body in shared memory (its size: the lower 40 bits), which `tm_body_take` lends. Until `tm_poll_done`.
 * The peer can still write there: read once, trust nothing. */
typedef struct {
    uint32_t link;
    uint16_t kind;            /* TM_RECORD_* */
    uint16_t n_bodies;
    uint32_t flags;
    uint32_t head_offset, head_size;
    uint32_t sizes_offset, body_offset, body_size;
} tm_record;

/* Take what has come on all links: at most `max` records into `records_out`, their number into `n_out`. The records of
 * the batch before must have been released; a batch of none is. */
int32_t tm_poll(tm_bus *bus, tm_record *records_out, uint32_t max, uint32_t *n_out);

/* The same for a caller that waits by `tm_before_wait`, as soon as its wait is over for whatever reason: the number of
 * records. Nothing is done when the bell has not rung meanwhile; the bell is never read. `tm_wait_here` flushes, waits
 * for the bell alone, and does the same, when nothing else is to be done for `most_us`. Not if the last answers took
 * longer; it ends with 0 when `poller` (see `tm_before_wait`) is readable for another reason. */
int32_t tm_after_wait(tm_bus *bus, tm_record *records_out, uint32_t max);
int32_t tm_wait_here(tm_bus *bus, int32_t poller, uint32_t most_us, tm_record *records_out, uint32_t max);

/* 1 = `tm_after_wait` would look for what has come; 0 = the bell has not rung. */
int32_t tm_has_news(tm_bus *bus);

typedef struct {
    uint8_t *bytes;           /* writable; what is written there is seen here only */
    uint64_t mapped;
} tm_body;

/* Lend the memory of a body; `word` is what stood in the table of the record just polled. It is the caller's until
 * `tm_body_give_back`, also when the link, or the bus, is gone, and may be inherited by a forked child. TM_ERR_PEER:
 * the peer named memory that it must not name. */
int32_t tm_body_take(tm_bus *bus, uint32_t link, uint64_t word, tm_body *body_out);

/* Give a body back, with what `tm_body_take` was called with and returned; the peer hears of it by the next `tm_flush`.
 * `bus` may be NULL when it has been destroyed. */
int32_t tm_body_give_back(tm_bus *bus, uint32_t link, uint64_t word, uint8_t *bytes, uint64_t mapped);

/* Release the views of the last batch; peers that waited for room are woken. */
int32_t tm_poll_done(tm_bus *bus);

/* ---- faults that a test has planned ---- */

/* A *table* of faults is memory that the process of a test shares with the processes it tests. Who was handed its
 * descriptor when it was spawned can arm its bus by it; any other bus has no faults, whatever peers send. Faults take
 * effect at once in every armed process; each happens at `target`, which must be armed. */

#define TM_FAULT_DELAY 1      /* frames are late by `amount` seconds */
#define TM_FAULT_REORDER 2    /* by a random part of that: the lanes of a link, and links, overtake each other */
#define TM_FAULT_BANDWIDTH 3  /* no more than `amount` bytes a second */
#define TM_FAULT_DROP 4       /* with probability `amount` a frame is lost, and the link with it (EOF) */
#define TM_FAULT_DUPLICATE 5  /* ... comes twice, */
#define TM_FAULT_CORRUPT 6    /* ... is damaged: both break the protocol */
#define TM_FAULT_RESET 7      /* the link is lost after `amount` bytes */
#define TM_FAULT_HOLD 8       /* nothing comes, not even heartbeats or the end, until it is healed */
#define TM_FAULT_REFUSE 9     /* the nth call of the system that could fail with `code`, and the next ones, do */

typedef struct {
    uint64_t source;          /* epoch of the sender; 0 for REFUSE */
    uint64_t target;          /* epoch of the process in which it happens */
    uint32_t kind;            /* TM_FAULT_* */
    int32_t code;             /* of REFUSE: ENOSPC (rings, segments) or EMFILE (these, and descriptors taken) */
    double amount;
    uint64_t nth, times;      /* of REFUSE: nth from 1 */
    uint64_t seed;            /* of what happens by chance */
} tm_fault;

typedef struct {
    uint64_t hits;
    uint64_t first_ns;        /* CLOCK_MONOTONIC; 0 = not yet */
} tm_fault_count;

/* Make a table. Its descriptor is the caller's. */
int32_t tm_faults_create(uint64_t secret, int32_t *fd_out);

/* Obey the table behind `fd`, which stays the caller's, until the bus is destroyed. TM_ERR_ARGUMENT: it is no table, or
 * has another secret. TM_ERR_STATE: the bus is armed already. */
int32_t tm_bus_arm_faults(tm_bus *bus, int32_t fd, uint64_t secret);

/* Plan a fault, or end one. Done by one process only. TM_ERR_STATE: the bus is not armed. TM_ERR_LIMIT: too many. */
int32_t tm_fault_add(tm_bus *bus, const tm_fault *fault, uint32_t *index_out);
int32_t tm_fault_heal(tm_bus *bus, uint32_t index);

/* How often it has happened, until the next `tm_fault_add` after it was healed. */
int32_t tm_fault_get_count(tm_bus *bus, uint32_t index, tm_fault_count *count_out);

/* Prepare to sleep: 0 = wait until the bell is readable, then poll; 1 = something has come already, poll. */
int32_t tm_arm(tm_bus *bus);

/* Prepare to wait for many things, the bell among them: `tm_flush`, then `tm_arm`; the bell is rung if something has
 * come already, for the wait to end at once. The bell counts each time that it is rung, not while readable (EPOLLET).
 *
 * `poller` is a descriptor that is readable when there is anything to wake for, or -1. With one, the bell is polled
 * for a while first. To be given when nothing else is to be done in `spin_us`. It spins only after traffic, when the
 * last waits were short, and when no core is wanted by others. 1 = something has come; 2 = nothing has come in the
 * time; 3 = `poller` is readable for another reason; 0 = it did not spin. */
int32_t tm_before_wait(tm_bus *bus, int32_t poller);

/* ---- bulk data: memory that others read and write themselves ---- */

/* A *mover* grants others access to memory of this process, and reaches into memory that others have granted, without
 * their help: see docs/design/memory.md. A thread of the library (T2), started when it is first needed, copies what is
 * large and serves TCP. Functions that take a mover are called by one thread at a time; none waits. */

typedef struct tm_mover tm_mover;

#define TM_CARRIER_LOCAL 1    /* memory of this very process */
#define TM_CARRIER_SHM 2      /* a block, mapped */
#define TM_CARRIER_CMA 4      /* process_vm_readv and _writev */
#define TM_CARRIER_TCP 8
#define TM_CARRIER_UCX 16

typedef struct {
    uint64_t epoch;           /* this process incarnation; not 0 */
    uint64_t host;            /* identity of this host: processes with the same may reach each other's memory; not 0 */
    uint32_t carriers;        /* TM_CARRIER_* that may be used */
    uint32_t address_size;    /* of the address to listen at: 4 or 16 bytes; 0 = do not listen */
    uint8_t address[16];
    const char *ucx;          /* a libucp.so.0 to look at after those of the system; NULL = none */
} tm_mover_options;

/* Make a mover. It is the caller's until `tm_mover_destroy`. */
int32_t tm_mover_create(const tm_mover_options *options, tm_mover **mover_out);

/* Stop and join T2, end all transfers without a record, unmap and close everything; blocks that are still in use stay
 * mapped here, and so do open views, which count as in use until the process ends: see `tm_unmap`. Waits until T2 has
 * ended, at most for one chunk of a copy. In a forked child it does nothing. */
int32_t tm_mover_destroy(tm_mover *mover);

/* How others reach this process. */
typedef struct {
    uint64_t epoch, host;
    uint64_t started;         /* start time of the process, in ticks since boot, as in /proc/PID/stat */
    uint32_t pid;
    uint32_t ledger;          /* number of the ledger's descriptor there */
    uint32_t port;            /* 0: it does not listen */
    uint32_t address_size;
    uint8_t address[16];
} tm_home;

int32_t tm_mover_home(tm_mover *mover, tm_home *home_out);

typedef struct {
    uint32_t usable;          /* 1: this machine has an RDMA adapter, and a UCX that drives it */
    uint32_t memory;          /* bits 1 << TM_MEMORY_*: what that UCX knows; adapters may take less */
    const char *about;        /* "UCX 1.19.0 (/...): rc_mlx5/mlx5_0:1, ..."; or what is missing */
    const char *why_no_device; /* why memory of devices is not moved, or was not last; until the next call */
} tm_adapters;

/* What TM_CARRIER_UCX has here. The first call looks for a library, as the first `tm_grant_export` and the first
 * `tm_attachment_open` do if the machine has adapters, and takes 10 to 500 ms then. */
int32_t tm_mover_get_adapters(tm_mover *mover, tm_adapters *adapters_out);

/* Readable when records of transfers are there. Owned by the mover. */
int32_t tm_mover_bell(tm_mover *mover);

/* ---- granting ---- */

typedef struct { uint8_t bytes[16]; } tm_secret;

typedef struct {
    uint32_t place;
    uint32_t generation;      /* not 0 */
    tm_secret secret;
} tm_grant;

#define TM_RIGHT_READ 1
#define TM_RIGHT_WRITE 2

#define TM_MEMORY_HOST 0
#define TM_MEMORY_CUDA 1      /* of a CUDA device: no processor looks at it, and TM_CARRIER_UCX alone carries it */

/* Grant access to `size` bytes at `bytes`, which stay there until the grant is dropped. `block`: the number of the
 * block that holds them, 0 for any other memory. `memory`: TM_MEMORY_*; that of a device is reached by what
 * `tm_grant_export` gives only. `grant` comes with the secret, and goes with place and generation. TM_ERR_LIMIT: no
 * place left. */
int32_t tm_grant_add(tm_mover *mover, uint8_t *bytes, uint64_t size, uint32_t rights, uint32_t block, uint32_t memory,
                     tm_grant *grant_io);

/* What the handle of a grant is to carry for processes that have an RDMA adapter: limit EXPORT_BYTES_MAX at most, 0 if
 * there is none here, or it takes no such memory. The first call for a grant registers its memory, which pins it.
 * TM_ERR_TOO_LARGE: above `max`. */
int32_t tm_grant_export(tm_mover *mover, const tm_grant *grant, uint8_t *bytes_out, uint32_t max, uint32_t *size_out);

/* Let nothing new begin. TM_OK: no access is open. TM_FULL: one is; ask again. Both as often as one likes. */
int32_t tm_grant_revoke(tm_mover *mover, const tm_grant *grant);

/* Forget a grant that was revoked. TM_FULL: an access is still open, so its place is never used again, and its memory,
 * if it is in no block, must stay there until this process ends. TM_ERR_STATE: it was not revoked. */
int32_t tm_grant_drop(tm_mover *mover, const tm_grant *grant);

typedef struct {
    uint8_t *bytes;           /* whole pages, zero when new; inherited by forked children, shared with them */
    uint64_t size;            /* at least what was asked for */
    uint32_t number, reserved; /* number: not 0 */
} tm_block;

/* Make memory that others can map, or take some that was given back (not zeroed again). TM_ERR_LIMIT: too many. */
int32_t tm_block_take(tm_mover *mover, uint64_t size, tm_block *block_out);

/* Give a block back, after all grants on it were dropped (else TM_ERR_STATE). If an access to one was still open, or
 * a forked child has it, it is never used again, and goes with its last mapping. */
int32_t tm_block_give_back(tm_mover *mover, uint32_t number);

/* ---- reaching ---- */

/* Attach to a process. Never fails for what the home says: see `tm_attachment_get_info`. TM_ERR_LIMIT: too many. */
int32_t tm_attachment_open(tm_mover *mover, const tm_home *home, uint32_t *attachment_out);

/* End an attachment; its transfers end with TM_ERR_CANCELLED, its views stay until they are closed. */
int32_t tm_attachment_close(tm_mover *mover, uint32_t attachment);

typedef struct {
    uint32_t carriers;        /* TM_CARRIER_* that work */
    uint32_t gone;            /* 1: the process has ended */
    const char *why_not;      /* "shm: ...; cma: ..." about the others */
} tm_attachment_info;

int32_t tm_attachment_get_info(tm_mover *mover, uint32_t attachment, tm_attachment_info *info_out);

#define TM_READ 1             /* theirs to ours */
#define TM_WRITE 2            /* ours to theirs */
#define TM_ADD 3              /* 8 bytes: add `operand`, the old value is the result */
#define TM_SWAP 4             /* 8 bytes: put `operand` if it equals `expected`, the old value is the result */

typedef struct {
    uint32_t attachment;
    uint32_t kind;            /* TM_READ .. TM_SWAP */
    tm_grant grant;
    uint64_t offset, size;    /* into the granted range */
    uint8_t *local;           /* must stay until the transfer has ended */
    uint64_t operand, expected;
    const uint8_t *exported;  /* what `tm_grant_export` gave there; must stay, too; NULL = not by TM_CARRIER_UCX */
    uint32_t exported_size;
    uint32_t carriers;        /* TM_CARRIER_* that may be used for it; the best of them is */
    uint32_t memory, reserved; /* TM_MEMORY_* that `local` is */
} tm_transfer;

typedef struct {
    uint64_t id;
    int32_t status;           /* TM_OK or an error: then the destination is undefined */
    uint32_t carrier;         /* TM_CARRIER_* that carried it */
    uint64_t value;           /* of TM_ADD and TM_SWAP */
} tm_done;

/* A transfer by tcp may also end with TM_ERR_PEER, or with what the system says of a connection that is lost or refused
 * (TM_ERR_ERRNO - ECONNRESET, ...): the process may have ended, or not. */

/* Begin a transfer. TM_OK: it has ended already, as `done_out` says, or was refused. TM_UNDER_WAY: `done_out->id` names
 * it. TM_FULL: TRANSFERS_MAX are under way. TM_ERR_ARGUMENT: no attachment, or 8 bytes to change are not aligned. */
int32_t tm_transfer_begin(tm_mover *mover, const tm_transfer *transfer, tm_done *done_out);

/* Have a transfer end soon, with TM_ERR_CANCELLED unless it was faster; its record follows all the same. */
int32_t tm_transfer_give_up(tm_mover *mover, uint64_t id);

/* Take the records of transfers that have ended; an empty bell is cleared. */
int32_t tm_mover_poll(tm_mover *mover, tm_done *done_out, uint32_t max, uint32_t *n_out);

typedef struct {
    uint8_t *bytes;           /* writable only if the view is; NULL after an error */
    uint64_t handle;
} tm_view;

/* Look at `size` bytes at `offset` of granted memory in a block of a process of this host, until `tm_view_close`; they
 * stay if it ends. `mode`: 0 = to be read, 1 = also written, 2 = read by the mapping of transfers, which stays, 3 = so,
 * and the grant is not in use. Fails as transfers do; TM_ERR_UNREACHABLE: it is no block, or not of this host. */
int32_t tm_view_open(tm_mover *mover, uint32_t attachment, const tm_grant *grant, uint64_t offset, uint64_t size,
                     uint32_t mode, tm_view *view_out);
int32_t tm_view_close(tm_mover *mover, uint64_t handle);

/* Copy rows of `size` bytes that do not overlap; `is_huge`: no cache holds all of which this is a part. Any thread. */
int32_t tm_copy_rows(uint8_t *into, uint64_t into_step, const uint8_t *from, uint64_t from_step, uint64_t size,
                     uint64_t rows, uint32_t is_huge);

/* Unmap a block (of its whole size), or a view with its own mapping, that has outlived its mover. By any thread. */
int32_t tm_unmap(uint8_t *bytes, uint64_t size);

/* ---- TLS between hosts ---- */

/* A session turns bytes of a connection into bytes of a peer that is known, and back. It has no socket and no clock:
 * the caller moves the bytes and says how much time has passed. One `tm_tls` and its sessions are used by one thread
 * at a time (a relay's takes some over); in a forked child each function gives TM_ERR_FORKED. */

typedef struct tm_tls tm_tls;
typedef struct tm_tls_session tm_tls_session;

/* Look for OpenSSL, once a process: a few milliseconds. TM_ERR_UNREACHABLE: there is none. `about_out` says which one,
 * or what is wrong with those that were looked at. The environment's TRIMESH_LIBSSL names another one. */
int32_t tm_tls_library(const char **about_out);

typedef struct {
    const uint8_t *chain;     /* own certificate in PEM, then those up to the authority; NULL = a client that joins */
    const uint8_t *key;       /* its key in PEM */
    const uint8_t *authority; /* who certifies peers, in PEM; NULL = whose key has the digest `pin` */
    uint32_t chain_size, key_size, authority_size;
    uint32_t takes_joins;     /* 1: as a server, let clients without a certificate come to their hello */
    uint32_t is_plain;        /* 1: no TLS, and nothing of the rest: who insists on that. Sessions then have no names */
    uint32_t reserved;
    uint8_t pin[32];          /* SHA-256 of SubjectPublicKeyInfo */
} tm_tls_options;

/* Read certificates and key; nothing is borrowed. TM_ERR_ARGUMENT: `why_out` says what is wrong, or is "". */
int32_t tm_tls_create(const tm_tls_options *options, tm_tls **tls_out, const char **why_out);

/* TM_ERR_STATE: it still has sessions. What a relay has taken over keeps what it needs. */
int32_t tm_tls_destroy(tm_tls *tls);

#define TM_TLS_MEMBER 1       /* has a certificate */
#define TM_TLS_JOIN 2         /* has a token */

/* What a server answers. */
#define TM_TLS_ADMITTED 1
#define TM_TLS_TOKEN 2        /* refused: an unknown, used or old token, or a wrong proof */
#define TM_TLS_VERSIONS 3     /* ... versions that do not work together */
#define TM_TLS_NAME 4         /* ... a name that is not expected */
#define TM_TLS_FULL 5         /* ... too many hosts */
#define TM_TLS_INCARNATION 6  /* ... an incarnation that is there already, or has ended */

/* What each side says first, in 256 bytes. Texts are printable and end by zeros. */
typedef struct {
    uint64_t incarnation;     /* 1 .. 2^63 - 1; the sender id of frames */
    uint64_t host;
    uint8_t mesh[16];
    uint8_t token[16];        /* of a join: which one, */
    uint8_t proof[32];        /* and what shows that it is known */
    uint32_t protocol;        /* version of frames */
    uint16_t kind;            /* TM_TLS_MEMBER, _JOIN */
    uint16_t verdict;         /* of an answer */
    char trimesh[32];         /* versions; "" = not loaded */
    char python[32];
    char torch[32];
} tm_tls_hello;

#define TM_TLS_CLIENT 0
#define TM_TLS_SERVER 1

typedef struct {
    uint64_t expected;        /* the incarnation that the certificate must be of; 0 = any */
    uint32_t role;            /* TM_TLS_CLIENT, _SERVER */
    uint32_t has_names;       /* 1: certificates carry names trimesh://MESH/INCARNATION; 0: other ones, which the caller
                                 checks before it answers */
    tm_tls_hello hello;       /* what we say; `token`, `proof` and `verdict` are set later */
} tm_tls_session_options;

/* Begin a session. TM_ERR_LIMIT: limit TLS_HALF_OPEN_MAX sessions of servers are not open yet. */
int32_t tm_tls_open(tm_tls *tls, const tm_tls_session_options *options, tm_tls_session **session_out);
int32_t tm_tls_free(tm_tls_session *session);

/* The caller's memory for one step (the first eight), and what became of it. */
typedef struct {
    const uint8_t *wire_in;   /* from the connection */
    uint64_t wire_in_size;
    uint8_t *wire_out;        /* to it */
    uint64_t wire_out_size;
    const uint8_t *plain_in;  /* to the peer */
    uint64_t plain_in_size;
    uint8_t *plain_out;       /* from the peer */
    uint64_t plain_out_size;
    uint64_t wire_taken;
    uint64_t wire_made;
    uint64_t plain_taken;
    uint64_t plain_made;
} tm_tls_io;

/* Take, make, encrypt and decrypt as much as there is and has room; what was not taken is offered again. Nothing of
 * `plain_in` is taken, and nothing of `plain_out` made, before TM_TLS_OPEN. The result is TM_OK or the failure that has
 * ended the session; what it still says to the peer (an alert) is made all the same. 16 KiB cost 10 us. */
int32_t tm_tls_step(tm_tls_session *session, tm_tls_io *io);

/* So much time has passed. Only sessions that are not open yet look at it. */
int32_t tm_tls_tick(tm_tls_session *session, uint32_t ms);

/* In TM_TLS_PROOF. */
int32_t tm_tls_prove(tm_tls_session *session, const uint8_t *token, const uint8_t *proof);

/* In TM_TLS_ASKING. Anything but TM_TLS_ADMITTED ends the session with TM_ERR_DENIED, after it was said. */
int32_t tm_tls_answer(tm_tls_session *session, uint32_t verdict);

/* Say that we send no more. The peer's end of it follows as TM_TLS_CLOSED. */
int32_t tm_tls_close(tm_tls_session *session);

/* The connection has ended. TM_ERR_TLS_CUT unless the peer had said so before. */
int32_t tm_tls_end(tm_tls_session *session);

#define TM_TLS_HANDSHAKE 1
#define TM_TLS_PROOF 2        /* a client that joins: `tm_tls_prove` is waited for */
#define TM_TLS_GREETING 3
#define TM_TLS_ASKING 4       /* a server: `tm_tls_answer` is waited for */
#define TM_TLS_OPEN 5
#define TM_TLS_CLOSING 6
#define TM_TLS_CLOSED 7
#define TM_TLS_FAILED 8

typedef struct {
    uint32_t state;
    int32_t status;
    const char *detail;       /* why it failed, or ""; valid until `tm_tls_free`, as is `name` */
    uint32_t is_certified;    /* the peer has shown a certificate, which was checked */
    uint32_t name_size;
    const char *name;         /* the name in it; not ended by a zero */
    uint8_t exporter[32];     /* known to the two ends of this session only; zeros before the handshake is done */
    tm_tls_hello peer;        /* its incarnation is 0 until the hello has come */
    uint32_t half_open;       /* sessions of servers that are not open yet, of the same `tm_tls` */
    uint32_t reserved;
} tm_tls_info;

int32_t tm_tls_get_info(tm_tls_session *session, tm_tls_info *info_out);

/* ---- sessions between hosts ---- */

/* A *relay* joins local stream sockets to *channels* of sessions with other hosts: one connection at a time, TLS in it,
 * that may break and come again (docs/design/hosts.md). A thread of the library (T3) moves the bytes. Functions that
 * take a relay are called by one thread at a time; none waits. Sockets are taken over on success only. */

typedef struct tm_relay tm_relay;

/* Make a relay and start T3; `destroy` joins it, and ends all sessions without a word. */
int32_t tm_relay_create(tm_relay **relay_out);
int32_t tm_relay_destroy(tm_relay *relay);

/* Readable when events are there. Owned by the relay. */
int32_t tm_relay_bell(tm_relay *relay);

/* Begin a session without a connection; its lease runs. `number`: of the session, of the side that has dialled, else 0.
 * `control`: the local end of channel 0. TM_ERR_LIMIT: limit HOST_SESSIONS_MAX. The handle is never valid again after
 * TM_RELAY_ABORT. */
int32_t tm_relay_begin(tm_relay *relay, uint64_t number, uint32_t lease_ms, int32_t control, uint32_t *session_out);

/* Use a new connection, in place of one that there may be: its socket, its session in TM_TLS_OPEN, which is taken over,
 * and what has come and was not taken yet, up to limit HOST_WIRE_BYTES each: encrypted and plain. */
int32_t tm_relay_attach(tm_relay *relay, uint32_t session, int32_t fd, tm_tls_session *tls, const uint8_t *wire,
                        uint32_t wire_size, const uint8_t *plain, uint32_t plain_size);

/* Join a socket to a new channel. TM_ERR_LIMIT: limit HOST_CHANNELS_MAX. TM_ERR_TOO_LARGE: HOST_PURPOSE_BYTES_MAX. */
int32_t tm_relay_open(tm_relay *relay, uint32_t session, int32_t fd, const uint8_t *purpose, uint32_t size,
                      uint32_t *channel_out);

/* Join a socket to a channel that the peer has opened, or (-1) refuse it. */
int32_t tm_relay_answer(tm_relay *relay, uint32_t session, uint32_t channel, int32_t fd);

#define TM_RELAY_DROP 1       /* close the connection, as if it had broken */
#define TM_RELAY_CLOSE 2      /* end the session behind what there is to read in local sockets now */
#define TM_RELAY_ABORT 3      /* end it at once, without an event; to be called also after TM_RELAY_DOWN */

int32_t tm_relay_end(tm_relay *relay, uint32_t session, uint32_t how);

#define TM_RELAY_OPENED 1     /* the peer has opened `channel`; `bytes`: its purpose */
#define TM_RELAY_RESUMED 2    /* the peer has taken the session up on connection `number`, counted from 1 */
#define TM_RELAY_INTERRUPTED 3 /* connection `number` is lost; `bytes`: why */
#define TM_RELAY_DOWN 4       /* over: `number` 1 lease, 2 the peer's end, 3 ours, 4 protocol; `bytes`: why */
#define TM_RELAY_ENDED 5      /* both directions of `channel` have ended, or it was reset */

typedef struct {
    uint32_t session;
    uint32_t kind;
    uint32_t channel;
    uint32_t number;
    uint32_t size;
    uint32_t reserved;
    const uint8_t *bytes;     /* valid until the next `tm_relay_poll` */
} tm_relay_event;

/* Take an event: 1, or 0 when there is none. */
int32_t tm_relay_poll(tm_relay *relay, tm_relay_event *event_out);

/* Connections, frames and bytes of channels sent and received, sent again, duplicates, bytes kept, open channels. */
typedef struct { uint64_t counts[9]; } tm_relay_counts;

int32_t tm_relay_get_counts(tm_relay *relay, uint32_t session, tm_relay_counts *counts_out);

/* cdef-end */

#endif
