"""A run of the bundle on a GPU machine: facts, then tests, then figures, within some minutes; `cuda.sh` starts it.

Whatever is found is in `results.json` at once, so that a run that is cut leaves what it has. `failures.log` has what is
needed to mend a failure from afar.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

from tests.cuda import machine, outcomes

PASSED, FAILED, REFUSED = 0, 1, 3
"""Exit statuses."""
USAGE_ERROR, NONE_SELECTED = 4, 5
"""Of pytest: it does not know what is named, all was deselected."""
GROUPS: Final = {
    "buffers": r"tests/rdma/test_cuda\.py::(?!.*publication)",
    "one-sided": r"tests/rdma/test_devices\.py::test_matrices",
    "publications": r"tests/(rdma|tensor)/.*(publication|follows|reader_cuts)",
    "groups": r"tests/tensor/.*(collectives|test_group_)",
    "tensor engine": r"tests/tensor/(test_cuda\.py|.*(operators|remote_function|actor_and_rank))(?!.*recorded)",
    "recordings": r"tests/tensor/.*recorded",
    "modules": r"tests/tensor/",
    "data": r"tests/data/",
    "values": r"tests/runtime/",
    "programs": r"tests/examples/",
    "others": r"",
}
"""Tests in the order in which they run, by a pattern of their node ids: first what all else needs."""
SHARE_OF_TESTS: Final = 0.6
FACTS_SECONDS: Final = 70.0
GROUP_SECONDS_MIN: Final = 20.0
START_SECONDS: Final = 90.0
"""Until the first test begins."""
TEST_SECONDS: Final = 40.0
STALL_SECONDS: Final = 50.0
"""Without a word of a test, after which its process is taken to hang: more than pytest's own limit for a test."""
PART_SECONDS: Final = 60.0
"""Of each part of the figures at least, if there is time."""
END_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.2
FILE_BYTES_MAX: Final = 12 << 20
PLUGINS: Final = ("pytest_trio.plugin", "pytest_timeout", "tests.cuda.outcomes")


def group_of(test: str) -> str:
    """Return the name of the group that a test belongs to."""
    return next(name for name, pattern in GROUPS.items() if re.match(pattern, test))


class Results:
    """Everything that a run has found, in memory and in `results.json`."""

    def __init__(self, out: Path, bundle: dict[str, Any], minutes: float, patience: float) -> None:
        self.out = out
        self.patience = patience
        self.began = time.monotonic()
        self.deadline = self.began + 60 * minutes - END_SECONDS
        self.machine: dict[str, Any] = {}
        self.tests: dict[str, dict[str, Any]] = {}
        self.figures: list[dict[str, Any]] = []
        self.parts: dict[str, str] = {}
        self.broken: list[str] = []
        self.bundle = bundle
        self.status = "running"

    def left(self) -> float:
        """Return how many seconds there are."""
        return self.deadline - time.monotonic()

    def test(self, name: str) -> dict[str, Any]:
        """Return what there is of a test, or of a file that cannot be collected."""
        return self.tests.setdefault(name, {"outcome": "not run", "group": group_of(name)})

    def failed(self) -> list[str]:
        """Return the tests and parts of figures that have failed."""
        tests = [test for test, one in self.tests.items() if one["outcome"] not in ("passed", "skipped", "not run")]
        parts = [f"figures {part}" for part, state in self.parts.items() if state != "done"]
        return [*tests, *parts, *(f"cuda.sh: {name}" for name in self.broken)]

    def write(self) -> None:
        """Write all in one step."""
        counts: dict[str, int] = {}
        for one in self.tests.values():
            counts[one["outcome"]] = counts.get(one["outcome"], 0) + 1
        found = {
            "status": self.status,
            "seconds": round(time.monotonic() - self.began, 1),
            "counts": counts,
            "failed": self.failed(),
            "figures": self.figures,
            "parts": self.parts,
            "tests": {
                test: {key: one[key] for key in ("outcome", "group", "seconds", "reason") if key in one}
                for test, one in self.tests.items()
            },
            "bundle": {key: value for key, value in self.bundle.items() if key != "tests"},
            "machine": self.machine,
        }
        temporary = self.out / ".results.json"
        temporary.write_text(json.dumps(found, indent=1))
        temporary.replace(self.out / "results.json")

    def note(self, title: str, text: str) -> None:
        """Add to `failures.log`, which stays small enough to be sent."""
        file = self.out / "failures.log"
        if not file.exists() or file.stat().st_size < FILE_BYTES_MAX:
            with file.open("a") as log:
                log.write(f"\n{'=' * 100}\n{title}\n{'=' * 100}\n{text[-FILE_BYTES_MAX // 8 :]}\n")


