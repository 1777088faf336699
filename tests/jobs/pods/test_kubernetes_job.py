"""Hosts that are pods, on an API server that is strict and starts their commands as processes."""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from tests.jobs import sshd
from tests.jobs.orphans import check_killed_program
from tests.jobs.pods.cluster import IMAGE, FakeKubernetes, missing
from tests.patience import HANG_SECONDS
from tests.spawner_template import IS_POSSIBLE

from trimesh import Actor, HostLost, MeshErrorGroup, Restart, SpawnError, endpoint, leaves, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.ids import ProcId
from trimesh.jobs.identity import Authority
from trimesh.testing import LAUNCHER_CASES, LauncherSubject, check_launcher

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(scope="module", params=["jobset", pytest.param("job", marks=pytest.mark.stress)])
def cluster(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[FakeKubernetes]:
    """A Kubernetes for the tests of this file, with JobSets and without."""
    one = FakeKubernetes(
        tmp_path_factory.mktemp("kubernetes"), has_jobset=request.param == "jobset", are_copies=IS_POSSIBLE
    )
    yield one
    one.close()


@pytest.fixture(autouse=True)
def surroundings(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program finds that cluster; nothing outlives its test."""
    monkeypatch.setenv("KUBECONFIG", str(cluster.config))
    monkeypatch.setattr(limits, "AGENT_EXIT_SECONDS", 6.0)  # for its words on a busy machine
    yield
    if cluster.process.poll() is None:
        assert cluster.everything() == []


def job(hosts: Any = 2, **said: object) -> jobs.KubernetesJob:
    return jobs.KubernetesJob(hosts, **{"image": IMAGE, "interface": "127.0.0.1", **said})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", LAUNCHER_CASES)
def test_agents_in_pods(case: str, cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, H2, H4, H13: what each launcher must do; and nothing is left in the namespace."""
    monkeypatch.setattr(limits, "HOST_LEASE_SECONDS", 2.0)
    check_launcher(case, LauncherSubject(job, leftovers=cluster.everything))


class Worker(Actor):
    """What the tests call."""

    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


async def until(is_so: Callable[[], object]) -> None:
    while not is_so():  # noqa: ASYNC110 - of another process
        await trio.sleep(0.02)


async def refused(of: jobs.KubernetesJob) -> str:
    """Return why a job cannot be entered."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with of:
            pytest.fail("it cannot be entered")
    (error,) = leaves(caught.value)
    assert isinstance(error, SpawnError)
    return str(error)


async def test_parts_of_a_mapping_are_pods_in_their_order(cluster: FakeKubernetes) -> None:
    """H13: what is applied is what `manifests` shows, but for its names; hosts have the names of their pods."""
    of = job({"trainers": 1, "generators": 2}, name="exp7")
    with trio.fail_after(HANG_SECONDS):
        async with of as hosts, hosts["generators"].spawn_procs({"gpus": 1}) as procs:
            assert list(hosts.names) == [cluster.pod(index)["metadata"]["name"] for index in range(3)]
            async with procs.spawn("workers", Worker) as workers:
                assert list(await workers.double.call(2)) == [4, 4]
            shown = of.manifests(has_jobset="jobsets/exp7" in cluster.everything())
            applied = cluster.listed("jobsets" if "jobsets/exp7" in cluster.everything() else "jobs")[0]
            assert set(applied["spec"]) == set(shown[0]["spec"])
            assert applied["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "trimesh"
            # all else belongs to that, so that it goes with it
            for plural in ("services", "secrets"):
                assert cluster.listed(plural)[0]["metadata"]["ownerReferences"][0]["uid"] == applied["metadata"]["uid"]


@pytest.mark.parametrize(
    ("action", "reason", "words"),
    [
        ("kill", "agent exit", "the pod is Failed; Error: signal 9"),
        ("oom", "out of memory", "OOMKilled: signal 9"),
        ("eviction", "evicted", "EvictionByEvictionAPI: Eviction API: evicting"),
        ("node", "evicted", "Evicted: The node was low on resource: memory."),
    ],
)
async def test_lost_pod_is_one_failure_in_the_words_of_kubernetes(
    action: str, reason: str, words: str, cluster: FakeKubernetes
) -> None:
    """H4, H13: pod killed while it runs; the other host goes on until the block ends it."""
    names = list[str]()
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with (
            job() as hosts,
            hosts.spawn_procs({"gpus": 2}) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            names += hosts.names
            await workers.double.call(1)
            cluster.on_pod(1, action)
            await workers.sleep.call()
    found = list(leaves(caught.value))
    losses = {(one.host, one.reason) for one in found if isinstance(one, HostLost)}
    assert all(isinstance(one, HostLost) for one in found), found
    assert losses == {(names[1], reason)}, found
    assert words in str(found[0])
    if action == "node":  # by SIGTERM, so that the agent could say it; what is said is in the log of the pod
        assert "its last words: trimesh agent: it was stopped by a signal" in str(found[0])


async def answer(workers: Any, losses: list[HostLost]) -> list[int]:
    """Return what all double to once none of them is lost, and how they were lost until then."""
    while True:
        try:
            return list(await workers.double.call(2))
        except MeshErrorGroup as group:
            found = [one for one in leaves(group) if isinstance(one, HostLost)]
            if not found:
                raise
            losses += found
            await trio.sleep(0.005)


@pytest.mark.parametrize("cluster", ["jobset"], indirect=True)
async def test_lost_pod_is_followed_by_another(cluster: FakeKubernetes, queue: Callable[[int], None]) -> None:
    """H20: by a Job of its own, as that of the lost pod has finished, and deletes itself with all that it owns."""
    queue(1000)  # as before, after the test
    losses, names = list[HostLost](), list[str]()
    with trio.fail_after(HANG_SECONDS):
        async with (
            job(1, name="exp8") as hosts,
            hosts.spawn_procs({"gpus": 1}, supervision=Restart(along="hosts")) as procs,
            procs.spawn("workers", Worker) as workers,
        ):
            for action, ttl, name in (("eviction", 0.0, "exp8-1"), ("node", 1e9, "exp8-2")):
                cluster.control(ttl=ttl)
                names += hosts.names
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sleep_until_lost, workers, losses)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                    cluster.on_pod(0, action)
                assert await answer(workers, losses) == [4]
                assert hosts.names[0].startswith(f"{name}-0-")
                if ttl == 0:
                    await until(
                        lambda: set(cluster.everything()) == {"jobs/exp8-1", "secrets/exp8-1", *pods_of(cluster)}
                    )
    assert [one.host for one in losses[:: len(losses) - 1]] == names
    assert {(one.reason, *dict(one.point or {}).items()) for one in losses} == {("evicted", ("hosts", 0))}
    assert "its last words: trimesh agent: it was stopped by a signal" in str(losses[-1])


def pods_of(cluster: FakeKubernetes) -> list[str]:
    return [f"pods/{name}" for name in cluster.named("pods")]


async def sleep_until_lost(workers: Any, losses: list[HostLost]) -> None:
    """Be in a call when the host is lost."""
    try:
        await workers.sleep.call()
    except MeshErrorGroup as group:
        losses += [one for one in leaves(group) if isinstance(one, HostLost)]


@pytest.mark.parametrize("cluster", ["job"], indirect=True)
async def test_more_pods_come_or_none(cluster: FakeKubernetes, queue: Callable[[int], None]) -> None:
    """H27: for as long as a queue takes; a cancel, and a pod that ends, leave nothing of them."""
    queue(2)
    with trio.fail_after(HANG_SECONDS):
        async with job(1) as hosts, trio.open_nursery() as nursery:
            before = sorted(cluster.everything())
            scope = trio.CancelScope()

            async def grow() -> None:
                with scope:
                    await hosts.grow(2)

            nursery.start_soon(grow)
            await until(lambda: cluster.running() == 2 and "Unschedulable" in str(cluster.listed("pods")))
            scope.cancel()
            await until(lambda: sorted(cluster.everything()) == before)
            queue(1)

            async def kill_one() -> None:
                await until(lambda: cluster.running() == 2 and "Unschedulable" in str(cluster.listed("pods")))
                (late,) = [
                    one for one in cluster.listed("pods") if is_late(one) and one["status"]["phase"] == "Running"
                ]
                cluster.call("POST", f"/fake/{late['metadata']['name']}/node", {})

            nursery.start_soon(kill_one)
            with pytest.raises(SpawnError, match=r"cannot be a host: .*The node was low on resource"):
                await hosts.grow(2)
            await until(lambda: sorted(cluster.everything()) == before)
            queue(2)
            grown = await hosts.grow(2)
            assert [one.rsplit("-", 3)[1] for one in grown.names[1:]] == ["5", "5"]  # of the Job that began there
            async with grown.spawn_procs({}) as procs, procs.spawn("workers", Worker) as workers:
                assert list(await workers.double.call(2)) == [4, 4, 4]


def is_late(pod: Any) -> bool:
    """Tell whether a pod has come later."""
    return "trimesh-actors/first" in pod["metadata"]["labels"]


async def test_pod_that_others_delete_is_lost(cluster: FakeKubernetes) -> None:
    """H13: `kubectl delete pod`; where no mesh has processes there, the block of the job fails."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with job(1):
            name = cluster.pod(0)["metadata"]["name"]
            cluster.call("DELETE", f"/api/v1/namespaces/ml/pods/{name}", {"propagationPolicy": "Background"})
            await trio.sleep_forever()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)
    assert (lost.host, lost.reason) == (name, "cancelled")


@pytest.mark.parametrize("cluster", ["jobset"], indirect=True)
@pytest.mark.skipif(sshd.missing() is not None, reason=sshd.missing() or "")
async def test_pods_reach_a_program_outside_by_a_relay(cluster: FakeKubernetes, tmp_path: Path) -> None:
    """H5, H30: sshd in a pod, where the relay runs; the agents dial that."""
    server = sshd.SSHServer(tmp_path)
    try:
        with trio.fail_after(HANG_SECONDS):
            async with (
                job(1, via=jobs.SSH("n1", options=server.options)) as hosts,
                hosts.spawn_procs({"gpus": 1}) as procs,
                procs.spawn("workers", Worker) as workers,
            ):
                assert list(await workers.double.call(4)) == [8]
                [container] = cluster.pod(0)["spec"]["containers"]
                [address] = [word for word in container["command"] if word.startswith("127.0.0.1:")]
                relays = await trio.run_process(["ss", "-Hltnp"], capture_stdout=True)
                [line] = [line for line in relays.stdout.decode().splitlines() if address in line]
                assert "python" in line
        server.wait_idle()
    finally:
        server.close()


def test_relay_takes_the_place_of_addresses() -> None:
    """H28: of the program, which pods do not reach."""
    with pytest.raises(ValueError, match="leave them out"):
        job(1, via=jobs.SSH("n1"), port=4000)


@pytest.fixture
def queue(cluster: FakeKubernetes) -> Iterator[Callable[[int], None]]:
    """Let so many pods have a place; all again after the test."""
    yield lambda places: cluster.control(places=places)
    if cluster.process.poll() is None:
        cluster.control(places=1000, forbid=[], ttl=1e9)


async def test_pods_without_a_place_are_waited_for_and_a_cancel_leaves_nothing(
    cluster: FakeKubernetes, queue: Callable[[int], None]
) -> None:
    """H13: in the queue; a place that becomes free is used, however late."""
    queue(1)
    with trio.fail_after(HANG_SECONDS):
        async with trio.open_nursery() as nursery:

            async def enter() -> None:
                async with job(2):
                    pytest.fail("there is one place")

            nursery.start_soon(enter)
            await until(lambda: cluster.running() == 1)
            nursery.cancel_scope.cancel()
        assert cluster.everything() == []
        queue(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_one_waits_then, cluster, partial(queue, 1))
            async with job(2) as hosts:
                assert len(hosts) == 2


async def until_one_waits_then(cluster: FakeKubernetes, act: Callable[[], None]) -> None:
    await until(lambda: cluster.running() >= 1 and "Unschedulable" in str(cluster.listed("pods")))
    act()


async def test_pod_that_ends_while_others_are_waited_for_is_told(
    cluster: FakeKubernetes, queue: Callable[[int], None]
) -> None:
    """H13: pod killed while it starts; its last words are told, nothing of the others is left."""
    queue(1)
    async with trio.open_nursery() as nursery:

        def kill() -> None:
            (running,) = [one for one in cluster.listed("pods") if one["status"]["phase"] == "Running"]
            cluster.call("POST", f"/fake/{running['metadata']['name']}/node", {})

        nursery.start_soon(until_one_waits_then, cluster, kill)
        text = await refused(job(2))
    assert "cannot be a host" in text
    assert "The node was low on resource: memory." in text


async def test_image_that_cannot_be_pulled_is_told() -> None:
    text = await refused(job(2, image="example.org/nothing:1"))
    assert "ImagePullBackOff: Back-off pulling image" in text
    assert "example.org/nothing:1" in text


async def test_what_is_not_of_this_run_is_left_as_it_is(cluster: FakeKubernetes) -> None:
    """H13: 409 is refused in words; what this run had made before it came is deleted."""
    path = "/api/v1/namespaces/ml/secrets"
    manifest = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "exp7"}, "data": {"key": "b3du"}}
    before = cluster.call("POST", path, manifest)
    text = await refused(job(1, name="exp7"))
    assert "must not exist before, and Secret exp7 does in the namespace ml" in text
    assert cluster.listed("secrets") == [before]
    assert cluster.everything() == ["secrets/exp7"]
    cluster.call("DELETE", f"{path}/exp7", {"propagationPolicy": "Background"})


