//! What tests of sessions share: an engine without cryptography, and two sessions that are joined by their bytes.

const std = @import("std");
const hellos = @import("hello.zig");
const session = @import("session.zig");
const status = @import("../status.zig");
const Credentials = @import("credentials.zig").Options;
const Wire = @import("wire.zig").Wire;

/// Passes bytes on as they are, after one byte of a handshake each way. 0xFF stands for the end.
pub const OpenEngine = struct {
    /// What the peer's certificate says.
    peer_is: session.Peer = .{},
    has_said: bool = false,
    has_heard: bool = false,
    has_left: bool = false,
    /// Every write fails.
    is_broken: bool = false,

    /// Carry the handshake on.
    pub fn handshake(self: *OpenEngine, wire: *Wire) session.Outcome {
        if (!self.has_said and wire.push(&.{0x16}) == 0) return .full;
        self.has_said = true;
        var byte: [1]u8 = undefined;
        if (wire.pull(&byte) == 0) return .starved;
        self.has_heard = true;
        return .{ .moved = 0 };
    }

    /// As it comes.
    pub fn read(self: *OpenEngine, wire: *Wire, into: []u8) session.Outcome {
        if (self.has_left) return .closed;
        const n = wire.pull(into);
        if (n == 0) return .starved;
        if (std.mem.indexOfScalar(u8, into[0..n], 0xFF)) |end| {
            self.has_left = true;
            return if (end == 0) .closed else .{ .moved = end };
        }
        return .{ .moved = n };
    }

    /// As it is.
    pub fn write(self: *OpenEngine, wire: *Wire, from: []const u8) session.Outcome {
        if (self.is_broken) return .{ .failed = .{ .status = status.ERR_TLS, .words = "broken by a test" } };
        const n = wire.push(from);
        return if (n == 0) .full else .{ .moved = n };
    }

    /// Say that nothing follows.
    pub fn shut(_: *OpenEngine, wire: *Wire) void {
        _ = wire.push(&.{0xFF});
    }

    /// What the test has said.
    pub fn peer(self: *OpenEngine) session.Peer {
        return self.peer_is;
    }

    /// Nothing is held.
    pub fn deinit(_: *OpenEngine) void {}
};

pub const MESH: [16]u8 = @splat(0xAB);
pub const MESH_NAME = "trimesh://" ++ "ab" ** 16 ++ "/";
pub const SERVER_NAME = MESH_NAME ++ "0000000000000001";
pub const CLIENT_NAME = MESH_NAME ++ "0000000000000002";

/// The hello of an incarnation.
pub fn helloOf(incarnation: u64) hellos.Hello {
    return .{ .incarnation = incarnation, .mesh = MESH };
}

