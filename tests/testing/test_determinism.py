"""The same seed gives the same run: in one process, in others, whatever the hash seed (S1)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from tests.testing.actors import Relay, Worker, run_body

import trimesh
from trimesh.testing import is_bit_exact
from trimesh.testing.plans import determinism
from trimesh.testing.plans.determinism import run_seeded, stream
from trimesh.testing.simulated.oracles import Trace

ROOT = Path(__file__).parents[2]

HASHES = """
from tests.soak.workload import run_schedule  # restarts, kills, partitions and the rest
from tests.testing.test_determinism import mixed_body
from tests.testing.actors import run_body
for seed in range(6):
    for outcome in (run_body(mixed_body, seed, per_host={"gpus": 3}), run_schedule(seed)):
        assert outcome.error is None, outcome.error
        print(outcome.simulation.trace.hash)
"""


async def mixed_body(mesh, faults):
    """Calls, nested calls, streams, channels, deadlines, cancels, errors and a slow link, all at once."""
    w = await mesh.spawn("w", Worker)
    relays = await mesh.spawn("relays", Relay)
    faults.at(w.step, nth=4).raises(KeyError("planned"))
    faults.link({"gpus": 0}, {"gpus": 1}).reorder(0.2)

    async def one(number: int) -> None:
        with trio.move_on_after(0.3 * number):
            await w.slow.call_settled(1.0)

    async def stream() -> None:
        async with w.items.options(merge="collect", window=2).stream(6) as results:
            async for _ in results:
                await trio.sleep(0.005)

    async def channel() -> None:
        async with trimesh.open_channel(int, capacity=2) as (port, receiver):
            told = await w.tell.call_settled(port, 7)
            await port.aclose()
            assert all(outcome.ok for outcome in told.values()), list(told.values())
            assert [item async for item in receiver] == [7] * mesh.size()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream)
        nursery.start_soon(channel)
        for number in range(8):
            nursery.start_soon(one, number)
            nursery.start_soon(relays.pass_on.call_settled, w, number)


def hashes_under(hash_seed: str) -> list[str]:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-c", HASHES]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_installed_trio_is_bit_exact():
    assert is_bit_exact()


@pytest.mark.slow
def test_trace_is_the_same_in_every_process():
    first, other = [hashes_under(hash_seed) for hash_seed in ("0", "4711")]

    assert other == first
    assert len(set(first)) == len(first), "different seeds must give different runs"


def test_trace_is_the_same_when_it_is_repeated():
    texts = [run_body(mixed_body, 5, per_host={"gpus": 3}).simulation.trace.text for _ in range(2)]

    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) > 100


def test_trace_tells_names_and_no_numbers_of_this_run(tmp_path: Path):
    simulation = run_body(mixed_body, 1).simulation
    simulation.trace.write(tmp_path / "trace")

    text = (tmp_path / "trace").read_text()

    assert text.startswith("# trimesh trace 1 seed=0x1\n")
    assert "  dispatch  w[gpus=1]  slow for controller" in text
    assert "  receive   w" not in text
    ids = {str(child.proc_id) for child in simulation.world.children.values()}
    assert ids.isdisjoint(re.findall(r"\d+", text))


def test_trace_hash_stands_for_everything():
    traces = [Trace(1), Trace(2), Trace(1)]
    traces[2].add(0.0, "note", "controller", "something")

    assert len({trace.hash for trace in traces}) == 3


def test_seed_leaves_no_trace_in_trio():
    run = trio._core._run
    before = run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING

    run_seeded(7, trio.sleep, 1)

    assert (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_streams_do_not_move_each_other():
    assert stream(1, "a").random() == stream(1, "a").random()
    assert len({stream(*args).random() for args in ((1, "a"), (1, "b"), (2, "a"), (1, "a", 0))}) == 4


def test_trio_without_the_hooks_is_told_and_runs_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(determinism, "_FLAG", "_A_NAME_THAT_IS_GONE")
    is_bit_exact.cache_clear()
    try:
        with pytest.warns(determinism.NotDeterministicWarning, match="seeded but not bit-exact"):
            assert not is_bit_exact()
        outcome = run_body(mixed_body, 1)
        assert outcome.error is None
    finally:
        is_bit_exact.cache_clear()
