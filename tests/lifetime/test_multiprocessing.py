"""`multiprocessing` in actors, with what the user's script defines (V2)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS

pytestmark = pytest.mark.real

SCRIPT = """
import dataclasses
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import trio

from trimesh import Actor, endpoint, this_host

SCALE = 3

@dataclasses.dataclass
class Number:
    value: int

class OddError(Exception):
    pass

def grown(number):
    if number.value % 2:
        raise OddError(number)
    return Number(number.value * SCALE)

class Pooling(Actor):
    @endpoint(thread=True)
    def run(self, method):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
            grew = list(pool.map(grown, [Number(2), Number(4)]))
            assert all(type(one) is Number for one in grew)
            assert pool.submit(lambda: SCALE).result() == 3
            try:
                pool.submit(grown, Number(1)).result()
            except OddError as error:
                return grew, error.args

async def main():
    async with this_host().spawn_procs({}) as procs:
        grew, args = await (await procs.spawn("pooling", Pooling)).run.call_one(sys.argv[1])
        assert (grew, args) == ([Number(6), Number(12)], (Number(1),))

trio.run(main)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_workers_know_the_script(method: str, tmp_path: Path) -> None:
    """Its functions, instances of its classes in both directions, its errors; and it is not run again."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    done = subprocess.run([sys.executable, script, method], capture_output=True, timeout=HANG_SECONDS, check=False)

    assert (done.returncode, done.stderr.decode()) == (0, "")