/// Two sessions, and the bytes between them.
pub fn Pair(comptime Session: type) type {
    return struct {
        client: *Session,
        server: *Session,
        /// What is under way in each direction.
        up: std.ArrayListUnmanaged(u8) = .empty,
        down: std.ArrayListUnmanaged(u8) = .empty,
        /// What each has received.
        at_client: std.ArrayListUnmanaged(u8) = .empty,
        at_server: std.ArrayListUnmanaged(u8) = .empty,
        /// Bytes that either has taken or made.
        moved: u64 = 0,

        const Self = @This();

        /// Give back what was under way.
        pub fn deinit(self: *Self) void {
            for ([_]*std.ArrayListUnmanaged(u8){ &self.up, &self.down, &self.at_client, &self.at_server }) |list| {
                list.deinit(std.testing.allocator);
            }
        }

        /// One step of the client, which may have something to say; how much of it was taken.
        pub fn turnClient(self: *Self, plain: []const u8, room: usize) !usize {
            return self.turn(self.client, &self.down, &self.up, &self.at_client, plain, room);
        }

        /// The same of the server.
        pub fn turnServer(self: *Self, plain: []const u8, room: usize) !usize {
            return self.turn(self.server, &self.up, &self.down, &self.at_server, plain, room);
        }

        /// Steps of both without anything to say, until nothing moves.
        pub fn settle(self: *Self, room: usize) !void {
            for (0..10_000) |_| {
                const before = self.moved;
                _ = try self.turnClient("", room);
                _ = try self.turnServer("", room);
                if (self.moved == before) return;
            }
            return error.NeverSettles;
        }

        fn turn(
            self: *Self,
            one: *Session,
            from: *std.ArrayListUnmanaged(u8),
            to: *std.ArrayListUnmanaged(u8),
            got: *std.ArrayListUnmanaged(u8),
            plain: []const u8,
            room: usize,
        ) !usize {
            var wire_out: [1 << 17]u8 = undefined;
            var plain_out: [1 << 16]u8 = undefined;
            var io = session.Io{
                .wire_in = from.items.ptr,
                .wire_in_size = @min(from.items.len, room),
                .wire_out = &wire_out,
                .wire_out_size = @min(wire_out.len, room),
                .plain_in = plain.ptr,
                .plain_in_size = plain.len,
                .plain_out = &plain_out,
                .plain_out_size = plain_out.len,
            };
            one.step(&io);
            self.moved += io.wire_taken + io.wire_made;
            from.replaceRangeAssumeCapacity(0, @intCast(io.wire_taken), &.{});
            try to.appendSlice(std.testing.allocator, wire_out[0..@intCast(io.wire_made)]);
            try got.appendSlice(std.testing.allocator, plain_out[0..@intCast(io.plain_made)]);
            return @intCast(io.plain_taken);
        }
    };
}

// Made for these tests, valid until 2126: of an authority whose key is gone, for incarnations 1 and 2 of `MESH`.

const AUTHORITY =
    \\-----BEGIN CERTIFICATE-----
    \\MIIBSDCB8KADAgECAhRt4bzKLX1e3AOS62c0cD6Oh4+w9jAKBggqhkjOPQQDAjAY
    \\MRYwFAYDVQQDDA10cmltZXNoIHRlc3RzMCAXDTI2MDEwMTAwMDAwMFoYDzIxMjYw
    \\MTAxMDAwMDAwWjAYMRYwFAYDVQQDDA10cmltZXNoIHRlc3RzMFkwEwYHKoZIzj0C
    \\AQYIKoZIzj0DAQcDQgAEJzGi2lwfhBb603H9lNsAwv1tRpffz5Novb70LNdkFVpW
    \\Y53saXy4zHP8hjPhhuwK8GVrA58D3pMDPKYIE9VZ6KMWMBQwEgYDVR0TAQH/BAgw
    \\BgEB/wIBADAKBggqhkjOPQQDAgNHADBEAiByg34k9v5/sGQu3c+CMhlszyWj2q5p
    \\YMg5ysenGPn9SwIgTH92j9VIcCObQmqIQyDnndXIsMzqWN3I8OGvRmW/7ro=
    \\-----END CERTIFICATE-----
    \\
;

const SERVER_CERTIFICATE =
    \\-----BEGIN CERTIFICATE-----
    \\MIIBljCCATygAwIBAgIUSmTpR/+0Rtqfd3Yy6yog8dzod90wCgYIKoZIzj0EAwIw
    \\GDEWMBQGA1UEAwwNdHJpbWVzaCB0ZXN0czAgFw0yNjAxMDEwMDAwMDBaGA8yMTI2
    \\MDEwMTAwMDAwMFowADBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLG/xQrPyD0W
    \\mtZzTJdmzmVkdJl+Q7XLA37e9y3vGS8xmQnRIODXKOuc0VaPbwdoxMAJpkixrZos
    \\aiqsOAfcJiSjejB4MEkGA1UdEQEB/wQ/MD2GO3RyaW1lc2g6Ly9hYmFiYWJhYmFi
    \\YWJhYmFiYWJhYmFiYWJhYmFiYWJhYi8wMDAwMDAwMDAwMDAwMDAxMAwGA1UdEwEB
    \\/wQCMAAwHQYDVR0lBBYwFAYIKwYBBQUHAwIGCCsGAQUFBwMBMAoGCCqGSM49BAMC
    \\A0gAMEUCIQDcrwOCB9Ls/b9PnGOXfdaAg/H5Itlx2cw86GGneV7y8QIgZbyyAnBv
    \\7hvCj/V8RLxZzF0L9R7cbyW17eCjvegor0U=
    \\-----END CERTIFICATE-----
    \\
