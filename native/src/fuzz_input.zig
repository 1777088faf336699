//! The numbers that a fuzz target asks for: chosen by the fuzzer, which sees what they lead to, where the build has
//! one (`zig build fuzz`), else drawn at random from a fixed seed, so that each run of the unit tests feeds every
//! target, too, without the minute that the instrumented build takes.

const builtin = @import("builtin");
const std = @import("std");

/// Of each target in unit tests: three seconds for all targets together, in Debug.
const INPUTS = 1000;

/// Feed `target` inputs until one fails.
pub fn feed(comptime target: fn (void, *Smith) anyerror!void) !void {
    try std.testing.fuzz({}, struct {
        fn one(_: void, chosen: *std.testing.Smith) !void {
            if (!builtin.fuzz) return feedRandom(target);
            var smith = Smith{ .source = chosen };
            try target({}, &smith);
        }
    }.one, .{});
}

fn feedRandom(comptime target: fn (void, *Smith) anyerror!void) !void {
    for (0..INPUTS) |seed| {
        var generator = std.Random.DefaultPrng.init(seed);
        var smith = Smith{ .source = if (builtin.fuzz) unreachable else generator.random() };
        target({}, &smith) catch |err| {
            std.debug.print("the input of seed {d} fails\n", .{seed});
            return err;
        };
    }
}

/// Methods are inlined because the fuzzer tells the questions of a target apart by the address that asks.
pub const Smith = struct {
    source: if (builtin.fuzz) *std.testing.Smith else std.Random,

    /// Any value of an integer or bool.
    pub inline fn value(smith: *Smith, comptime T: type) T {
        if (builtin.fuzz) return smith.source.value(T);
        return if (T == bool) smith.source.boolean() else smith.source.int(T);
    }

    /// A number of a range, both ends included.
    pub inline fn valueRangeAtMost(smith: *Smith, comptime T: type, at_least: T, at_most: T) T {
        if (builtin.fuzz) return smith.source.valueRangeAtMost(T, at_least, at_most);
        return smith.source.intRangeAtMost(T, at_least, at_most);
    }

    /// True as often as the weights say.
    pub inline fn boolWeighted(smith: *Smith, false_weight: u64, true_weight: u64) bool {
        if (builtin.fuzz) return smith.source.boolWeighted(false_weight, true_weight);
        return smith.source.uintLessThan(u64, false_weight + true_weight) >= false_weight;
    }

    /// A place in something so long.
    pub inline fn index(smith: *Smith, len: usize) usize {
        if (builtin.fuzz) return smith.source.index(len);
        return smith.source.uintLessThan(usize, len);
    }

    /// Fill `out` with any bytes.
    pub inline fn bytes(smith: *Smith, out: []u8) void {
        if (builtin.fuzz) return smith.source.bytes(out);
        smith.source.bytes(out);
    }

    /// Return whether the input ends here.
    pub inline fn eos(smith: *Smith) bool {
        if (builtin.fuzz) return smith.source.eos();
        return smith.source.uintLessThan(u8, 16) == 0;
    }
};
