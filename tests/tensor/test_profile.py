"""One trace of the controller and the ranks, with operations named by their lines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import trimesh
from trimesh import limits, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor import profile, simulate  # noqa: E402 - after the skip
from trimesh.tensor.controller.team import Team  # noqa: E402
from trimesh.tensor.rank.rank import Rank  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

PRELOAD = ("torch", "torch.distributed.tensor")


def events_of(path: Path, kind: str, process: int) -> list[dict[str, Any]]:
    """Return the events of one kind of one process of a trace, in order."""
    found = json.loads(path.read_text())["traceEvents"]
    return sorted((one for one in found if one.get("cat") == kind and one["pid"] == process), key=lambda one: one["ts"])


@pytest.mark.real
async def test_a_profile_names_what_ranks_do_by_the_lines_that_issued_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        here = trimesh.distribute(torch.ones(8, 4), procs, ["gpus", None])
        before = here + 1
        async with profile(procs, path) as found:
            line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
            product = here @ here.t()
            total = here.sum(0) * 2.0
            with procs.slice(gpus=0).activate():
                alone = torch.ones(3)
            with pytest.raises(RuntimeError, match="is profiled already, in a block that has not ended"):
                async with profile(procs):
                    pass
        assert type(here._held.team) is Team
        after = here + 2

        metadata = [one for one in json.loads(path.read_text())["traceEvents"] if one["name"] == "process_name"]
        named = [one["args"]["name"] for one in metadata]
        assert named == [f"controller of {procs.name}", f"{procs.name}[gpus=0]", f"{procs.name}[gpus=1]"]
        issued = events_of(path, "issued", 1)
        assert f"test_profile.py:{line} aten::mm" in [one["name"] for one in issued]
        for process in (2, 3):
            done = events_of(path, "operation", process)
            products = [one for one in done if one["name"] == f"test_profile.py:{line} aten::mm"]
            assert len(products) == 1
            assert products[0]["args"]["line"].startswith(f"{__file__}:{line} in test_a_profile_names")
            asked = next(one for one in issued if one["name"] == products[0]["name"])
            assert 0 <= asked["ts"] <= products[0]["ts"]  # one clock
            assert not any(one["name"].endswith("aten::add.Tensor") for one in done)  # neither before nor after it
            sums = events_of(path, "collective", process)
            assert sums[0]["name"].startswith(f"test_profile.py:{line} ")
            assert sums[0]["name"].endswith(" along gpus")
            assert sums[0]["args"]["sent_bytes"] == 64  # four rows of four
        ones = [one["name"].split()[-1] for one in events_of(path, "operation", 2)]
        assert ones.count("aten::ones") == 1  # of a view that is newer than the block
        assert found.missing == 0
        assert found.uncertainty_seconds == 0.0
        assert await trimesh.call_on_shard_and_fetch(str, product.local(["gpus", None]).sum(), shard={"gpus": 0})

        monkeypatch.setattr(limits, "TENSOR_PROFILE_EVENTS_MAX", 5)
        async with profile(procs) as small:
            for _ in range(10 * limits.TENSOR_BATCH_COMMANDS):  # some are done, and forgotten here, while others come
                total = total + 1
        assert small.missing >= 10 * limits.TENSOR_BATCH_COMMANDS - 5
        small.write(path)
        assert json.loads(path.read_text())["otherData"]["missing"] == small.missing
        del before, after, alone


def test_nothing_of_a_profile_is_in_ranks_and_teams_that_are_not_profiled() -> None:
    assert "profil" not in inspect.getsource(Rank.execute)
    assert "profil" not in inspect.getsource(Team.emit)


async def test_a_simulation_has_a_trace_of_its_own() -> None:
    with pytest.raises(NotImplementedError, match=r"mesh\.write_trace"), simulate({"gpus": 2}) as mesh:
        async with profile(mesh):
            pass
