"""Names: who may take them, who finds them, and who is refused."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from tests.lifetime.program import Program
from tests.programs.conftest import SCRIPTS, names_in

from trimesh import Actor, ConnectError, connect, endpoint, limits, publish_as, this_host, this_proc
from trimesh._runtime.programs import publication
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.socket import BrokerSocket
from trimesh.ids import ProcId

pytestmark = pytest.mark.real


class Echo(Actor):
    """Of this program."""

    @endpoint
    async def echo(self, value: int) -> int:
        return value


class Other(Actor):
    """Has another endpoint."""

    @endpoint
    async def shout(self, value: int) -> int:
        return value


async def test_missing_name_is_told_with_those_that_there_are(publisher: Program, judge: Any):
    """W1."""
    with pytest.raises(ConnectError, match=r"publishes 'jugde' on this host .*published names: judge"):
        async with connect("jugde", judge):
            raise AssertionError


async def test_name_is_taken_once(publisher: Program):
    """W1."""
    async with this_proc().spawn("echo", Echo) as echo:
        with pytest.raises(ConnectError, match=f"process {publisher.pid} publishes 'judge'"):
            async with publish_as("judge", echo):
                raise AssertionError
        async with publish_as("other", echo):
            pass


async def test_name_of_a_killed_program(publisher: Program, judge: Any, folder: Path):
    """W1: it is removed by whoever finds it, or taken over."""
    publisher.kill_and_check()
    assert names_in(folder) == ["judge"]
    with pytest.raises(ConnectError, match="that published 'judge' has ended"):
        async with connect("judge", judge):
            raise AssertionError
    assert names_in(folder) == []


@pytest.mark.daily
async def test_name_of_a_killed_program_is_taken_over(publisher: Program, folder: Path):
    """W1."""
    publisher.kill_and_check()
    async with this_proc().spawn("echo", Echo) as echo, publish_as("judge", echo):
        assert names_in(folder) == ["judge"]
    assert names_in(folder) == []


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "x" * (limits.PUBLISHED_NAME_CHARS_MAX + 1), "é"])
async def test_name_has_few_characters(name: str):
    """W1."""
    with pytest.raises(ValueError, match="a published name must be"):
        connect(name, Echo)


async def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="a handle on actors"):
        publish_as("a", Echo())
    with pytest.raises(TypeError, match="the class of the actors"):
        connect("a", int)  # type: ignore[type-var]
    with pytest.raises(TypeError, match="must be a text"):
        connect(1, Echo)  # type: ignore[arg-type]


async def test_folder_that_others_may_enter_is_refused(folder: Path):
    """W1."""
    os.mkdir(folder, mode=0o755)
    async with this_proc().spawn("echo", Echo) as echo:
        with pytest.raises(ConnectError, match=r"of mode 0700, got user .* and mode 0755"):
            async with publish_as("a", echo):
                raise AssertionError


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
async def test_folder_of_another_user_is_refused(folder: Path):
    """W1: also by a link."""
    os.mkdir(folder, mode=0o700)
    os.chown(folder, 12345, -1)
    with pytest.raises(ConnectError, match="got user 12345"):
        async with connect("a", Echo):
            raise AssertionError
    os.rmdir(folder)
    os.symlink("/", folder)
    with pytest.raises(ConnectError, match="cannot use the folder of published names"):
        async with connect("a", Echo):
            raise AssertionError


async def test_other_user_is_declined(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """W1: whoever got past the folder is told by the credentials that the kernel shows."""
    async with this_proc().spawn("echo", Echo) as echo, publish_as("a", echo):
        broker = BrokerSocket(dialled("a"))
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        record = await next_record(broker)
        monkeypatch.undo()
        assert record == wire.Declined(f"'a' is for programs of user {own + 1}, got one of user {own}")
        broker.close()


@pytest.mark.daily
@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("trimesh", "9.9", r"the same version of trimesh: .*has .* \(protocol \d+\), .*old.py \(pid 1\) has 9.9"),
        ("protocol", 1, r"the same version of trimesh"),
        ("python", "cpython 3.1", "the same Python: .* has cpython 3.1"),
        ("pickle", "off", "the same pickle=: .* has on, .* has off"),
    ],
)
async def test_program_that_does_not_fit_is_declined(field: str, value: Any, text: str):
    """W2: by the one that publishes; both are named."""
    ours = msgspec.structs.replace(publication.side_of(pickled=True, proc_id=ProcId(5)), program="old.py", pid=1)
    async with this_proc().spawn("echo", Echo) as echo, publish_as("a", echo):
        broker = BrokerSocket(dialled("a"))
        assert isinstance(await next_record(broker), wire.Greeting)
        broker.send(wire.Join(msgspec.structs.replace(ours, **{field: value})))
        declined = await next_record(broker)
        broker.close()
    assert isinstance(declined, wire.Declined)
    with pytest.raises(ConnectError, match=text):
        publication.check_fit(
            publication.side_of(pickled=True, proc_id=ProcId(6)), msgspec.structs.replace(ours, **{field: value})
        )


async def test_number_of_another_process_is_declined():
    """W2: a client is never taken for a process of the family, the controller or a worker, nor for another client."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        echo = await procs.spawn("echo", Echo)
        async with publish_as("a", echo):
            first = BrokerSocket(dialled("a"))
            greeting = await next_record(first)
            assert isinstance(greeting, wire.Greeting)
            ours = publication.side_of(pickled=True, proc_id=ProcId(5))
            first.send(wire.Join(ours))
            joined = await next_record(first)
            assert isinstance(joined, wire.Joined)
            for taken in (greeting.side.proc_id, joined.handle.members[0].proc_id, 5):
                broker = BrokerSocket(dialled("a"))
                await next_record(broker)
                broker.send(wire.Join(msgspec.structs.replace(ours, proc_id=taken)))
                assert isinstance(await next_record(broker), wire.Declined)
                broker.close()
            first.close()


