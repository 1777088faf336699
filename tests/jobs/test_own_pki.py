"""H7: certificates of an authority of the user's, from files: who joins with them, and who does not."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from tests.jobs.calling import check_mesh
from tests.jobs.joining import joining
from tests.patience import HANG_SECONDS

from trimesh import HostRefused, MeshErrorGroup, leaves
from trimesh.errors import ConfigError, LinkLost, TrimeshError

pytest.importorskip("cryptography")

from tests.jobs.site import Site
from tests.jobs.strangers import Guest

from trimesh import jobs
from trimesh._native import tls
from trimesh.ids import ProcId
from trimesh.jobs import door as doors
from trimesh.jobs.agent import HostProgram
from trimesh.jobs.connections import ListenAddress
from trimesh.jobs.identity import ForeignAuthority, JoinToken

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

N1, N2, N3 = "n1.example", "n2.example", "n3.example"
OWN = ProcId(7)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site", N1, N2, N3)


async def test_hosts_of_a_job_use_the_certificates_of_a_site(site: Site) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, pki=site.host(N1)) as hosts:
            await check_mesh(hosts)


async def test_each_host_that_joins_shows_its_own_certificate_and_sees_that_of_the_program(site: Site) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", pki=site.host(N1)) as door:
            assert f"--peer {N1} --peer {N2} --peer {N3}" in door.command
            second, third = site.host(N2), site.host(N3)
            async with joining(door, *by(door, site, second)), joining(door, *by(door, site, third)):
                seen = await certificate_of(door.addresses[0], second)
                assert seen["subjectAltName"] == (("DNS", N1),)
                async with door.expect(2) as hosts:
                    await check_mesh(hosts)


def by(door: jobs.OpenDoor, site: Site, pki: jobs.OwnPKI) -> tuple[str, ...]:
    """Return what a host is started with: a token in a file, its certificates."""
    path = site.authority.with_name(f"token-{os.urandom(4).hex()}")
    door.write_tokens(path, 1)
    return ("--token-file", str(path), "--line", "0", *pki.arguments)


async def certificate_of(address: str, own: jobs.OwnPKI) -> dict[str, object]:
    """Return what the certificate at an address says, as Python's own TLS reads it."""
    context = ssl.create_default_context(cafile=own.authority)
    context.load_cert_chain(own.certificate, own.key)
    host, _, port = address.rpartition(":")
    stream = trio.SSLStream(await trio.open_tcp_stream(host, int(port)), context, server_hostname=N1)
    await stream.do_handshake()
    found: dict[str, object] = stream.getpeercert()
    await trio.aclose_forcefully(stream)
    return found


# ---- who is refused --------------------------------------------------------------------------------------------------


async def test_file_that_cannot_be_read_aborts_the_program(site: Site) -> None:
    pki = site.host(N1)
    await trio.Path(pki.certificate).unlink()
    for block in (jobs.LocalJob(1, pki=pki), jobs.open_door("127.0.0.1", pki=pki)):
        with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as found:
            async with block:
                pass
        [error] = leaves(found.value)
        assert f"the certificate needs to be a readable file, got {pki.certificate}: No such file" in str(error)


async def test_key_that_others_can_read_aborts_the_program(site: Site) -> None:
    pki = site.host(N1)
    await trio.Path(pki.key).chmod(0o640)
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as found:
        async with jobs.LocalJob(1, pki=pki):
            pass
    [error] = leaves(found.value)
    assert f"with mode 0640; write: chmod 600 {pki.key}" in str(error)


async def test_host_whose_file_cannot_be_read_ends_in_words(site: Site) -> None:
    second = site.host(N2)
    await trio.Path(second.key).unlink()
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", pki=site.host(N1)) as door:
            async with joining(door, *by(door, site, second)) as process:
                words = await words_of(process)
            assert f"the key needs to be a readable file, got {second.key}" in words
            assert process.returncode == 1


async def test_host_that_is_no_peer_is_refused_and_both_sides_say_so(site: Site) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", pki=site.host(N1)) as door:
            async with joining(door, *by(door, site, site.host("other.example"))) as process:
                with pytest.raises(MeshErrorGroup) as found:
                    async with door.expect(1):
                        pass
                words = await words_of(process)
            [error] = leaves(found.value)
            assert isinstance(error, HostRefused)
            assert f"its certificate must name one of peers=, {N1}, {N2}" in str(error)
            assert "and names 'other.example'" in str(error)
            assert "the name in the certificate is not one that it expects" in words
            assert process.returncode == 77


async def test_program_that_is_no_peer_of_a_host_is_not_joined(site: Site) -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", pki=site.host(N1)) as door:
            async with joining(door, *by(door, site, site.host(N2, N2, N3))) as process:
                words = await words_of(process)
            assert f"must be one of the peers of this host, {N2}, {N3}, and its certificate names '{N1}'" in words
            assert process.returncode == 77


async def test_host_of_another_authority_is_refused(site: Site, tmp_path: Path) -> None:
    other = Site(tmp_path / "other", N1, N2)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.open_door("127.0.0.1", pki=site.host(N1)) as door:
            async with joining(door, *by(door, site, other.host(N2))) as process:
                words = await words_of(process)
            assert "the peer cannot be trusted, or does not trust us" in words
            assert process.returncode == 77
            async with joining(door) as process:  # one without any, too
                words = await words_of(process)
            assert "cannot be trusted" in words
            assert process.returncode == 77


