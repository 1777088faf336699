"""Which failure of the ranks of a program is told, and when the others are ended."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from trimesh import MeshErrorGroup, limits
from trimesh.spmd.program import ScriptFailed, run_together

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"


async def fail(seconds: float, text: str) -> int:
    await trio.sleep(seconds)
    raise ScriptFailed("train.py", 1, text)


async def test_results_are_in_the_order_of_ranks(autojump_clock: trio.testing.MockClock) -> None:
    async def give(rank: int) -> int:
        await trio.sleep(3 - rank)
        return rank

    assert await run_together([partial(give, rank) for rank in range(3)], "train.py") == [0, 1, 2]


async def test_first_failure_ends_the_others(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(MeshErrorGroup) as caught:
        await run_together([partial(fail, 1, "ValueError"), partial(fail, 2, "never"), trio.sleep_forever], "train.py")
    [error] = caught.value.exceptions
    assert isinstance(error, ScriptFailed)
    assert error.stderr_tail == "ValueError"
    assert trio.current_time() == 1


async def test_failure_behind_a_lost_peer_is_the_one_that_is_told(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(MeshErrorGroup) as caught:
        await run_together([partial(fail, 1, GONE), partial(fail, 2, "ValueError"), trio.sleep_forever], "train.py")
    [error] = caught.value.exceptions
    assert isinstance(error, ScriptFailed)
    assert error.stderr_tail == "ValueError"
    assert error.__notes__[0].startswith("ranks that failed because a peer was gone")
    assert trio.current_time() == 2


async def test_lost_peer_without_a_failure_ends_the_others(autojump_clock: trio.testing.MockClock) -> None:
    """Rank 1 has left early, say: no failure comes."""
    with pytest.raises(MeshErrorGroup) as caught:
        await run_together([partial(fail, 1, GONE), trio.sleep_forever], "train.py")
    [error] = caught.value.exceptions
    assert isinstance(error, ScriptFailed)
    assert error.stderr_tail == GONE
    assert trio.current_time() == 1 + limits.SPMD_VERDICT_SECONDS
