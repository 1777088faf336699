"""`trimesh profile`: samples of a real run by a real py-spy (Q3)."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
import trio
from tests.conformance.test_observe import Busy

from trimesh import observe, this_host

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run
from trimesh.cli.profile import under

has_spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


@pytest.mark.real
@pytest.mark.skipif(not has_spy, reason="py-spy is in the extra `profile`, which is not installed")
async def test_profile_names_the_ranks_that_compute(tmp_path: Path):
    """One graph of all processes; the stacks of those that compute are under their coordinates."""
    over, file = tmp_path / "over", tmp_path / "run.folded"
    async with this_host().spawn_procs({"gpus": 3}) as procs:
        busy = await procs.spawn("busy", Busy)
        async with trio.open_nursery() as nursery:
            for rank in (1, 2):
                nursery.start_soon(busy.slice(gpus=rank).compute.call_one, str(over))
            seen = ""
            while seen.count("in compute") < 2:
                seen = "".join(call.at for call in (await observe.snapshot()).calls)
            code = await trio.to_thread.run_sync(run, ["profile", str(file), "--seconds", "1"])
            await trio.Path(over).touch()
    lines = file.read_text(encoding="utf-8").splitlines()
    assert code == 0
    assert {line.split(";")[0] for line in lines if "compute (" in line} == {"procs[gpus=1]", "procs[gpus=2]"}
    assert all(line.rpartition(" ")[2].isdecimal() for line in lines)


def test_stacks_are_put_under_a_name():
    """A name cannot make frames of its own, nor lines; what is no stack is left out."""
    assert list(under("a;b\nc\x1b", "main (x.py:1);f (x.py:2) 3\n\nnoise\n")) == [
        "a,b c\\x1b;main (x.py:1);f (x.py:2) 3"
    ]
