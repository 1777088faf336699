"""H7: sessions without TLS, where a job insists: what is said of that, and what is refused all the same."""

from __future__ import annotations

import json
import logging
import os
import ssl
from pathlib import Path

import pytest
import trio
from tests.jobs.calling import check_mesh
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS

from trimesh import HostRefused
from trimesh.errors import LinkLost

pytest.importorskip("cryptography")

from tests.jobs.strangers import Guest, open_plain_door, raw

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import context_of
from trimesh.jobs.identity import PLAIN, JoinToken
from trimesh.jobs.pki import UNDERSTOOD
from trimesh.observe import find_run

pytestmark = pytest.mark.real


async def test_hosts_without_tls_are_a_mesh_and_it_is_said_on_every_start(caplog: pytest.LogCaptureFixture) -> None:
    job = jobs.LocalJob(2, insecure=UNDERSTOOD)
    for starts in (1, 2):
        with trio.fail_after(HANG_SECONDS):
            async with job as hosts:
                await check_mesh(hosts)
        said = [record.getMessage() for record in caplog.records if "INSECURE" in record.getMessage()]
        assert len(said) == starts
        assert f"sessions between the hosts of {job!r} are INSECURE, without TLS" in said[-1]


async def test_runs_and_hosts_without_tls_are_called_insecure(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pytest.importorskip("cyclopts")
    from trimesh.cli.commands import run

    with trio.fail_after(HANG_SECONDS):
        async with (
            jobs.LocalJob(1, insecure=UNDERSTOOD) as plain,
            jobs.LocalJob(2) as others,
            plain.spawn_procs({"a": 1}),
            others.slice(hosts=1).spawn_procs({"b": 1}),
        ):
            with find_run(os.getpid()) as seen:
                table = (await trio.to_thread.run_sync(seen.snapshot)).hosts
            await trio.to_thread.run_sync(run, ("doctor", "--json"))
    assert [one.is_insecure for one in sorted(table, key=lambda one: one.name)] == [False, True, False], table
    found = {one["name"]: one for one in json.loads(capfdbinary.readouterr().out)}
    assert found[f"run {os.getpid()}"]["verdict"] == "insecure"
    assert "are without TLS" in found[f"run {os.getpid()}"]["text"]


def test_job_of_a_file_without_tls_is_called_insecure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    pytest.importorskip("cyclopts")
    from trimesh.cli.commands import run

    (tmp_path / "trimesh.toml").write_text(f'[jobs.lab]\nkind = "local"\nhosts = 1\ninsecure = "{UNDERSTOOD}"\n')
    monkeypatch.setenv("TRIMESH_CONFIG", str(tmp_path / "trimesh.toml"))
    assert jobs.named_job("lab") == jobs.LocalJob(1, insecure=UNDERSTOOD)
    run(("doctor", "--json"))
    found = {
        one["name"]: one["text"] for one in json.loads(capfdbinary.readouterr().out) if one["verdict"] == "insecure"
    }
    assert "without TLS" in found["jobs.lab"]


async def test_host_that_joins_learns_it_by_its_token_and_says_it_too() -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", insecure=UNDERSTOOD) as door:
            assert door.token().startswith("trimesh-plain-1:")
            async with joining(door) as process:
                async with door.expect(1) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
                    assert len(procs) == 1
                assert process.stderr is not None
                text = b""
                async for data in process.stderr:
                    text += data
    assert f"the program at {door.addresses[0]} are INSECURE" in text.decode()


async def test_bytes_are_in_the_clear() -> None:
    """What it is: a stranger who only listens reads."""
    with trio.fail_after(HANG_SECONDS):
        async with open_plain_door() as door:
            host, _, port = door.address.rpartition(":")
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                assert bytes(await stream.receive_some(40))[:8] == b"tmplain1"


# ---- who is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["yes", "i understand", "I understand.", True, None, 1])
def test_any_other_text_is_refused_in_words(text: object) -> None:
    for make in (jobs.LocalJob, lambda _, insecure: jobs.open_door(insecure=insecure)):
        with pytest.raises(ValueError, match="insecure= takes the text 'I understand' and no other, got"):
            make(1, insecure=text)  # type: ignore[operator]


def test_certificates_and_none_are_refused() -> None:
    pki = jobs.OwnPKI("/a", "/b", "/c", peers="n1")
    with pytest.raises(ValueError, match="got both"):
        jobs.LocalJob(1, pki=pki, insecure=UNDERSTOOD)


def program(door: doors.Door, token: JoinToken) -> HostProgram:
    return HostProgram(jobs.AgentOrder(token.text, (door.address,)))


async def test_tokens_are_as_before() -> None:
    """One host, once; a wrong secret and the incarnation of a host that has joined get no further."""
    async with open_plain_door() as door:
        guest = Guest()
        token = door.expect(guest)
        with pytest.raises(HostRefused, match="token"):
            await program(door, JoinToken(token.number, bytes(32), token.pin, is_plain=True))._join()
        host = program(door, token)
        await host._join()
        with pytest.raises(HostRefused, match="token"):
            await program(door, token)._join()
        thief = program(door, door.expect(guest))
        thief._own = host._own
        with pytest.raises(HostRefused, match="token"):
            await thief._join()
        await meet(host)
        assert guest.connections == [host._own]
        assert guest.refusals == []


async def meet(host: HostProgram) -> None:
    """Dial as a member."""
    context = context_of(PLAIN)
    try:
        async with host._dialled(context) as secure:
            with pytest.raises(LinkLost):
                await secure.receive_exactly(1)  # the guest closes it
    finally:
        context.close()


async def test_tls_and_foreign_bytes_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with open_plain_door() as door:
        host, _, port = door.address.rpartition(":")
        context = ssl.create_default_context()
        stream = trio.SSLStream(await trio.open_tcp_stream(host, int(port)), context, server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await trio.aclose_forcefully(stream)
        assert (await raw(int(port), b"GET / HTTP/1.1\r\n\r\n"))[:8] == b"tmplain1"
        while len(door.offences) < 2:  # noqa: ASYNC110 - counted when the connection is closed
            await trio.sleep(0.01)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("what came is TLS, and this side was told to do without" in text for text in said)
    assert any("what came is no plain session of trimesh" in text for text in said)


@pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])
async def test_token_of_tls_does_not_lead_to_a_plain_session() -> None:
    """What a host was given decides, and no answer of the network: it is not led to do without."""
    async with open_plain_door() as door:
        token = door.expect(Guest())
        secure = JoinToken(token.number, token.secret, token.pin)
        with pytest.raises(HostRefused, match="does not use TLS, and the token of this host is for sessions with"):
            await program(door, secure)._join()
