//! Builds libtrimesh. `python -m ziglang build --help` lists the steps:
//!   install (default)   lib/libtrimesh.so and include/trimesh.h below --prefix
//!   dev                 the same two into src/trimesh/_native, where the source tree looks for them
//!   test                unit tests; with -Dsanitize-thread under ThreadSanitizer
//!   fuzz                unit tests that take fuzzed input; with --fuzz=100K or --fuzz=forever. Compiled twice: with
//!                       -Doptimize=Debug in a third of the time, which pays for few inputs
const std = @import("std");
const builtin = @import("builtin");

/// Zig changes under one's feet before 1.0: one version, the one of the `ziglang` wheel in pyproject.toml.
const zig_version = "0.16.0";

comptime {
    if (!std.mem.eql(u8, builtin.zig_version_string, zig_version)) {
        @compileError("trimesh builds with Zig " ++ zig_version ++ " only, this is " ++ builtin.zig_version_string ++
            "; install it with: pip install ziglang==" ++ zig_version);
    }
}

pub fn build(b: *std.Build) void {
    const target = b.standardTargetOptions(.{});
    // ReleaseSafe unless asked otherwise: the checks stay in what people run, and cost little here.
    const asked = b.option(std.builtin.OptimizeMode, "optimize", "Debug, ReleaseSafe (default), ReleaseFast");
    const optimize = asked orelse .ReleaseSafe;

    const library = b.addLibrary(.{
        .name = "trimesh",
        .linkage = .dynamic,
        .root_module = b.createModule(.{
            .root_source_file = b.path("native/src/library.zig"),
            .target = target,
            .optimize = optimize,
            .link_libc = true,
            .pic = true,
            .strip = optimize != .Debug,
        }),
    });
    const header = b.path("native/include/trimesh.h");
    library.installHeader(header, "trimesh.h");
    b.installArtifact(library);

    const copy = b.addUpdateSourceFiles();
    copy.addCopyFileToSource(library.getEmittedBin(), "src/trimesh/_native/libtrimesh.so");
    copy.addCopyFileToSource(header, "src/trimesh/_native/trimesh.h");
    b.step("dev", "Put the library and its header into the source tree").dependOn(&copy.step);

    const races = b.option(bool, "sanitize-thread", "Run the unit tests under ThreadSanitizer") orelse false;
    const tests = b.addTest(.{
        .root_module = b.createModule(.{
            .root_source_file = b.path("native/src/tests.zig"),
            .target = target,
            .optimize = .Debug,
            .link_libc = true,
            .sanitize_thread = races,
        }),
        .use_llvm = if (races) true else null, // the other back end ignores the sanitizer without a word
    });
    b.step("test", "Run the unit tests").dependOn(&b.addRunArtifact(tests).step);

    const fuzz = b.addTest(.{
        .name = "fuzz",
        .root_module = b.createModule(.{
            .root_source_file = b.path("native/src/fuzz.zig"),
            .target = target,
            .optimize = optimize,
            .link_libc = true,
            .error_tracing = false, // what runs fuzzed tests does not compile with it
        }),
        .use_llvm = true, // the other back end does not instrument
    });
    b.step("fuzz", "Feed the decoders; with --fuzz=100K that many inputs").dependOn(&b.addRunArtifact(fuzz).step);
}
