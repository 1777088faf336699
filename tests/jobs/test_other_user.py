"""What another user of the machine can do with a mesh over hosts: nothing (T2 of the security tests)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs.test_exposure import Look, above, shown_of
from tests.patience import HANG_SECONDS

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user"),
]

PROGRAM = Path(__file__).with_name("as_nobody.py")


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that all may enter, in which the private folder of this user is."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield Path(name)


def granted(paths: Iterable[Path]) -> set[Path]:
    """Return those that another user can read, list or dial."""
    text = "".join(f"{path}\n" for path in paths)
    done = subprocess.run([sys.executable, str(PROGRAM)], input=text, stdout=subprocess.PIPE, text=True, check=True)
    return {Path(line) for line in done.stdout.splitlines()}


def of_process(pid: int) -> Iterator[Path]:
    """Yield what /proc has of a process that may hold secrets: variables, memory, and memory that has no name."""
    root = Path(f"/proc/{pid}")
    for name in ("environ", "mem", "maps", "fd"):
        yield root / name
    for fd in (root / "fd").iterdir():
        try:
            if "memfd:" in os.readlink(fd):
                yield fd
        except FileNotFoundError:  # the descriptor of the directory that is being read
            continue


async def test_other_user_reads_lists_and_dials_nothing(open_folder: Path) -> None:
    """H7: variables and memory of the program, the agents and the processes; its sockets; the file of tokens."""
    control, tokens = open_folder / "open to all", open_folder / "tokens"
    control.write_text("what shows that the other user can read at all")
    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.open_door("127.0.0.1") as door,
            jobs.LocalJob(2) as hosts,
            hosts.spawn_procs({"gpus": 1}) as procs,
            procs.spawn("look", Look) as look,
        ):
            door.write_tokens(tokens, 2)
            pids = await above(look) | {os.getpid()}
            sockets = [path for path in (open_folder / "trimesh").rglob("*") if path.is_socket()]
            assert sockets, "the run has a control socket"
            secret = [open_folder / "trimesh", *sockets, tokens, *(path for pid in pids for path in of_process(pid))]
            assert sum("/fd/" in str(path) for path in secret) > 0, "there is memory without a name"
            assert await trio.to_thread.run_sync(granted, [control, *secret]) == {control}
            lines = tokens.read_bytes().split()
            shown = shown_of(pids)
            assert all(line.partition(b":")[2][20:60] not in shown for line in lines)
