"""What ranks keep: what somebody holds at the controller, and no more of what has not been executed than a bound."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

import trimesh
from trimesh import Actor, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


class Gauge(Actor):
    """Looks at the rank that lives in its process."""

    @endpoint
    def read(self) -> tuple[int, int]:
        """Return how many values it has and how many KiB the process."""
        from pathlib import Path

        from trimesh._runtime.life.current import current_proc
        from trimesh.tensor.session.service import TensorService

        service = current_proc().above[TensorService]
        assert isinstance(service, TensorService)
        [hosted] = service._hosted.values()
        resident = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
        return len(hosted.rank.values), int(resident.split()[1])


async def read(gauges: Any, t: Any) -> list[tuple[int, int]]:
    await trimesh.fetch(t)  # everything before it has been executed
    return list((await gauges.read.call()).values())


async def test_ranks_keep_what_is_held() -> None:
    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        gauges = await procs.spawn("gauges", Gauge)
        with procs.activate():
            weight = torch.ones(64, 64, requires_grad=True)
        assert [count for count, _ in await read(gauges, weight)] == [1]

        for _ in range(10):  # graphs of autograd, hooks, and cycles that the collector finds
            y = (weight * 2).exp()
            y.register_hook(lambda grad: grad * 2)
            y.itself = y
            y.sum().backward()
            weight.grad = None
        del y
        gc.collect()
        assert [count for count, _ in await read(gauges, weight)] == [1]

        t = weight.detach()
        [(_, before)] = await read(gauges, t)
        for _ in range(20_000):  # five operations each: 16 KiB would be left behind by every one that is not freed
            t = ((t + 1) * 0.5 - t).abs().clamp(max=2)
        [(count, after)] = await read(gauges, t)
        assert count == 2
        assert after - before < 32 * 1024


async def test_issuing_waits_for_ranks_that_are_far_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from trimesh.tensor.controller.engine import Engine

    monkeypatch.setattr(trimesh.limits, "TENSOR_COMMANDS_AHEAD", 64)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    waited: list[str] = []
    wait_now = Engine.wait_now

    def opening(self: Engine, what: str) -> None:
        if not waited:
            gate.write_bytes(b"")  # comes back once the rank is there
        waited.append(what)
        wait_now(self, what)

    @trimesh.remote(propagate=lambda t: t)
    def held(t: Any) -> Any:
        gate.read_bytes()
        return t

    monkeypatch.setattr(Engine, "wait_now", opening)
    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            t = held(torch.ones(8, 8))
        team = t._held.team
        ahead = 0
        for _ in range(100):
            t = t @ t / 8
            ahead = max(ahead, team.issued - team.executed)
        assert 64 <= ahead <= 64 + trimesh.limits.TENSOR_BATCH_COMMANDS_MAX
        assert waited[0] == "the ranks had caught up with the issued commands"
        assert t[0, 0].item() == pytest.approx(1)
