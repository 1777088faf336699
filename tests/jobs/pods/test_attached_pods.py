"""Hosts that are pods which others made (H31), on the strict API server of the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from tests.jobs.pods.cluster import IMAGE, NAMESPACE, FakeKubernetes, Object, missing
from tests.patience import HANG_SECONDS
from tests.spawner_template import IS_POSSIBLE

from trimesh import Actor, HostLost, MeshErrorGroup, SpawnError, endpoint, leaves, limits

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1]),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]

INDEX = "batch.kubernetes.io/job-completion-index"
JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeKubernetes]:
    one = FakeKubernetes(tmp_path_factory.mktemp("kubernetes"), are_copies=IS_POSSIBLE)
    yield one
    one.close()


@pytest.fixture(autouse=True)
def surroundings(cluster: FakeKubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.config))
    monkeypatch.setattr(limits, "AGENT_EXIT_SECONDS", 6.0)


def made_by_others(cluster: FakeKubernetes, name: str, count: int) -> None:
    """Make pods as an operator does, which know neither this program nor a token."""
    container: Object = {
        "name": "trimesh",
        "image": IMAGE,
        "command": [
            *("trimesh", "host", "join", "--token-file", "/run/tokens/$(JOB_COMPLETION_INDEX)"),
            *("--line", "0", "--wait", "600", "--state-file", "/run/state/agent"),
        ],
        "readinessProbe": {"exec": {"command": ["grep", "-q", "joined", "/run/state/agent"]}},
        "volumeMounts": [
            {"name": "tokens", "mountPath": "/run/tokens"},
            {"name": "state", "mountPath": "/run/state"},
        ],
    }
    secret = {"secretName": f"{name}-tokens", "optional": True, "defaultMode": 0o400}
    volumes = [{"name": "tokens", "secret": secret}, {"name": "state", "emptyDir": {}}]
    spec: Object = {"containers": [container], "volumes": volumes, "restartPolicy": "Never"}
    job: Object = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {
            "completions": count,
            "parallelism": count,
            "completionMode": "Indexed",
            "ttlSecondsAfterFinished": 600,
            "template": {"metadata": {"labels": {"team": name}}, "spec": spec},
        },
    }
    cluster.call("POST", JOBS, job)


@pytest.fixture
def pods(cluster: FakeKubernetes) -> Iterator[Callable[[str, int], None]]:
    """Makes pods, which are deleted after the test."""
    names = list[str]()

    def make(name: str, count: int) -> None:
        names.append(name)
        made_by_others(cluster, name, count)

    yield make
    for name in names:
        cluster.call("DELETE", f"{JOBS}/{name}", {"propagationPolicy": "Background"})
    while cluster.named("pods"):  # each has some time to end
        time.sleep(0.02)


def attached(name: str, hosts: Any = 2, **more: Any) -> Any:
    more = {"interface": "127.0.0.1", "secret": f"{name}-tokens", "namespace": NAMESPACE, **more}
    return jobs.KubernetesJob.attach(hosts, selector=f"team={name}", **more)


class Worker(Actor):
    @endpoint
    async def double(self, number: int) -> int:
        return 2 * number

    @endpoint
    async def sleep(self) -> None:
        await trio.sleep_forever()


@pytest.mark.daily
async def test_pods_of_others_are_hosts(cluster: FakeKubernetes, pods: Callable[[str, int], None]) -> None:
    """H31, H7: ranks are indices; tokens and addresses come by the Secret, which is gone after; the pods complete."""
    pods("train", 2)
    with trio.fail_after(HANG_SECONDS):
        async with attached("train", {"a": 1, "b": 1}) as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
            names = {pod["metadata"]["labels"][INDEX]: pod["metadata"]["name"] for pod in cluster.listed("pods")}
            assert hosts.names == (names["0"], names["1"])
            workers = await procs.spawn("workers", Worker)
            assert list(await workers.double.call(2)) == [4, 4]
            assert set(cluster.call("GET", f"{SECRETS}/train-tokens")["data"]) == {"0", "1", *names.values()}
            text = str([pod["spec"] for pod in cluster.listed("pods")])
            assert "trimesh-join" not in text
        assert "train-tokens" not in cluster.named("secrets")
        while cluster.running():  # noqa: ASYNC110 - of another process
            await trio.sleep(0.02)
    assert [pod["status"]["phase"] for pod in cluster.listed("pods")] == ["Succeeded"] * 2


async def test_secret_of_others_and_rank_by_another_label(
    cluster: FakeKubernetes, pods: Callable[[str, int], None]
) -> None:
    """H31: what this run has put into the Secret is removed, and nothing else."""
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "own-tokens"}, "data": {"x": "eA=="}}
    cluster.call("POST", SECRETS, secret)
    pods("own", 2)
    for pod in cluster.listed("pods"):
        index = int(pod["metadata"]["labels"][INDEX])
        change = {"metadata": {"annotations": {"example.org/rank": str(1 - index)}}}
        if pod["metadata"]["name"].startswith("own-"):
            cluster_patch(cluster, pod["metadata"]["name"], change)
    with trio.fail_after(HANG_SECONDS):
        async with attached("own", rank="example.org/rank") as hosts:
            found = {pod["metadata"]["name"]: pod["metadata"]["labels"][INDEX] for pod in cluster.listed("pods")}
            assert [found[name] for name in hosts.names] == ["1", "0"]
    assert cluster.call("GET", f"{SECRETS}/own-tokens")["data"] == {"x": "eA=="}
    cluster.call("DELETE", f"{SECRETS}/own-tokens", {"propagationPolicy": "Background"})


def cluster_patch(cluster: FakeKubernetes, pod: str, change: Object) -> None:
    import json
    import urllib.request

    from tests.jobs.pods.cluster import TOKEN

    request = urllib.request.Request(
        f"{cluster.url}/api/v1/namespaces/{NAMESPACE}/pods/{pod}",
        method="PATCH",
        data=json.dumps(change).encode(),
        headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/merge-patch+json"},
    )
    urllib.request.urlopen(request).close()


async def test_lost_pod_of_others_is_one_failure(cluster: FakeKubernetes, pods: Callable[[str, int], None]) -> None:
    """H31, H4: with the reason of Kubernetes; a pod that has ended is no host for the next program."""
    pods("lost", 2)
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(MeshErrorGroup) as caught:
            async with attached("lost") as hosts, hosts.spawn_procs({"gpus": 1}) as procs:
                workers = await procs.spawn("workers", Worker)
                name = next(name for name in cluster.named("pods") if name == hosts.names[1])
                cluster.call("POST", f"/fake/{name}/oom")
                await workers.sleep.call()
        [lost] = leaves(caught.value)
        assert isinstance(lost, HostLost)
        assert lost.reason == "out of memory"
        with trio.move_on_after(0.5) as scope:
            async with attached("lost"):
                pytest.fail("a pod that has ended was taken")
        assert scope.cancelled_caught


async def test_pods_without_a_rank_are_refused(cluster: FakeKubernetes, pods: Callable[[str, int], None]) -> None:
    """H31: the label that was looked for is named."""
    pods("odd", 1)
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with attached("odd", 1, rank="example.org/none"):
            pytest.fail("it cannot be entered")
    [error] = leaves(caught.value)
    assert isinstance(error, SpawnError)
    assert "must have its rank as example.org/none" in str(error)
    assert "odd-tokens" not in cluster.named("secrets")
