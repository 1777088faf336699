"""Run a command on a machine that has an RDMA adapter, without having one: `make test-verbs`.

    python -m tests.verbs                    the RDMA tests
    python -m tests.verbs -- ibv_devinfo     any other command

A Debian kernel boots in QEMU, emulated, with this machine's own root (read-only; what is written there is thrown away),
and drives an adapter in software (rdma_rxe). Emulator, kernel and libraries are Debian packages that are unpacked below
`.cache/verbs`, not installed. Where they cannot be had, a line that begins with SKIPPED says why, and the exit status
is 0; else it is the command's.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path

from tests.verbs.guest import Guest
from tests.verbs.packages import PackageTree, UnavailableError

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "verbs"

SECONDS_MAX = 600
"""Of one run: 150 s where the machine is idle, three times that beside other work; what is emulated is slow."""

TESTS = ("tests/native/test_mover_ucx.py", "tests/rdma/test_adapters.py")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.verbs")
    parser.add_argument("--fetch-only", action="store_true", help="get the packages, and boot nothing")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS_MAX, help="end it after so long (default: %(default)s)"
    )
    parser.add_argument("command", nargs="*", help="what to run there, after `--` (default: the RDMA tests)")
    return parser.parse_args()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the machine is ended, too
    options = arguments()
    try:
        tree = PackageTree(CACHE)
        tree.fetch()
    except UnavailableError as error:
        print(f"SKIPPED: no machine with RDMA verbs here: {error}")
        return 0
    if options.fetch_only:
        return 0
    tests = shlex.join(
        [sys.executable, "-m", "pytest", "-q", "--color=no", "-n", "0", "-p", "no:cacheprovider", *TESTS]
    )
    command = shlex.join(options.command) if options.command else f"tests/verbs/pingpong.sh && {tests}"
    return Guest(tree, ROOT).run(command, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
