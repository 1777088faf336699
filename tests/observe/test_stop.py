"""`trimesh stop`: a run ends whatever it does with SIGINT, or the command says that it cannot (Q5)."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS

from trimesh import ConnectError, observe

pytestmark = pytest.mark.real

_MAIN = "trio.run(main)"
_THREAD = """thread = threading.Thread(target=trio.run, args=(main,))
thread.start()
thread.join()"""
_PROGRAM = """
import signal, sys, threading, time
from contextlib import asynccontextmanager
import trio
from trimesh import Actor, endpoint, this_host

class Lingering(Actor):
    @asynccontextmanager
    async def lifespan(self):
        yield
        print("lingers", flush=True)
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

    @endpoint
    async def hold(self):
        await trio.sleep_forever()

async def main():
    try:
        async with this_host().spawn_procs({{"gpus": 1}}), this_host().spawn_procs({{"gpus": 1}}, grace=1000) as procs:
            print("ready", flush=True)
            {body}
    except BaseException as error:
        kinds = [type(error)]
        while isinstance(error, BaseExceptionGroup):
            kinds, error = [type(one) for one in error.exceptions], error.exceptions[0]
        print([kind.__name__ for kind in kinds], flush=True)

{before}
{run}
"""
_IGNORED = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@contextmanager
def running(
    folder: Path, before: str, run: str = _MAIN, body: str = "await trio.sleep_forever()"
) -> Generator[subprocess.Popen[str], None, None]:
    """Run a program that has two blocks, one in the other, and says what the outer one has raised."""
    script = folder / "program.py"
    script.write_text(_PROGRAM.format(before=before, run=run, body=body))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.parametrize(
    ("before", "run"),
    [
        pytest.param("", _MAIN, id="heard"),
        pytest.param(_IGNORED, _MAIN, id="ignored", marks=pytest.mark.daily),
        pytest.param("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])", _MAIN, id="blocked"),
        pytest.param("signal.signal(signal.SIGINT, lambda *_: None)", _MAIN, id="handled by the program"),
        pytest.param(_IGNORED, _THREAD, id="ignored, and Trio in a thread"),
    ],
)
def test_run_is_stopped_whatever_it_does_with_sigint(before: str, run: str, tmp_path: Path) -> None:
    """Q5: its blocks raise `KeyboardInterrupt`, and nothing else."""
    with running(tmp_path, before, run) as program:
        with observe.find_run(program.pid) as found:
            found.stop()
        said, _ = program.communicate(timeout=HANG_SECONDS)
    assert (said, program.returncode) == ("['KeyboardInterrupt']\n", 0)


def test_second_stop_kills_what_a_block_waits_for(tmp_path: Path) -> None:
    """Q5, O6: as a second Ctrl-C does while the block is being left."""
    body = 'await (await procs.spawn("lingering", Lingering)).hold.call_one()'
    with running(tmp_path, _IGNORED, body=body) as program, observe.find_run(program.pid) as found:
        assert program.stdout is not None
        while not any(call.state == "running" for call in found.snapshot().calls):
            pass
        found.stop()
        assert "lingers" in program.stdout.readline()
        found.stop()
        said, _ = program.communicate(timeout=HANG_SECONDS)
    assert said.splitlines()[-1] == "['KeyboardInterrupt']"


def test_stop_that_cannot_be_is_said(tmp_path: Path) -> None:
    """Q5: SIGINT is ignored, and the Trio loop does not run."""
    with running(tmp_path, _IGNORED, body="time.sleep(100)") as program:
        with (
            observe.find_run(program.pid) as found,
            pytest.raises(ConnectError, match=r"ignores SIGINT.* is blocked"),
        ):
            found.stop()
        assert program.poll() is None


def test_sigint_reaches_code_without_a_checkpoint(tmp_path: Path) -> None:
    """Q5: where a Ctrl-C interrupts the run, a stop does, too."""
    with running(tmp_path, "", body="time.sleep(100)") as program:
        with observe.find_run(program.pid) as found:
            found.stop()
        assert program.wait(HANG_SECONDS) in (0, -signal.SIGINT)
