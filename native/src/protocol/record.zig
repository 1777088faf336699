//! The words in which links speak: to T0 by records, T1 to T0 by signals. PURE.

pub const Kind = enum(u32) { local = 1, stream = 2 };

pub const State = enum(u32) { free, greeting, up, closing, down, zombie };

pub const Down = enum(u32) { none = 0, closed = 1, eof = 2, exited = 3, lease = 4, protocol = 5 };

/// What T1 has found out.
pub const Signal = struct {
    /// The socket of a local link can be read: the hello, or a part of it.
    pub const READABLE: u32 = 1;
    pub const EOF: u32 = 2;
    pub const EXITED: u32 = 4;
    pub const LEASE: u32 = 8;
    pub const PROTOCOL: u32 = 16;
    pub const NO_HELLO: u32 = 32;
    pub const TORN: u32 = 64;
    pub const DOWN = EOF | EXITED | LEASE | PROTOCOL | NO_HELLO;
};

pub const RecordKind = enum(u16) { message = 1, fragment = 2, up = 3, space = 4, down = 5, stalled = 6 };

pub const Record = extern struct {
    link: u32,
    kind: u16,
    n_bodies: u16 = 0,
    flags: u32 = 0,
    head_offset: u32 = 0,
    head_size: u32 = 0,
    sizes_offset: u32 = 0,
    body_offset: u32 = 0,
    body_size: u32 = 0,
};

pub const FLAG_MORE = 1;
pub const FLAG_CONTROL = 2;
pub const FLAG_CHUNK = 4;
