"""Pods that cannot reach the program, nor it them: a relay pod, and port-forwards of the API server (H30)."""

from __future__ import annotations

import json
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from tests.jobs.network.observing import needs_network
from tests.jobs.orphans import check_killed_program
from tests.jobs.pods.cluster import IMAGE, NETS, PYTHON, TOKEN, FakeKubernetes, missing
from tests.patience import HANG_SECONDS

from trimesh import Actor, HostLost, MeshErrorGroup, Restart, SpawnError, endpoint, leaves, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh.jobs.kubernetes.cluster import ApiError, open_cluster
from trimesh.testing import open_host_network
from trimesh.testing.real.host_network import CONTROLLER, HostNetwork

pytestmark = [pytest.mark.real, *needs_network, pytest.mark.skipif(missing() is not None, reason=missing() or "")]

PODS = 4
SECRET = b"a text that no relay may read. "
RECORDER = f"""#!{sys.executable}
import asyncio, os, sys
if os.path.exists({{path!r}} + ".broken"):
    sys.exit("No module named 'trimesh'")
read = asyncio.StreamReader.read
async def recorded(self, size):
    data = await read(self, size)
    with open({{path!r}}, "ab") as file:
        file.write(data)
    return data
asyncio.StreamReader.read = recorded
del sys.argv[1]
exec(sys.argv.pop(1))
"""
"""Runs the relay as `python3 -c` does, and keeps what it reads."""


class Worker(Actor):
    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def reverse(self, data: bytes) -> bytes:
        return data[::-1]

    @endpoint
    async def add(self) -> int:
        self.count += 1
        return self.count


@attrs.frozen
class Cluster:
    """A Kubernetes whose pods have a network of their own.

    Attributes:
        seen: File of all bytes that relays have read.
    """

    network: HostNetwork
    kubernetes: FakeKubernetes
    seen: Path

    @property
    def relay(self) -> str:
        """Name of the relay pod."""
        (found,) = [name for name in self.kubernetes.named("pods") if "-relay-" in name]
        return found

    def on_relay(self, action: str) -> None:
        """Let something happen to the relay pod: `cut` of its forwards, `kill`, `eviction`."""
        path = (
            f"/api/v1/namespaces/ml/pods/{self.relay}/eviction"
            if action == "eviction"
            else f"/fake/{self.relay}/{action}"
        )
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": self.relay}}
        self.kubernetes.call("POST", path, body if action == "eviction" else {})

    @contextmanager
    def broken_image(self) -> Iterator[None]:
        """Take trimesh out of the image of the relay while the body runs."""
        path = Path(f"{self.seen}.broken")
        path.touch()
        yield
        path.unlink()

    async def wait_until(self, is_so: Callable[[], object]) -> None:
        while not is_so():  # noqa: ASYNC110 - of another process
            await trio.sleep(0.02)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("kubernetes")
    seen, recorder = folder / "bytes", folder / "python"
    recorder.write_text(RECORDER.format(path=str(seen)))
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    with open_host_network(PODS) as network:
        nets = [(network.namespace(rank).path, network.address(rank)) for rank in range(PODS)]
        network.part(range(PODS), [CONTROLLER])
        one = FakeKubernetes(folder / "pods", env={NETS: json.dumps(nets), PYTHON: str(recorder)})
        yield Cluster(network, one, seen)
        one.close()


@pytest.fixture(autouse=True)
def surroundings(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program finds that cluster; nothing outlives its test."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubernetes.config))
    yield
    cluster.kubernetes.control(forbid=[], places=1000, ttl=1e9)
    assert cluster.kubernetes.everything() == []


def job(hosts: int = 2, **said: Any) -> jobs.KubernetesJob:
    return jobs.KubernetesJob(hosts, image=IMAGE, **{"via": "port-forward", **said})


@pytest.mark.daily
async def test_pods_that_cannot_reach_the_program_are_a_mesh(cluster: Cluster) -> None:
    """H30, H7: one relay pod carries all sessions, and reads ciphertext; nothing of it stays."""
    secret = SECRET * 4000
    with trio.fail_after(HANG_SECONDS):
        async with job() as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            assert list(await workers.reverse.call(secret)) == [secret[::-1]] * 2
            assert cluster.network.connections(1, CONTROLLER) == 0
            assert len([one for one in cluster.kubernetes.named("pods") if "-relay-" in one]) == 1
    seen = cluster.seen.read_bytes()
    assert len(seen) > 2 * len(secret)
    for text in (SECRET, SECRET[::-1], b"trimesh-join"):
        assert text not in seen


async def test_forwards_that_break_lose_nothing(cluster: Cluster) -> None:
    """H30, H3: each call arrives once, also while the API server breaks all forwards at once."""
    with trio.fail_after(HANG_SECONDS):
        async with job() as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            for number in range(1, 7):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.to_thread.run_sync, cluster.on_relay, "cut")
                    assert list(await workers.add.call()) == [number] * 2


@pytest.mark.stress
async def test_relay_whose_process_dies_goes_on(cluster: Cluster) -> None:
    """H30, H3: as on a login node, its parent keeps the port."""
    with trio.fail_after(HANG_SECONDS):
        async with job(1) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            for number in range(1, 4):
                assert list(await workers.add.call()) == [number]
                cluster.on_relay("kill_below")


