"""Figures of this machine (FM-1, FM-2)."""

from __future__ import annotations

import os
import threading

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime import fake_nvml

from trimesh import limits
from trimesh._runtime.system.machine import MachineReader
from trimesh._wire.observed import GPURow


async def test_gpus_of_the_machine(monkeypatch: pytest.MonkeyPatch):
    """Use, memory and temperature of each; a slice has no use of its own, one that is hidden is left out."""
    monkeypatch.setenv("FAKE_GPUS", "3")
    monkeypatch.setenv("FAKE_SLICED", "1")
    monkeypatch.setenv("FAKE_HIDDEN", "2")
    monkeypatch.setattr(limits, "MACHINE_SECONDS", HANG_SECONDS)
    row = await MachineReader(str(fake_nvml.build())).read()
    gib = 1 << 30
    whole = GPURow(index=0, name="Fake H1", percent=10, memory_bytes=80 * gib, used_bytes=gib, celsius=50)
    part = GPURow(index=1, name="Fake H1", percent=-1, memory_bytes=40 * gib, used_bytes=gib, celsius=51)
    assert row.gpus == (whole, part, part)
    assert (await MachineReader("/missing.so").read()).gpus == ()


async def test_hung_file_system_delays_no_answer(monkeypatch: pytest.MonkeyPatch):
    """FM-1: the last figures are returned, with their time, and nothing else begins to wait for it."""
    hung, is_over = threading.Event(), threading.Event()
    machine = MachineReader()
    with trio.fail_after(HANG_SECONDS):
        monkeypatch.setattr(limits, "MACHINE_SECONDS", HANG_SECONDS)
        before = await machine.read()
        waiting = list[int]()

        def hang(path: str) -> os.statvfs_result:
            waiting.append(1)
            hung.set()
            is_over.wait(HANG_SECONDS)
            raise OSError(path)

        monkeypatch.setattr(os, "statvfs", hang)
        monkeypatch.setattr(limits, "MACHINE_SECONDS", 0.01)
        found = [await machine.read() for _ in range(3)]
        assert await trio.to_thread.run_sync(hung.wait, HANG_SECONDS)
        assert [row.at for row in found] == [before.at] * 3
        assert waiting == [1]
        is_over.set()