;

const SERVER_KEY =
    \\-----BEGIN PRIVATE KEY-----
    \\MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg/1VK+AkFUYjrHCUW
    \\SFyvXUouhiCnOlDDlvvlAbRN+b6hRANCAASxv8UKz8g9FprWc0yXZs5lZHSZfkO1
    \\ywN+3vct7xkvMZkJ0SDg1yjrnNFWj28HaMTACaZIsa2aLGoqrDgH3CYk
    \\-----END PRIVATE KEY-----
    \\
;

const CLIENT_CERTIFICATE =
    \\-----BEGIN CERTIFICATE-----
    \\MIIBlTCCATygAwIBAgIUbkpG87VxZCriLErE+/cunQhSFPQwCgYIKoZIzj0EAwIw
    \\GDEWMBQGA1UEAwwNdHJpbWVzaCB0ZXN0czAgFw0yNjAxMDEwMDAwMDBaGA8yMTI2
    \\MDEwMTAwMDAwMFowADBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABHCZStIeWELp
    \\+/aF4ce2ZUhqHSL62woTXutrmMjaPSf/PAOQYWlRfKrOybn70mNK3wGoPhWXw6K4
    \\Hyvp2Ka5aWWjejB4MEkGA1UdEQEB/wQ/MD2GO3RyaW1lc2g6Ly9hYmFiYWJhYmFi
    \\YWJhYmFiYWJhYmFiYWJhYmFiYWJhYi8wMDAwMDAwMDAwMDAwMDAyMAwGA1UdEwEB
    \\/wQCMAAwHQYDVR0lBBYwFAYIKwYBBQUHAwIGCCsGAQUFBwMBMAoGCCqGSM49BAMC
    \\A0cAMEQCIAwSUie6zmBCLzrNR76EvLVHECq83lA+n8pNzQFeVuPuAiB25aEBTKTg
    \\eA+b9LTK5EbAJbYHoN/a4lfiIEJDQhAyTw==
    \\-----END CERTIFICATE-----
    \\
;

const CLIENT_KEY =
    \\-----BEGIN PRIVATE KEY-----
    \\MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgZ51fMlcIIsqNHpBj
    \\z4Ut9dbkra5/ybmthdanfIIFAKihRANCAARwmUrSHlhC6fv2heHHtmVIah0i+tsK
    \\E17ra5jI2j0n/zwDkGFpUXyqzsm5+9JjSt8BqD4Vl8OiuB8r6dimuWll
    \\-----END PRIVATE KEY-----
    \\
;

const PIN = "9536ec95ca45acfd3d9817f54b8c497e6ebbfe7a012101d15f414925d121de63";

pub const SERVER_OPTIONS = Credentials{
    .chain = SERVER_CERTIFICATE ++ AUTHORITY,
    .key = SERVER_KEY,
    .authority = AUTHORITY,
    .takes_joins = true,
};

pub const CLIENT_OPTIONS = Credentials{ .chain = CLIENT_CERTIFICATE, .key = CLIENT_KEY, .authority = AUTHORITY };

/// A client that joins: it knows the digest of the authority's key and no more.
pub fn joining() Credentials {
    var options = Credentials{};
    _ = std.fmt.hexToBytes(&options.pin, PIN) catch unreachable;
    return options;
}