# ---- processes -------------------------------------------------------------------------------------------------------


class Child:
    """A process group of ours, whose output is added to a log."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self._log = log.open("ab")
        self._log.write(f"\n$ {shlex.join(command)[:2000]}\n".encode())
        self._log.flush()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )

    def end(self) -> None:
        """Let it write where it is (faulthandler does at SIGABRT), then kill it and all that it has started."""
        for number in (signal.SIGABRT, signal.SIGKILL):
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
                try:
                    self.process.wait(END_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        self._log.close()


class Lines:
    """Lines of JSON that another process adds to a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, 0
        file.write_text("")

    def new(self) -> list[dict[str, Any]]:
        """Return what was added since the last time."""
        with self._file.open() as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind("\n") + 1]
        self._at += len(whole.encode())
        return [json.loads(line) for line in whole.splitlines()]


# ---- facts -----------------------------------------------------------------------------------------------------------


def find_facts(results: Results, work: Path) -> None:
    """Find what is here, in a process of its own: a broken driver may hang."""
    file = work / "machine.json"
    child = Child([sys.executable, "-m", "tests.cuda.machine", str(file)], results.out / "machine.txt")
    try:
        child.process.wait(min(FACTS_SECONDS * results.patience, results.left()))
    except subprocess.TimeoutExpired:
        results.note("facts", "the machine did not answer in time; see machine.txt")
    child.end()
    if file.exists():
        results.machine = json.loads(file.read_text())
    print((results.out / "machine.txt").read_text(), flush=True)
    system = results.machine.get("system")
    if isinstance(system, dict) and "lo" not in system["networks_that_are_up"]:
        print("the loopback interface is down, and gloo needs it: as root, `ip link set lo up`", flush=True)
    results.write()


def sees_a_device(results: Results) -> bool:
    """Return whether torch has found a device."""
    found = results.machine.get("torch")
    return isinstance(found, dict) and bool(found.get("sees_a_device"))


# ---- tests -----------------------------------------------------------------------------------------------------------


def run_all_tests(results: Results, work: Path, only: str) -> None:
    """Run tests in the order of their groups, in one process as long as none hangs and no group takes too long."""
    order = list(GROUPS)
    found = [test for test in results.bundle["tests"] if re.search(only, test)]
    tests = sorted(found, key=lambda test: order.index(group_of(test)))
    results.tests = {test: {"outcome": "not run", "group": group_of(test)} for test in tests}
    until = time.monotonic() + SHARE_OF_TESTS * max(results.left(), 0)
    while tests and until - time.monotonic() > 1:
        run = TestRun(results, tests, work, until)
        run.follow()
        rest = [test for test in tests if results.tests[test]["outcome"] == "not run"]
        rest = [test for test in rest if results.tests[test]["group"] != run.late_group]
        if len(rest) == len(tests):
            if run.has_found_none:  # an id is another one here
                TestRun(results, list(dict.fromkeys(test.partition("::")[0] for test in tests)), work, until).follow()
            break
        tests = rest
    for group in order:
        shown = [one["outcome"] for one in results.tests.values() if one["group"] == group]
        if shown:
            print(f"{group}: " + ", ".join(f"{shown.count(one)} {one}" for one in sorted(set(shown))), flush=True)


