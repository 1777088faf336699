//! Statuses of `trimesh.h`. Append only.

pub const OK: i32 = 0;
pub const FULL: i32 = 1;
pub const UNDER_WAY: i32 = 2;
pub const ERR_ARGUMENT: i32 = -1;
pub const ERR_LINK: i32 = -2;
pub const ERR_DOWN: i32 = -3;
pub const ERR_LIMIT: i32 = -4;
pub const ERR_FORKED: i32 = -5;
pub const ERR_STATE: i32 = -6;
pub const ERR_TOO_LARGE: i32 = -7;
pub const ERR_THREAD: i32 = -8;
pub const ERR_PEER: i32 = -9;
pub const ERR_GONE: i32 = -10;
pub const ERR_REVOKED: i32 = -11;
pub const ERR_DENIED: i32 = -12;
pub const ERR_UNREACHABLE: i32 = -13;
pub const ERR_SILENT: i32 = -14;
pub const ERR_CANCELLED: i32 = -15;
pub const ERR_TLS: i32 = -16;
pub const ERR_TLS_PLAINTEXT: i32 = -17;
pub const ERR_TLS_VERSION: i32 = -18;
pub const ERR_TLS_CERTIFICATE: i32 = -19;
pub const ERR_TLS_NAME: i32 = -20;
pub const ERR_TLS_REFUSED: i32 = -21;
pub const ERR_TLS_LATE: i32 = -22;
pub const ERR_TLS_CUT: i32 = -23;
pub const ERR_DEVICE: i32 = -24;
pub const ERR_ERRNO: i32 = -1000;

/// The status of a system call that gave -errno.
pub fn ofErrno(rc: i32) i32 {
    return ERR_ERRNO + rc;
}