async def test_what_the_api_server_refuses_is_said_in_its_words(
    cluster: FakeKubernetes, queue: Callable[[int], None]
) -> None:
    """H13: rights that are missing, a namespace that is not there, a template that is none."""
    for forbid, words in (
        (["POST", "secrets"], 'User "u" cannot post resource "secrets"'),
        (["GET", "pods"], 'User "u" cannot get resource "pods"'),
        (["PATCH", "secrets"], 'cannot be given their tokens: secrets is forbidden: User "u"'),
        (["PATCH", "pods"], 'cannot be given their tokens: pods is forbidden: User "u"'),
    ):
        cluster.control(forbid=[forbid])
        if forbid == ["GET", "pods"]:  # then it cannot see either that they are gone
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(limits, "KUBERNETES_END_SECONDS", 0.5)
                assert words in await refused(job(1))
            cluster.control(forbid=[])
            await until(lambda: not cluster.everything())
        else:
            assert words in await refused(job(1)), forbid
    cluster.control(forbid=[])
    assert 'namespaces "other" not found' in await refused(job(1, namespace="other"))
    assert "is invalid" in await refused(job(1, pod_template={"spec": {"nodeselector": {}}}))


async def test_what_is_missing_here_is_said(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "pass interface=" in await refused(job(1, interface=None))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "needs the configuration of a cluster" in await refused(job(1))
    monkeypatch.setitem(sys.modules, "kr8s.asyncio", None)
    assert "pip install 'trimesh-actors[kubernetes]'" in await refused(job(1))


def test_program_that_was_killed_leaves_nothing(cluster: FakeKubernetes, queue: Callable[[int], None]) -> None:
    """H2: agents end by their lease; then the pods have ended, and what made them deletes itself with all it owns."""
    cluster.control(ttl=0.0)
    text = f"jobs.KubernetesJob(2, image={IMAGE!r}, interface='127.0.0.1')"
    check_killed_program(text, hosts=2, gpus=1)

    async def wait_gone() -> None:
        with trio.fail_after(HANG_SECONDS):
            await until(lambda: not cluster.everything())

    trio.run(wait_gone)


async def test_watch_that_ends_is_begun_again(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    """PW-2: a pod that was killed while nothing watched is seen by the next list."""
    monkeypatch.setattr(limits, "KUBERNETES_WATCH_SECONDS", 1.0)
    monkeypatch.setattr(limits, "KUBERNETES_RETRY_SECONDS", 1.5)
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with job(1):
            await trio.sleep(1.6)
            cluster.on_pod(0, "eviction")
            await trio.sleep_forever()
    (lost,) = leaves(caught.value)
    assert isinstance(lost, HostLost)


async def test_keys_of_the_configuration_are_not_left_in_files(
    cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A configuration may hold a certificate and its key itself, which OpenSSL reads from files only."""
    authority = Authority(time.time())
    credentials = authority.credentials(ProcId(7), time.time())
    said = json.loads(cluster.config.read_text())
    encoded = {"client-certificate-data": credentials.chain, "client-key-data": credentials.key}
    said["users"][0]["user"] |= {key: base64.b64encode(value).decode() for key, value in encoded.items()}
    pem = base64.b64encode(credentials.authority).decode()
    said["clusters"][0]["cluster"]["certificate-authority-data"] = pem
    (tmp_path / "config").write_text(json.dumps(said))
    (tmp_path / "files").mkdir()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    assert "namespaces" in await refused(job(1, namespace="other"))
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("stage", ["queued", "running"])
async def test_api_server_that_is_gone(
    stage: str, cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """H13: hosts that run go on without it; one that waits for them ends in words; what may be left is said."""
    monkeypatch.setattr(limits, "KUBERNETES_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(limits, "KUBERNETES_END_SECONDS", 0.5)
    own = FakeKubernetes(tmp_path / "own")
    monkeypatch.setenv("KUBECONFIG", str(own.config))
    try:
        with trio.fail_after(HANG_SECONDS):
            if stage == "running":
                async with (
                    job(2) as hosts,
                    hosts.spawn_procs({"gpus": 1}) as procs,
                    procs.spawn("workers", Worker) as workers,
                ):
                    own.close()
                    assert list(await workers.double.call(3)) == [6, 6]
            else:
                own.control(places=0)
                async with trio.open_nursery() as nursery:

                    async def close() -> None:
                        await until(lambda: len(own.listed("pods")) == 2)
                        own.close()

                    nursery.start_soon(close)
                    assert "the API server cannot be reached" in await refused(job(2))
    finally:
        own.close()
    assert "kubectl delete jobset,job,service,secret,pod -l trimesh-actors/run=" in caplog.text