class TestRun:
    """One process of pytest, followed by the lines that its plugin writes.

    Args:
        results: Where outcomes go.
        tests: Node ids, in the order in which they run; or files of tests.
        work: A folder of ours.
        until: When all tests have to be over.

    Attributes:
        late_group: Of tests that has had more than its share of the time; "" for none.
        has_found_none: Whether pytest does not know one of the ids, and so has run none.
    """

    __test__ = False

    def __init__(self, results: Results, tests: list[str], work: Path, until: float) -> None:
        self._results, self._until = results, until
        self._lines = Lines(work / "outcomes")
        self.late_group = ""
        self.has_found_none = False
        self._running = self._group = ""
        self._group_until = until
        self._heard = time.monotonic()
        self._patience = START_SECONDS * results.patience
        (work / "tests").write_text("\n".join(tests))
        options = [option for plugin in PLUGINS for option in ("-p", plugin)]
        options += [
            "-m",
            "cuda",
            "-p",
            "no:cacheprovider",
            "-v",
            "--tb=long",
            f"--timeout={TEST_SECONDS * results.patience}",
        ]
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, f"@{work / 'tests'}"]
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", outcomes.FILE: str(work / "outcomes")}
        self._child = Child(command, results.out / "tests.log", **environment)

    def follow(self) -> None:
        """Take in outcomes until the process is over, a test of it hangs, or time is up."""
        why = ""
        try:
            while not why:
                is_over = self._child.process.poll() is not None
                for line in self._lines.new():
                    self._take(line)
                why = "died" if is_over else self._why_not_on()
                if not why:
                    time.sleep(POLL_SECONDS)
        finally:
            self._child.end()
        self._conclude(why)

    def _take(self, line: dict[str, Any]) -> None:
        self._heard, self._patience = time.monotonic(), STALL_SECONDS * self._results.patience
        if line["outcome"] == "running":
            self._running = line["test"]
            self._enter(self._results.test(line["test"])["group"])
        elif line["outcome"] == "over":
            self._running = ""
        else:
            take_outcome(self._results, line)

    def _enter(self, group: str) -> None:
        """Give a group twice the share of the time that its tests have among those to come, which may need less."""
        if group != self._group:
            self._group = group
            pending = [one["group"] for one in self._results.tests.values() if one["outcome"] == "not run"]
            share = 2 * (self._until - time.monotonic()) * pending.count(group) / len(pending)
            self._group_until = min(self._until, time.monotonic() + max(share, GROUP_SECONDS_MIN))

    def _why_not_on(self) -> str:
        """Return why the process has to be ended, "" if it has not."""
        now = time.monotonic()
        if now - self._heard > self._patience:
            return "hung"
        if now > self._group_until:
            self.late_group = self._group
            return "cut"
        return ""

    def _conclude(self, why: str) -> None:
        """Say what has become of the test that ran last, or why none has run."""
        results, status = self._results, self._child.process.returncode
        log = tail_of(results.out / "tests.log")
        if self._running and results.tests[self._running]["outcome"] == "not run":
            results.tests[self._running] |= {"outcome": why, "seconds": round(time.monotonic() - self._heard, 1)}
            text = f"pytest ended with {status}; here are the stacks of its threads, if it could write them\n{log}"
            tell_failure(results, self._running, why, text, [])
        elif status not in (0, 1, NONE_SELECTED):
            self.has_found_none = status == USAGE_ERROR
            if not self.has_found_none:
                results.broken.append(f"pytest ended with {status} ({why})")
            results.note(f"pytest ended with {status} outside of a test: {why}", log)
        results.write()


def take_outcome(results: Results, line: dict[str, Any]) -> None:
    """Take in what the plugin has written about a test."""
    if line["outcome"] in ("running", "over"):
        return
    if line["outcome"] == "skipped" and line["phase"] == "collection":
        skip_file(results, line["test"], line["text"])
        return
    one = results.test(line["test"])
    if one["outcome"] != "failed":  # by an earlier phase
        one |= {"outcome": line["outcome"], "seconds": line.get("seconds", 0.0)}
    if line["outcome"] == "skipped":
        one["reason"] = line["text"]
    if line["outcome"] == "failed":
        one["reason"] = line["text"].strip().splitlines()[-1][:300] if line["text"].strip() else ""
        tell_failure(results, line["test"], f"failed in {line['phase']}", line["text"], line.get("captured", []))
    results.write()


def skip_file(results: Results, file: str, reason: str) -> None:
    """Skip the tests of a file that needs what is not here; pytest does not know them then."""
    for test, one in results.tests.items():
        if test.startswith(f"{file}::"):
            one |= {"outcome": "skipped", "reason": reason}


def tell_failure(results: Results, test: str, why: str, text: str, captured: list[list[str]]) -> None:
    """Write all about a failure, and the commands that repeat it."""
    repeat = f"bash cuda.sh --only {shlex.quote(re.escape(test))}"
    parts = [text, *(f"---- {title}\n{content}" for title, content in captured)]
    in_checkout = f"make test-cuda PYTEST_ARGS={shlex.quote(shlex.quote(test))}"
    results.note(f"{test} {why}\n  here:          {repeat}\n  in a checkout: {in_checkout}", "\n".join(parts))


def tail_of(file: Path, nbytes: int = 200_000) -> str:
    """Return the end of a log."""
    return file.read_bytes()[-nbytes:].decode(errors="replace")


