"""State files of kept jobs that are true no more, or were never."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from trimesh import ConnectError, jobs
from trimesh._runtime.system import start_of
from trimesh._transport.native.carriers import boot_id
from trimesh.jobs.kept import state as states
from trimesh.jobs.kept.state import KeptState


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def made(**changes: object) -> KeptState:
    """Return a state as this process would write it."""
    state = KeptState(
        name="exp",
        key="00",
        kind="LocalJob",
        host=socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
        started=start_of(os.getpid()) or 0,
        status="kept",
        since=time.time(),
        until=time.time() + 60,
        parts={"hosts": 1},
    )
    return msgspec.structs.replace(state, **changes)


def test_state_is_read_as_it_was_written() -> None:
    states.create(made())
    assert states.read("exp").key == "00"
    assert states.names() == ["exp"]
    assert states.why_gone(states.read("exp")) == ""
    assert b"\n" in states.file_of("exp").read_bytes().strip()


def test_name_is_taken_by_who_comes_first_and_freed_by_its_keeper_only() -> None:
    """KF-2."""
    states.create(made())
    with pytest.raises(ConnectError, match="choose another one"):
        states.create(made(key="01"))
    states.remove(made(key="01"))
    assert states.names() == ["exp"]
    states.remove(made())
    assert states.names() == []
    assert list(states.folder().iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boot": "another"}, "has been rebooted"),
        ({"status": "ended", "words": "the host n2 was lost"}, "the host n2 was lost"),
        ({"started": 1}, "is gone"),
    ],
)
async def test_stale_state_is_refused_in_words_and_stopping_frees_the_name(
    changes: dict[str, object], words: str
) -> None:
    states.create(made(**changes))
    with pytest.raises(ConnectError, match=words):
        async with jobs.attach("exp"):
            pytest.fail("it has attached")
    with pytest.raises(ConnectError, match=words):
        await jobs.extend("exp", lease=60)
    [seen] = await jobs.kept()
    assert words in seen.gone
    assert words in await jobs.stop("exp")
    assert await jobs.kept() == []


async def test_state_of_another_machine_is_left_alone() -> None:
    states.create(made(host="n7"))
    for ask in (jobs.stop("exp"), jobs.extend("exp", lease=60), jobs.attach("exp").__aenter__()):
        with pytest.raises(ConnectError, match="kept on n7"):
            await ask
    assert states.names() == ["exp"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 99}', b"\xff\xfe", b'{"name": 1}'])
def test_file_that_is_no_state_is_refused(text: bytes) -> None:
    states.create(made())
    states.file_of("exp").write_bytes(text)
    with pytest.raises(ConnectError, match=r"must be the state|must be of version"):
        states.read("exp")


def test_link_in_the_place_of_a_state_file_is_refused(tmp_path: Path) -> None:
    states.create(made())
    states.file_of("exp").rename(tmp_path / "elsewhere")
    states.file_of("exp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConnectError, match="cannot be read"):
        states.read("exp")


async def test_no_job_is_kept_by_an_unknown_name() -> None:
    for ask in (jobs.stop("exp"), jobs.extend("exp", lease=60), jobs.attach("exp").__aenter__()):
        with pytest.raises(ConnectError, match="no job is kept as 'exp'"):
            await ask
