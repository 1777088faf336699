"""Use of GPUs by a process, as NVML tells it (Q1)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime import fake_nvml

from trimesh import limits
from trimesh._runtime.gpu_feed import keep_reading


async def test_use_and_memory_on_all_gpus(monkeypatch: pytest.MonkeyPatch):
    """The busiest of them; a library that is missing ends the reading without a word."""
    monkeypatch.setattr(limits, "GPU_SECONDS", 0.001)
    monkeypatch.setenv("FAKE_GPUS", "2")
    proc: Any = SimpleNamespace(pid=os.getpid(), gpu_use=(0, 0))
    settings: Any = SimpleNamespace(nvml=str(fake_nvml.build()))
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keep_reading, proc, settings)
            while not proc.gpu_use[1]:  # noqa: ASYNC110 - a thread reads
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert proc.gpu_use == (11, 14 << 20)
        await keep_reading(proc, SimpleNamespace(nvml="/missing.so"))  # type: ignore[arg-type]