# ---- figures ---------------------------------------------------------------------------------------------------------


def measure(results: Results, work: Path, device: str, only: str) -> None:
    """Measure the parts one after the other; one that fails or hangs costs its own time only."""
    from tests.cuda.figures import PARTS  # torch, which may not load here

    parts = [part for part in PARTS if re.search(only, f"figures {part}")]
    results.parts = dict.fromkeys(parts, "not run")
    for number, part in enumerate(parts):
        limit = min(max(PART_SECONDS, 1.5 * results.left() / (len(parts) - number)), results.left())
        if limit < 1:
            break
        measure_part(results, work / "rows", part, device, time.monotonic() + limit)
        print(f"figures {part}: {results.parts[part]}", flush=True)


def measure_part(results: Results, file: Path, part: str, device: str, until: float) -> None:
    """Measure one part in a process of its own, and take in its rows as they are written."""
    rows = Lines(file)
    log = results.out / "figures.log"
    start = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.cuda.figures", part, str(file), "--device", device]
    child = Child(command, log)
    try:
        while True:
            is_over = child.process.poll() is not None
            found = rows.new()
            for row in found:
                print(json.dumps(row), flush=True)
            results.figures += found
            if found:
                results.write()
            if is_over or time.monotonic() > until:
                break
            time.sleep(POLL_SECONDS)
    finally:
        child.end()
    status = child.process.returncode
    results.parts[part] = "done" if status == 0 else "cut" if time.monotonic() > until else f"failed ({status})"
    if status:
        text = log.read_bytes()[start:].decode(errors="replace")
        results.note(
            f"figures {part} {results.parts[part]}\n  here:          bash cuda.sh --only 'figures {part}'", text
        )
    results.write()


# ---- the whole -------------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """Read the command line of `cuda.sh`."""
    parser = argparse.ArgumentParser(prog="bash cuda.sh", description="Test trimesh on CUDA devices, then measure it.")
    parser.add_argument("--bundle", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--minutes", type=float, default=8.0, help="how long it may take (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="REGEX", help='tests and "figures PART" that match')
    parser.add_argument("--patience", type=float, default=1.0, help="factor of time limits, for a slow machine")
    parser.add_argument(
        "--without-device",
        action="store_true",
        help="try this script: tests are skipped, figures are small, on the CPU",
    )
    return parser.parse_args()


def attempt(results: Results, name: str, phase: Callable[[], None]) -> None:
    """Run a phase; an error of this script in it counts as a failure, and the next one runs."""
    try:
        phase()
    except Exception:  # noqa: BLE001 - it is in the log
        results.broken.append(name)
        results.note(f"the {name} of cuda.sh itself", traceback.format_exc())


def cut(number: int, frame: FrameType | None) -> None:
    """End the run at a signal, by way of its clean-up."""
    del frame
    sys.exit(128 + number)


def last_words(results: Results) -> None:
    """Add to the log of failures what the system says, and where all ran."""
    log = machine.printed("dmesg")
    kernel = "\n".join(line for line in log.splitlines() if re.search(r"NVRM|Xid|nvidia|oom|segfault|status", line))
    results.note("kernel log", kernel or "nothing about devices")
    results.note("nvidia-smi", machine.printed("nvidia-smi"))
    results.note("machine", machine.show(results.machine))


def main() -> int:
    """Run all, and return the exit status."""
    options = arguments()
    out: Path = options.out
    for name in ("results.json", "failures.log", "machine.txt", "tests.log", "figures.log"):
        (out / name).unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, cut)
    signal.signal(signal.SIGINT, cut)
    results = Results(out, json.loads(options.bundle.read_text()), options.minutes, options.patience)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            find_facts(results, work)
            if not sees_a_device(results) and not options.without_device:
                results.status = "refused: torch finds no CUDA device here"
                print(
                    f"cuda.sh: torch finds no CUDA device here ({out}/machine.txt); --without-device tries the script"
                )
                return REFUSED
            attempt(results, "tests", partial(run_all_tests, results, work, options.only))
            device = "cuda" if sees_a_device(results) else "cpu"
            attempt(results, "figures", partial(measure, results, work, device, options.only))
            results.status = "done"
        finally:
            if results.status == "running":
                results.status = "cut"
            if results.failed():
                last_words(results)
            results.write()
    print(f"{len(results.failed())} failed; the results are in {results.out}", flush=True)
    return FAILED if results.failed() else PASSED


if __name__ == "__main__":
    sys.exit(main())
