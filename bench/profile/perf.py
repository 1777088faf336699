"""What perf says of a thread: how much of its time is the kernel's, and for what, and the native library's.

py-spy sees no kernel, and stops a thread for each sample, so that one that is about to sleep is found asleep. perf is
an interrupt, and sees the kernel's stack, but not Python's functions. So it divides first, and py-spy the rest.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

CALLS = "kernel: system calls of Python"
NATIVE_CALLS = "kernel: system calls of the native library"
FAULTS = "kernel: page faults"
INTERRUPTS = "kernel: interrupts"
NATIVE = "native library"
PYTHON = ""
"""The rest: the interpreter, its extensions, libc for them."""

SAMPLES_PER_SECOND = 2500
_KERNEL = "([kernel"
_LIBRARY = "libtrimesh.so)"
_FAULT = re.compile(r"page_fault|do_mem_abort")
_INTERRUPT = re.compile(r"interrupt|_irq_exit")


def find_perf() -> str | None:
    """Return the perf that may look into the kernel here, or None."""
    found = shutil.which("perf")
    if found is None:
        return None
    with tempfile.TemporaryDirectory(prefix="trimesh-perf-") as folder:
        command = [found, "record", "-q", "-e", "cpu-clock:k", "-o", f"{folder}/data", "true"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return found if done.returncode == 0 else None


def shares(perf: str, which: Sequence[str], environment: dict[str, str] | None = None) -> dict[int, Counter[str]]:
    """Sample what `which` says (`perf record` takes it); return the samples of each thread by what it did."""
    with tempfile.TemporaryDirectory(prefix="trimesh-perf-") as folder:
        record = [perf, "record", "-q", "-g", "-e", "cpu-clock", "-F", str(SAMPLES_PER_SECOND)]
        record += ["-o", f"{folder}/data", *which]
        subprocess.run(record, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if not Path(folder, "data").is_file():
            return {}
        script = [perf, "script", "-i", f"{folder}/data", "-F", "tid,ip,sym,dso"]
        done = subprocess.run(script, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return read_script(done.stdout.splitlines())


def read_script(lines: Iterable[str]) -> dict[int, Counter[str]]:
    """Return what each thread did, from what `perf script` has written.

    A sample is the number of a thread in a line, a line a frame, the innermost first, and an empty one.
    """
    found: dict[int, Counter[str]] = {}
    thread, frames = 0, list[str]()
    for line in [*lines, ""]:
        if line.startswith((" ", "\t")) and thread and "(" in line:
            frames.append(line)
        elif line.strip():
            thread, frames = int(line), []
        elif frames:
            found.setdefault(thread, Counter())[kind_of(frames)] += 1
            frames = []
    return found


def kind_of(frames: Sequence[str]) -> str:
    """Return what a thread did in one sample."""
    kernel = [frame for frame in frames if _KERNEL in frame]
    user = next((frame for frame in frames if _KERNEL not in frame), "")
    is_native = user.endswith(_LIBRARY)
    if not kernel:
        return NATIVE if is_native else PYTHON
    if any(_FAULT.search(frame) for frame in kernel):
        return FAULTS
    if any(_INTERRUPT.search(frame) for frame in kernel):
        return INTERRUPTS
    return NATIVE_CALLS if is_native else CALLS
