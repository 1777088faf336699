"""Hosts that wait for their token: `trimesh host join ... --token-file PATH --wait SECONDS --state-file PATH`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import agent as agent_module
from trimesh.jobs.agent import read_token, wait_for_token
from trimesh.jobs.identity import IdentityError

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


async def until_says(state: Path, word: str) -> None:
    while not state.exists() or state.read_text() != f"{word}\n":  # noqa: ASYNC110, ASYNC240 - of another process
        await trio.sleep(0.01)


async def test_host_waits_for_its_token_and_says_what_it_does(tmp_path: Path) -> None:
    """H7: the token comes when the program has room for it, as a file whose folder is there before."""
    tokens, state = tmp_path / "tokens", tmp_path / "state"
    tokens.mkdir()
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door:
            waits = ("--token-file", str(tokens / "3"), "--line", "0", "--wait", "60", "--state-file", str(state))
            async with joining(door, *waits, env={"RANK": "3"}) as process:
                await until_says(state, "waiting")
                door.write_tokens(tokens / "3.new", 1)
                (tokens / "3.new").rename(tokens / "3")
                async with door.expect(1) as hosts:
                    assert len(hosts) == 1
                    await until_says(state, "joined")
            assert process.returncode == 0


async def test_host_gives_up_when_nothing_changes_where_its_token_should_be(tmp_path: Path) -> None:
    """The program that is to write it is gone."""
    with trio.fail_after(HANG_SECONDS):
        waits = ("--token-file", str(tmp_path / "t"), "--wait", "0.2")
        async with jobs.open_door("127.0.0.1") as door, joining(door, *waits) as process:
            assert process.stderr is not None
            text = (await process.stderr.receive_some()).decode()
    assert process.returncode == 1
    assert f"the program must write a token to {tmp_path}/t, and its folder has not changed for" in text


class Clock:
    """The clock of who waits: time passes by sleeping, and things happen then."""

    def __init__(self, happens: dict[int, Callable[[], object]]) -> None:
        self.now = 0.0
        self._happens = happens

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        for second, act in self._happens.items():
            if before < second <= self.now:
                act()


def test_changes_of_the_folder_keep_a_host_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that waits in a queue for longer says by them that it lives."""

    def beat(second: int) -> Callable[[], object]:
        return lambda: os.utime(tmp_path, (second, second))

    clock = Clock({200: beat(200), 450: beat(450)})
    monkeypatch.setattr(agent_module, "time", clock)
    with pytest.raises(IdentityError, match="its folder has not changed for 300 s"):
        wait_for_token(tmp_path / "t", 300.0, None)
    assert 750 <= clock.now < 751

    clock = Clock({200: beat(1), 450: lambda: (tmp_path / "t").write_text("x")})
    monkeypatch.setattr(agent_module, "time", clock)
    wait_for_token(tmp_path / "t", 300.0, None)
    assert 450 <= clock.now < 451


async def test_signal_ends_a_host_that_waits(tmp_path: Path) -> None:
    """It would not be heard by the first process of a container otherwise."""
    state = tmp_path / "state"
    waits = ("--token-file", str(tmp_path / "t"), "--wait", "60", "--state-file", str(state))
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1") as door, joining(door, *waits) as process:
            await until_says(state, "waiting")
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            assert "by a signal" in (await process.stderr.receive_some()).decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_tokens_of_root_may_be_read_by_a_group_of_this_process(tmp_path: Path) -> None:
    """The files of a Secret, in a pod with `fsGroup`: root's, mode 0440. No other file that a group can read."""
    path = tmp_path / "token"
    path.write_text("line\n")
    for owner, group, mode, works in (
        (0, os.getegid(), 0o440, True),
        (0, os.getegid(), 0o400, True),
        (0, 54_321, 0o440, False),
        (54_321, os.getegid(), 0o440, False),
        (0, os.getegid(), 0o460, False),
        (0, os.getegid(), 0o444, False),
    ):
        os.chown(path, owner, group)
        path.chmod(mode)
        if works:
            assert read_token(str(path), 0) == "line"
        else:
            with pytest.raises(IdentityError, match="readable by its owner"):
                read_token(str(path), 0)
