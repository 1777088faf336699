"""What a job on Kubernetes applies, checked by the published schemas."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

pytest.importorskip("yaml")
pytest.importorskip("kubernetes_validate")

import jsonschema
import kubernetes_validate
import yaml
from tests.jobs.pods.jobset_schema import KUBERNETES, check_manifest

from trimesh.jobs.kubernetes.cluster import RELAY_PLACE, place_of
from trimesh.jobs.kubernetes.job import (
    FIRST_LABEL,
    INDEX_LABEL,
    KubernetesJob,
    PodsOfRun,
    checked_name,
    checked_template,
    manifests_of,
    more_manifests,
    relay_manifests,
    yaml_text,
)

TEMPLATE = {
    "metadata": {"labels": {"team": "ml"}, "annotations": {"note": "yes"}},
    "spec": {
        "nodeSelector": {"gpu": "h100"},
        "securityContext": {"runAsUser": 1000, "fsGroup": 2000},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [
            {"name": "log", "image": "fluent"},
            {
                "name": "trimesh",
                "image": "own",
                "env": [{"name": "A", "value": "1"}],
                "resources": {"limits": {"cpu": 4}},
            },
        ],
        "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    },
}


def made(has_jobset: bool = True, **said: Any) -> list[dict[str, Any]]:
    pods = PodsOfRun(**{"count": 4, "image": "example.org/ml:1", **said})
    return list(manifests_of(pods, name="exp7", run="r1", address=("10.0.0.7:4123",), has_jobset=has_jobset))


def job_spec(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    spec = manifests[0]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"] if manifests[0]["kind"] == "JobSet" else spec


@rows("version", KUBERNETES)
@rows("has_jobset", [True, False])
@rows(
    "said",
    [
        {},
        {"resources": {"nvidia.com/gpu": 8, "memory": "64Gi"}},
        {"template": TEMPLATE, "image": None},
        {"template": TEMPLATE, "queue": "research"},
        {"count": 1000},
    ],
)
def test_manifests_are_what_the_schemas_say(version: str, has_jobset: bool, said: dict[str, Any]) -> None:
    kinds = []
    for one in made(has_jobset, **said):
        check_manifest(one, version)
        kinds.append(one["kind"])

    assert kinds == (["JobSet", "Secret"] if has_jobset else ["Job", "Service", "Secret"])


@pytest.mark.parametrize("version", KUBERNETES)
def test_relay_pod_has_of_the_template_what_lets_it_run(version: str) -> None:
    """H30: no devices, volumes or further containers; a Service leads to it alone."""
    job, service = relay_manifests(PodsOfRun(4, None, TEMPLATE, {"nvidia.com/gpu": 8}), name="exp7", run="r1")
    for one in (job, service):
        check_manifest(one, version)
    pod = job["spec"]["template"]
    (relay,) = pod["spec"]["containers"]

    assert relay["image"] == "own"
    assert "nvidia.com/gpu" not in str(relay["resources"])
    assert "volumes" not in pod["spec"]
    assert [pod["spec"][key] for key in ("nodeSelector", "securityContext", "tolerations")] == [
        TEMPLATE["spec"][key] for key in ("nodeSelector", "securityContext", "tolerations")
    ]
    assert pod["metadata"]["annotations"] == {"note": "yes"}
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert not service["spec"]["selector"].items() <= job_spec(made())["template"]["metadata"]["labels"].items()
    assert place_of(pod) == RELAY_PLACE
    shown = KubernetesJob(1, image="a", via="port-forward").manifests()
    assert [one["metadata"]["name"] for one in shown] == ["trimesh-run-relay"] * 2 + ["trimesh-run"] * 2


@pytest.mark.parametrize("version", KUBERNETES)
def test_pods_that_come_later_are_those_of_a_job_of_their_own(version: str) -> None:
    """H27: they say their places, and have a Secret that is theirs."""
    pods = PodsOfRun(count=2, template=TEMPLATE, queue="research")
    (job, secret) = more_manifests(pods, name="exp7-4", run="r1", address=("10.0.0.7:4123",), first=4)
    for one in (job, secret):
        check_manifest(one, version)
        assert one["metadata"]["name"] == "exp7-4"
    (first,) = made(image=None, template=TEMPLATE, queue="research")[:1]
    of_first = job_spec([first])
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert {key: job["spec"][key] for key in of_first if key not in ("completions", "parallelism", "template")} == {
        key: of_first[key] for key in of_first if key not in ("completions", "parallelism", "template")
    }
    template = job["spec"]["template"]
    assert template["spec"]["containers"] == of_first["template"]["spec"]["containers"]
    assert template["spec"]["volumes"][1]["secret"]["secretName"] == "exp7-4"
    labels = {**template["metadata"]["labels"], INDEX_LABEL: "1"}
    assert labels[FIRST_LABEL] == "4"
    assert place_of({"metadata": {"labels": labels}}) == 5
    assert place_of({"metadata": {"labels": {**labels, FIRST_LABEL: "x"}}}) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda one: one["spec"].update(replicas=3),
        lambda one: one["spec"]["replicatedJobs"][0].update(parallelism=3),
        lambda one: one["spec"]["failurePolicy"].update(maxRestarts="0"),
        lambda one: one["spec"]["replicatedJobs"][0]["template"]["spec"].update(completionmode="Indexed"),
        lambda one: one["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].pop("containers"),
        lambda one: one["metadata"].update(name="a" * 60),
    ],
)
def test_schemas_refuse_what_is_not_theirs(spoil: Any) -> None:
    (jobset, _) = made()
    spoil(jobset)

    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_manifest(jobset)


@pytest.mark.parametrize("has_jobset", [True, False], ids=["jobset", "job"])
def test_failed_pods_are_left_alone_and_take_no_other_with_them(has_jobset: bool) -> None:
    """KM-2: so a lost host is one failure, about which the mesh decides."""
    manifests = made(has_jobset)
    spec = job_spec(manifests)

    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["backoffLimitPerIndex"] == 0
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert manifests[0]["spec"].get("failurePolicy", {"maxRestarts": 0}) == {"maxRestarts": 0}
    assert manifests[0]["spec"]["ttlSecondsAfterFinished"] > 0


def test_every_object_says_whose_it_is_and_none_has_a_token() -> None:
    for has_jobset in (True, False):
        manifests = made(has_jobset)
        pod = job_spec(manifests)["template"]
        for metadata in [*(one["metadata"] for one in manifests), pod["metadata"]]:
            assert metadata["labels"]["trimesh-actors/run"] == "r1"
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "trimesh"
        assert not {"data", "stringData"} & set(manifests[-1])
        assert "trimesh-join" not in json.dumps(manifests)


def test_agent_joins_by_a_file_of_the_secret() -> None:
    spec = job_spec(made(resources={"nvidia.com/gpu": 8}))["template"]["spec"]
    (agent,) = spec["containers"]
    mounts = {one["name"]: one["mountPath"] for one in agent["volumeMounts"]}
    volumes = {one["name"]: one for one in spec["volumes"]}

    assert agent["command"][:4] == ["trimesh", "host", "join", "10.0.0.7:4123"]
    token_file = agent["command"][agent["command"].index("--token-file") + 1]
    assert token_file == f"{mounts['trimesh-tokens']}/$(JOB_COMPLETION_INDEX)"
    assert volumes["trimesh-tokens"]["secret"] == {"secretName": "exp7", "optional": True, "defaultMode": 0o400}
    assert agent["resources"] == {"requests": {"nvidia.com/gpu": 8}, "limits": {"nvidia.com/gpu": 8}}
    assert {"readinessProbe", "livenessProbe"} <= set(agent)
    assert mounts["trimesh-shm"] == "/dev/shm"
    assert spec["automountServiceAccountToken"] is False


def test_template_keeps_what_it_says_and_is_not_changed() -> None:
    before = json.dumps(TEMPLATE)
    pod = job_spec(made(template=TEMPLATE, image="new", resources={"cpu": 8}))["template"]
    log, agent = pod["spec"]["containers"]

    assert json.dumps(TEMPLATE) == before
    assert log == {"name": "log", "image": "fluent"}
    assert (agent["image"], agent["env"], agent["resources"]["limits"]) == (
        "new",
        [{"name": "A", "value": "1"}],
        {"cpu": 8},
    )
    assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert pod["metadata"]["annotations"] == {"note": "yes"}
    assert pod["spec"]["volumes"][0]["name"] == "data"
    # files of a Secret belong to root, and to the group of the pod
    tokens = next(one for one in pod["spec"]["volumes"] if one["name"] == "trimesh-tokens")
    assert tokens["secret"]["defaultMode"] == 0o440
    own_shm = {"spec": {"containers": [{"volumeMounts": [{"name": "s", "mountPath": "/dev/shm"}]}]}}
    mounts = job_spec(made(template=own_shm))["template"]["spec"]["containers"][0]["volumeMounts"]
    assert [one["name"] for one in mounts] == ["s", "trimesh-tokens", "trimesh-state"]


@pytest.mark.parametrize(
    ("template", "image", "words"),
    [
        (None, None, "needs image="),
        ({"containers": []}, "a", "metadata and spec, as a Pod, got containers"),
        (
            {"spec": {"containers": [{"name": "a", "command": ["x"], "args": []}]}},
            "a",
            "must not set command and args of the container .a.",
        ),
        ({"spec": {"restartPolicy": "Always"}}, "a", "leave restartPolicy at Never, got 'Always'"),
        ({"spec": {"containers": [{"name": "a"}]}}, None, "must have an image: set it in pod_template, or pass image="),
    ],
)
def test_template_that_cannot_be_is_refused_in_words(template: Any, image: str | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_template(template, image)


def test_other_refusals() -> None:
    with pytest.raises(TypeError, match="a mapping with metadata and spec"):
        checked_template(["x"], "a")  # type: ignore[arg-type]
    for name in ("", "Exp", "7a", "a_b", "a-", "a" * 41):
        with pytest.raises(ValueError, match="1 to 40 characters"):
            checked_name(name)
    assert checked_name("exp-7") == "exp-7"
    assert checked_template({"spec": {"containers": [{"image": "b"}]}}, None)


def test_they_print_as_yaml_and_as_json() -> None:
    pods = PodsOfRun(2, "a:1", TEMPLATE)
    manifests = manifests_of(pods, name="exp7", run="r1", address=("[::1]:1",))

    assert list(yaml.safe_load_all(str(manifests))) == list(manifests)
    assert json.loads(manifests.json)["items"] == list(manifests)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.sampled_from(["yes", "No", "null", "1", "a-b", "~", "- a", "a: b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(PLAIN)
def test_yaml_is_read_as_what_was_written(value: Any) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


def test_variables_are_those_of_the_agent() -> None:
    """They replace those of the template of the same name; what Kubernetes would replace in values is escaped."""
    env = {"A": "2", "B": "$(HOME) $x"}
    for has_jobset in (True, False):
        manifests = made(has_jobset, template=TEMPLATE, env=env)
        containers = job_spec(manifests)["template"]["spec"]["containers"]
        [agent] = [one for one in containers if one["name"] == "trimesh"]
        assert agent["env"] == [{"name": "A", "value": "2"}, {"name": "B", "value": "$$(HOME) $x"}]
        assert ["env" in one for one in containers if one["name"] != "trimesh"] == [False]