async def test_publisher_that_does_not_fit_is_refused(folder: Path):
    """W2: by the one that connects, before it says anything."""
    os.mkdir(folder, mode=0o700)
    taken = publication.take_name("a")
    theirs = msgspec.structs.replace(publication.side_of(pickled=True, proc_id=ProcId(5)), trimesh="0.0.1")

    async def greet() -> None:
        await trio.lowlevel.wait_readable(taken.listener)
        broker = BrokerSocket(taken.listener.accept()[0])
        broker.send(wire.Greeting(theirs))
        with pytest.raises(EOFError):
            await next_record(broker)
        broker.close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(greet)
        with pytest.raises(ConnectError, match=r"has 0\.0\.1"):
            async with connect("a", Echo):
                raise AssertionError
    taken.give_back()


@pytest.mark.daily
@pytest.mark.parametrize("data", [b"\x80\x04N.", b"rubbish", b""])
async def test_rubbish_ends_the_connection_alone(data: bytes):
    """W2: nothing of it is unpickled."""
    async with this_proc().spawn("echo", Echo) as echo, publish_as("a", echo):
        sock = dialled("a")
        await next_record(BrokerSocket(sock))
        sock.send(data) if data else sock.close()
        if data:
            await trio.lowlevel.wait_readable(sock)
            assert sock.recv(100) == b""
            sock.close()
        another = dialled("a")
        assert isinstance(await next_record(BrokerSocket(another)), wire.Greeting)
        another.close()
        await trio.testing.wait_all_tasks_blocked()


async def test_silent_publisher_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """W1: one that is stopped, say."""
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.05)
    taken = publication.take_name("a")
    with pytest.raises(ConnectError, match="has not answered for"):
        async with connect("a", Echo):
            raise AssertionError
    taken.give_back()


async def test_endpoints_must_be_those_that_are_published(publisher: Program):
    """W2."""
    with pytest.raises(ConnectError, match="shout is not there"):
        async with connect("judge", Other):
            raise AssertionError


async def test_pickle_off_is_taken_over_and_stays(tmp_path: Path, judge: Any):
    """W2: a program with pickle="on" is refused, one that has no block yet does without."""
    with Program(tmp_path, "publisher", {"pickle": "off"}, programs=SCRIPTS) as publisher:
        publisher.event("published")
        async with connect("judge", judge) as judges:
            assert list((await judges.score.call(3)).values()) == [6, 6]
        async with this_host().warm(pickle="on"):
            with pytest.raises(ConnectError, match=r"the same pickle=: .* has on, .* has off"):
                async with connect("judge", judge):
                    raise AssertionError


async def test_workers_are_refused(judge: Any):
    """W3: they are told what to do."""
    async with this_host().spawn_procs({"gpus": 1}) as procs:
        nested = await procs.spawn("nested", Nested)
        for refused in (nested.connect, nested.publish):
            with pytest.raises(RuntimeError, match="only in the controller"):
                await refused.call_one()


class Nested(Actor):
    """Tries in a worker."""

    @endpoint
    async def connect(self) -> None:
        async with connect("judge", Echo):
            raise AssertionError

    @endpoint
    async def publish(self) -> None:
        refusal: Exception = AssertionError()
        async with this_proc().spawn("echo", Echo) as echo:
            try:
                async with publish_as("a", echo):
                    raise AssertionError
            except RuntimeError as error:
                refusal = error
        raise refusal


def dialled(name: str) -> socket.socket:
    found = publication.dial(name)
    assert found is not None
    return found


async def next_record(broker: BrokerSocket) -> wire.AnyRecord:
    while (received := broker.receive()) is None:
        await trio.lowlevel.wait_readable(broker.socket)
    return received.record