async def words_of(process: trio.Process) -> str:
    """Return all that it writes to standard error until it ends."""
    assert process.stderr is not None
    text = b""
    async for data in process.stderr:
        text += data
    return text.decode()


@asynccontextmanager
async def open_site_door(pki: jobs.OwnPKI) -> AsyncGenerator[doors.Door, None]:
    authority = ForeignAuthority(pki.read())
    with trio.fail_after(HANG_SECONDS), doors.door_context(OWN, authority) as context:
        async with doors.open_door_at(ListenAddress("127.0.0.1"), OWN, authority, context) as door:
            yield door


def program(door: doors.Door, token: JoinToken, pki: jobs.OwnPKI | None) -> HostProgram:
    return HostProgram(jobs.AgentOrder(token.text, (door.address,), pki=pki))


async def test_certificate_alone_lets_no_host_in(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A certified host needs a token as any other does, and again on each connection: it names no incarnation."""
    caplog.set_level(logging.ERROR, "trimesh")
    async with open_site_door(site.host(N1)) as door:
        guest, pki = Guest(), site.host(N2)
        token = door.expect(guest)
        with pytest.raises(HostRefused, match="token"):
            await program(door, JoinToken(token.number, bytes(32), token.pin), pki)._join()
        with pytest.raises(LinkLost):
            await program(door, token, None)._join()
        host = program(door, token, pki)
        credentials = await host._join()
        assert credentials == pki.read()
        with pytest.raises(HostRefused, match="token"):
            await program(door, token, pki)._join()
        thief = program(door, door.expect(guest), site.host(N3))
        thief._own = host._own
        with pytest.raises(HostRefused, match="token"):
            await thief._join()
        assert guest.refusals == []
        assert guest.connections == []
        await meet(host)
        assert guest.connections == [host._own]
        host._own_pki = site.host("other.example").read()
        with pytest.raises(HostRefused, match="name"):
            await meet(host)
        host._own_pki = credentials
        door.forget(host._own)
        with pytest.raises(HostRefused, match="incarnation"):
            await meet(host)


async def meet(host: HostProgram) -> None:
    """Dial as a member."""
    assert host._own_pki is not None
    own = host._own_pki
    context = tls.TLSContext(chain=own.chain, key=own.key, authority=own.authority)
    try:
        async with host._dialled(context) as secure:
            with pytest.raises(LinkLost):
                await secure.receive_exactly(1)  # the guest closes it
    finally:
        context.close()


# ---- what a job is given ---------------------------------------------------------------------------------------------


def test_value_that_is_no_pki_is_refused() -> None:
    with pytest.raises(TypeError, match="pki= takes an OwnPKI"):
        jobs.LocalJob(1, pki="/etc/trimesh")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pki= takes an OwnPKI"):
        jobs.open_door(pki="/etc/trimesh")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="key of an OwnPKI must be an absolute path, or begin with ~/"):
        jobs.OwnPKI("/a", "key.pem", "/c", peers=N1)
    with pytest.raises(ValueError, match="peers of an OwnPKI must name the hosts to trust"):
        jobs.OwnPKI("/a", "/b", "/c", peers=())
    assert jobs.OwnPKI("/a", "~/b", "/c", peers=N1).peers == (N1,)


def write_jobs(folder: Path, kind: str, authority: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = '["n2"]' if kind == "ssh" else "1"
    image = 'image = "i"' if kind == "kubernetes" else ""
    pki = f'certificate = "/a"\nkey = "/b"\nauthority = "{authority}"\npeers = ["{N1}"]\n'
    text = f'[jobs.big]\nkind = "{kind}"\nhosts = {hosts}\n{image}\n[jobs.big.pki]\n{pki}'
    (folder / "trimesh.toml").write_text(text)
    monkeypatch.setenv("TRIMESH_CONFIG", str(folder / "trimesh.toml"))


@pytest.mark.parametrize("kind", ["local", "slurm", "kubernetes", "ssh"])
def test_file_of_jobs_names_the_certificates(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jobs(tmp_path, kind, "/c", monkeypatch)
    pki = jobs.OwnPKI("/a", "/b", "/c", peers=N1)
    job = jobs.named_job("big")
    assert job.pki == pki
    assert jobs.AgentOrder.parse(jobs.AgentOrder("t", (), pki=job.pki).line).pki == pki


def test_file_of_jobs_with_a_relative_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jobs(tmp_path, "local", "c", monkeypatch)
    with pytest.raises(
        ConfigError, match=r"jobs\.big\.pki has the wrong type: authority of an OwnPKI must be an absolute"
    ):
        jobs.named_job("big")


def test_pods_are_told_where_their_certificates_are() -> None:
    job = jobs.KubernetesJob(1, image="i", pki=jobs.OwnPKI("/tls/tls.crt", "/tls/tls.key", "/tls/ca.crt", peers=N1))
    command = " ".join(
        job.manifests()[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0][
            "command"
        ]
    )
    assert command.endswith(f"--certificate /tls/tls.crt --key /tls/tls.key --authority /tls/ca.crt --peer {N1}")


def test_host_that_says_half_of_it_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cyclopts")
    from trimesh.cli.jobs import join

    assert join("127.0.0.1:1", token_file="-", key="/b") == 2
    assert "need all of --certificate, --key, --authority and --peer" in capsys.readouterr().err


def test_errors_of_files_are_errors_of_ours(site: Site) -> None:
    pki = site.host(N1)
    Path(pki.authority).write_text("nothing")
    with pytest.raises(TrimeshError, match="the authority needs to be a file in PEM"):
        pki.read()
