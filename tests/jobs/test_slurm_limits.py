"""When a block on nodes of Slurm has to be left, by what `scontrol` says of its job."""

from __future__ import annotations

import math

import pytest
import trio

from trimesh import limits
from trimesh.config import configured
from trimesh.jobs import slurm
from trimesh.jobs.slurm import SlurmJob


@pytest.mark.parametrize(("grace", "ahead"), [(20.0, 0.0), (20.0, 30.0), (math.inf, 0.0)])
async def test_block_is_left_when_its_grace_is_all_that_is_left(
    grace: float, ahead: float, autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H26: a grace without an end is no reason to leave at once."""
    began = trio.current_time()

    async def ask(*_: str, run: object) -> str:
        await trio.lowlevel.checkpoint()
        minutes, seconds = divmod(int(trio.current_time() - began), 60)
        return f"JobId=7 JobState=RUNNING Reason=None RunTime=00:{minutes:02}:{seconds:02} TimeLimit=01:00:00"

    monkeypatch.setattr(slurm, "ask", ask)
    with configured(grace=grace):
        text = await slurm.SlurmLauncher(SlurmJob(1)).wait_end(ahead)
    assert "reaches its time limit" in text
    left = began + 3600 - trio.current_time()
    own = grace if math.isfinite(grace) else 0.0
    assert left == pytest.approx(own + limits.SLURM_LEAVE_SECONDS + ahead, abs=limits.SLURM_LIMIT_LOOK_SECONDS_MIN + 1)
