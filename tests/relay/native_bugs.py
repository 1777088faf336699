"""Bugs that are planted in the native code of sessions between hosts, one at a time, and the test that finds each.

    python -m tests.relay.native_bugs            build each, and run its test with it; minutes
    python -m tests.relay.native_bugs LIST       these alone, by their names

A bug is a change of the text of one file. The tree is copied, changed and compiled; the test then runs with that
library (`TRIMESH_NATIVE_LIB`), or, where a bug shows by ticks and not by time, as a test of Zig.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import attrs

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = ROOT / "native" / "src"
SECONDS_MAX: Final = 300.0
"""For one test, with the compiler: what has not ended by then has found nothing."""

_SESSIONS: Final = "tests/relay/test_sessions.py::"
_TLS: Final = "tests/native/test_tls.py::test_tls_"
_FAILED: Final = 1
"""Exit code of pytest when a test has failed, and of Zig."""


@attrs.frozen
class Bug:
    """One planted bug.

    Attributes:
        text: What it is.
        file: Below native/src.
        right: What stands there, once.
        wrong: What stands there with the bug.
        test: That finds it: of pytest, or the name of one of Zig.
    """

    text: str
    file: str
    right: str
    wrong: str
    test: str

    @property
    def is_of_zig(self) -> bool:
        """Whether its test is one of Zig."""
        return "::" not in self.test

    def source(self) -> str:
        """Return the text of its file.

        Raises:
            ValueError: What it changes does not stand there once.
        """
        text = (SOURCES / self.file).read_text()
        if text.count(self.right) != 1:
            raise ValueError(f"'{self.right}' must stand once in {self.file}: {text.count(self.right)} times")
        return text


BUGS: Final = {
    "lost frame": Bug(
        "a resumption loses a frame",
        "relay/resend.zig",
        "        self.drop(ack);\n        self.rewind();",
        "        self.drop(@min(ack + 1, self.left));\n        self.rewind();",
        "nothing is lost, doubled or out of order over a thousand broken connections",
    ),
    "folded piece": Bug(
        "the last of the pieces that share a frame is dropped",
        "relay/machine.zig",
        "        const piece = frames.nextPiece(rest) orelse return null;\n        const header",
        "        const piece = frames.nextPiece(rest) orelse return null;\n"
        "        if (rest.len == 0) return null;\n        const header",
        "small pieces of several channels leave in one frame, and come each on its own",
    ),
    "doubled frame": Bug(
        "what a peer sends again after a resumption is taken again",
        "relay/machine.zig",
        "            self.duplicates += 1;\n            return .nothing;",
        "            self.duplicates += 1;\n            return self.takeNew(header, payload);",
        f"{_SESSIONS}test_frame_that_was_cut_comes_once_and_whole[native]",
    ),
    "stale session": Bug(
        "a session of the same host that is not this one is taken for it",
        "relay/machine.zig",
        "if (session == 0 or session != self.session)",
        "if (session == 0)",
        f"{_SESSIONS}test_session_that_is_not_this_one_is_refused[native-False]",
    ),
    "late lease": Bug(
        "a lease ends late",
        "relay/machine.zig",
        "if (self.silent_ticks < self.options.lease_ticks) return null;",
        "if (self.silent_ticks < self.options.lease_ticks + 5) return null;",
        "silence ends it, beats do not let it come to that",
    ),
    "unbound proof": Bug(
        "the proof of a token is worth something on another TLS session, so a token is shown twice",
        "tls/engine.zig",
        "return call.SSL_export_keying_material(self.ssl, into, into.len, label, label.len, null, 0, 0) == 1;",
        "_ = .{ label, call };\n        @memset(into, 7);\n        return true;",
        f"{_TLS}proof_of_a_token_is_of_one_session",
    ),
    "unchecked name": Bug(
        "the name in a certificate is not compared with the hello",
        "tls/session.zig",
        "if (!self.options.has_names or is_join) return true;",
        "if (is_join or hello.incarnation != 0) return true;",
        f"{_TLS}refuses_a_hello_of_another_incarnation_than_the_certificate",
    ),
    "recycled address": Bug(
        "a server is not asked whether it is the incarnation that is wanted",
        "tls/session.zig",
        "if (expected != 0 and name.incarnation != expected) {",
        "if (expected == 1 and name.incarnation != expected) {",
        f"{_TLS}refuses_a_server_of_another_incarnation_than_was_wanted",
    ),
    "half-open number": Bug(
        "half-open sessions are not bounded in number",
        "tls/session.zig",
        "        if (self.count >= limits.TLS_HALF_OPEN_MAX) return false;\n",
        "",
        f"{_TLS}half_open_sessions_are_bounded",
    ),
    "half-open bytes": Bug(
        "half-open sessions are not bounded in bytes",
        "tls/session.zig",
        "if (self.isHalfOpen() and self.wire.isOverdrawn()) {",
        "if (self.state == .closed and self.wire.isOverdrawn()) {",
        f"{_TLS}half_open_sessions_are_sent_no_more_than_64_kib",
    ),
    "half-open time": Bug(
        "half-open sessions are not bounded in time",
        "tls/session.zig",
        "if (self.age_ms < limits.TLS_HALF_OPEN_MS) return;",
        "if (self.age_ms < 2 * limits.TLS_HALF_OPEN_MS) return;",
        f"{_TLS}half_open_sessions_end_after_five_seconds",
    ),
    "leaked credit": Bug(
        "bytes that were taken give no credit back",
        "relay/machine.zig",
        "        one.consumed += bytes;\n",
        "        one.consumed += bytes / 2;\n",
        "a window that is used up holds one channel, not the others",
    ),
    "credit leaked by the relay": Bug(
        "bytes that a slow reader has taken give no credit back",
        "relay/peer.zig",
        "        self.waiting -= taken;\n        if (taken > 0) self.machine.consumed(index, taken);\n",
        "        self.waiting -= taken;\n",
        f"{_SESSIONS}test_slow_reader_gets_everything[native-native]",
    ),
    "unbounded credit": Bug(
        "a peer may have more under way than it was granted",
        "relay/machine.zig",
        'if (one.received > one.allowed) return self.violated("more bytes on a channel than it was granted");',
        "",
        f"{_SESSIONS}test_bytes_beyond_the_window_end_the_session[native]",
    ),
}


def is_found(bug: Bug, folder: Path) -> bool:
    """Plant a bug in a copy of the tree, and tell whether its test finds it.

    Args:
        bug: It.
        folder: Empty, for the copy and what is compiled.

    Raises:
        RuntimeError: It cannot be compiled, or the test says nothing of it.
    """
    return not _passes(bug, folder, bug.source().replace(bug.right, bug.wrong))


def passes_without(bug: Bug, folder: Path) -> bool:
    """Tell whether its test passes in a copy of the tree as it is; as `is_found`."""
    return _passes(bug, folder, bug.source())


def _passes(bug: Bug, folder: Path, text: str) -> bool:
    shutil.copytree(ROOT / "native", folder / "native")
    for name in ("build.zig", "build.zig.zon"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    (folder / "native" / "src" / bug.file).write_text(text)
    zig = [sys.executable, "-m", "ziglang"]
    if bug.is_of_zig:
        tested = _run([*zig, "test", "native/src/tests.zig", "-lc", "--test-filter", bug.test], folder)
        if f"{bug.test}..." not in tested.stdout:
            raise RuntimeError(f"the test has not run:\n{tested.stdout[-2000:]}")
        return tested.returncode == 0
    built = _run([*zig, "build", "-Doptimize=Debug", "--prefix", str(folder / "out")], folder)
    if built.returncode != 0:
        raise RuntimeError(f"it does not compile:\n{built.stdout[-2000:]}")
    library = str(folder / "out" / "lib" / "libtrimesh.so")
    command = [sys.executable, "-m", "pytest", bug.test, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tested = _run(command, ROOT, TRIMESH_NATIVE_LIB=library)
    if tested.returncode > _FAILED:  # below zero: an assertion of the library has ended it
        raise RuntimeError(f"pytest has ended with {tested.returncode}:\n{tested.stdout[-2000:]}")
    return tested.returncode == 0


def _run(command: list[str], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # Zig's cache knows files by their paths below the tree, so that of another tree has what was compiled before.
    caches = {
        "ZIG_LOCAL_CACHE_DIR": str(folder / ".zig-cache"),
        "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".zig-cache/global"),
    }
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **caches, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def main(names: list[str]) -> int:
    """Plant bugs, and print what has found each; return the exit status."""
    missed = 0
    for name in names or BUGS:
        bug = BUGS[name]
        with tempfile.TemporaryDirectory() as folder:
            found = is_found(bug, Path(folder))
        missed += not found
        print(f"{name}: {bug.text}: {f'found by {bug.test}' if found else 'NOT FOUND'}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