@pytest.mark.parametrize("action", [pytest.param("kill", marks=pytest.mark.stress), "eviction"])
async def test_relay_pod_that_ends_is_followed_at_its_address(action: str, cluster: Cluster) -> None:
    """H30, H20: sessions that outlive its absence go on, other hosts are followed, through the new relay."""
    policy = Restart("one_for_one", along="hosts", intensity=20)
    with trio.fail_after(HANG_SECONDS):
        async with job(1) as hosts, hosts.spawn_procs({"gpus": 1}, supervision=policy) as procs:
            workers = await procs.spawn("workers", Worker)
            cluster.on_relay(action)
            found = list[int]()
            while not found:
                try:
                    found = list(await workers.add.call())
                except MeshErrorGroup as error:
                    assert {type(leaf) for leaf in leaves(error)} == {HostLost}  # noqa: PT017 - and goes on
            grown = await hosts.grow(1)
            assert len(grown) == 2


async def test_token_that_expires_is_replaced(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """H30: forwards of hosts that come later take that which the configuration has then."""
    config = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(config))
    text = cluster.kubernetes.config.read_text()
    config.write_text(text.replace(TOKEN, f"{TOKEN}-1"))
    with trio.fail_after(HANG_SECONDS):
        async with job(1) as hosts:
            await trio.Path(config).write_text(text.replace(TOKEN, f"{TOKEN}-2"))
            cluster.kubernetes.control(expired=[f"{TOKEN}-1"])
            grown = await hosts.grow(1)
            assert len(grown) == 2


@pytest.mark.stress
async def test_program_that_computes_keeps_its_hosts(cluster: Cluster) -> None:
    """H30: bytes pass while its loop does not run."""
    with trio.fail_after(HANG_SECONDS):
        async with job(1) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            workers = await procs.spawn("workers", Worker)
            time.sleep(limits.HOST_LEASE_SECONDS + 1)  # noqa: ASYNC251 - blocks the loop
            assert list(await workers.add.call()) == [1]


def test_program_that_was_killed_leaves_nothing(cluster: Cluster) -> None:
    """H30, H2: the relay pod ends when it hears no program, and deletes itself with all that belongs to it."""
    cluster.kubernetes.control(ttl=0.0)
    shorter = "setattr(__import__('trimesh').limits, 'POD_RELAY_LEASE_SECONDS', 15.0)"
    text = f"({shorter}, jobs.KubernetesJob(1, image={IMAGE!r}, via='port-forward'))[1]"
    check_killed_program(text, hosts=1, gpus=1)

    async def wait_gone() -> None:
        with trio.fail_after(HANG_SECONDS):
            await cluster.wait_until(lambda: not cluster.kubernetes.everything())

    trio.run(wait_gone)


async def test_relay_pod_without_a_place_is_waited_for(cluster: Cluster) -> None:
    """H30, H13: it is one of the pods of which progress tells; a cancel leaves nothing."""
    cluster.kubernetes.control(places=0)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:

            async def enter() -> None:
                async with job(1):
                    pytest.fail("there is no place")

            nursery.start_soon(enter)
            await cluster.wait_until(lambda: str(cluster.kubernetes.listed("pods")).count("Unschedulable") == 2)
            nursery.cancel_scope.cancel()


async def test_what_keeps_the_relay_from_its_work_is_said(cluster: Cluster) -> None:
    """H30: rights that are missing, with the line to add; an image without trimesh; a refused Job."""
    cluster.kubernetes.control(forbid=[["GET", "pods/portforward"]])
    text = await refused(job(1))
    assert 'User "u" cannot get resource "pods/portforward"' in text
    assert 'a Role must have {apiGroups: [""], resources: ["pods/portforward"], verbs: ["get", "create"]}' in text
    cluster.kubernetes.control(forbid=[["POST", "jobs"]])
    assert 'User "u" cannot post resource "jobs"' in await refused(job(1))
    cluster.kubernetes.control(forbid=[["POST", "services"]])
    assert 'User "u" cannot post resource "services"' in await refused(job(1))
    cluster.kubernetes.control(forbid=[])
    with cluster.broken_image():
        text = await refused(job(1))
    assert "cannot be the relay: container trimesh: CrashLoopBackOff" in text
    assert "its last words: No module named 'trimesh'" in text


async def test_forward_to_a_port_that_is_closed_ends_in_words(cluster: Cluster) -> None:
    """H30: a relay that does not listen yet is tried again, and the words are told if it never does."""
    with trio.fail_after(HANG_SECONDS):
        async with job(1), open_cluster(None) as api:
            async with api.forward(cluster.relay, 1) as forward:
                assert await forward.receive() == b""
                assert "error forwarding port 1 to pod" in forward.failure
            with pytest.raises(ApiError, match='pods "none" not found'):
                async with api.forward("none", 1):
                    pytest.fail("there is no such pod")


def test_via_takes_a_relay() -> None:
    """H30."""
    with pytest.raises(TypeError, match='via= takes "port-forward", a relay host'):
        job(1, via="exec")
    with pytest.raises(ValueError, match="leave it out"):
        job(1, interface="127.0.0.1")
    with pytest.raises(ValueError, match="leave them out"):
        job(1, port=4000)


async def refused(of: jobs.KubernetesJob) -> str:
    """Return why a job cannot be entered."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with of:
            pytest.fail("it cannot be entered")
    (error,) = leaves(caught.value)
    assert isinstance(error, SpawnError)
    return str(error)
