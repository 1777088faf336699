"""Groups of processes whose memory the kernel limits, and in which it kills for want of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_MADE_IN = ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max"))


@contextmanager
def memory_group(nbytes: int) -> Iterator[Path]:
    """Make a cgroup (v1, or v2 where its controller is on); what is in it must have ended at the end, or be killed.

    A process joins it by a line with its pid, or "0", in its file `cgroup.procs`.
    """
    group = _made(nbytes)
    try:
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            pass
        group.rmdir()


def _made(nbytes: int) -> Path:
    for parent, limit in _MADE_IN:
        group = parent / f"trimesh-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                (group / limit).write_text(str(nbytes))
                with suppress(OSError):
                    (group / "memory.swap.max").write_text("0")
            except OSError:
                group.rmdir()
                continue
            return group
    pytest.skip("no cgroup with a memory controller can be made here")
