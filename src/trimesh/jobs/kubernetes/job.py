"""`KubernetesJob`: hosts that are pods, and the manifests that a run applies; PURE.

    JobSet --> one Indexed Job, a pod for each host      (Service of its own, for the names of the pods)
    Job + Service                                        where the cluster has no JobSet
    Secret --> a file for each host, `/run/trimesh/tokens/INDEX`
    Job + Secret                                         for hosts that come later

KM-1 No token is in a manifest: the Secret is empty until the pods wait for it.
KM-2 A pod that fails is not made again by its Job, and takes no other pod with it: its host is lost, and the mesh
     decides. So all hosts are indices of one Job with a limit of failures for each index; a Job of a JobSet that fails
     ends the others.
KM-3 Finished objects are deleted by Kubernetes after a while, if the program is not there to do it.
KM-4 Pods that come later, as more hosts or in the place of lost ones, are those of a Job of their own, which nothing
     owns: the JobSet or Job of the beginning may have finished, and deleted itself, before they do.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import attrs

from trimesh import limits
from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.launcher import Launcher


def _checked_name(name: str | None) -> str | None:
    return None if name is None else checked_name(name)


@attrs.frozen
class KubernetesJob(Job):
    """Hosts that are pods: `async with KubernetesJob(4, image="...", resources={"nvidia.com/gpu": 8}) as hosts:`.

    The cluster is that of the current context of kubectl, or the one in which this program is a pod. Entering applies
    `manifests()` and waits until all pods run, for as long as queues and images take. Leaving, or a cancel
    while entering, deletes the applied objects. Pods dial this program by TCP, so they have to reach `interface`.

    Attributes:
        hosts: How many pods, or a mapping of mesh names to numbers.
        image: Of the agent's container: the versions of Python and trimesh of this program, and its extras `cli` and
            `hosts`. None where `pod_template` says it.
        pod_template: Metadata and spec of each pod, as a mapping: node selectors, volumes, further containers. The
            container "trimesh", else the first one, is that of the agent, which says its command and probes.
        namespace: None takes that of the context.
        resources: What each pod asks for, as requests and limits: `{"nvidia.com/gpu": 8, "memory": "64Gi"}`.
        name: Of the objects; None takes one that no other run has.
        queue: A queue of Kueue.
        interface: Where this program listens for pods; None takes the address of the route to the API server.
        port: 0 lets the system choose.
        advertise: What pods dial, `host` or `host:port`, where they reach this program by another address.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, see `OwnPKI`, at paths where `pod_template` mounts them; None lets
            the job make its own.
        insecure: "I understand" does without TLS: whoever is in the network reads all of it, and can change it.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    image: str | None = attrs.field(default=None, kw_only=True)
    pod_template: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)
    namespace: str | None = attrs.field(default=None, kw_only=True)
    resources: Mapping[str, str | int] | None = attrs.field(default=None, kw_only=True)
    name: str | None = attrs.field(default=None, kw_only=True, converter=_checked_name)
    queue: str | None = attrs.field(default=None, kw_only=True)
    interface: str | None = attrs.field(default=None, kw_only=True)
    port: int = attrs.field(default=0, kw_only=True)
    advertise: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)

    def __attrs_post_init__(self) -> None:
        """Refuse what can be no pod."""
        checked_template(self.pod_template, self.image)

    @property
    def pods(self) -> PodsOfRun:
        """The pods of a run."""
        template, resources = self.pod_template or {}, self.resources or {}
        pki = () if self.pki is None else self.pki.arguments
        return PodsOfRun(sum(self.parts.values()), self.image, template, resources, self.queue, pki)

    def manifests(self, *, address: str = "ADDRESS:PORT", has_jobset: bool = True) -> Manifests:
        """Return what entering the block applies; touches nothing. `print(job.manifests())` writes YAML.

        Args:
            address: Where this program would listen.
            has_jobset: Whether the cluster has JobSets; else there is a Job with a Service.
        """
        name = self.name or "trimesh-run"
        return manifests_of(self.pods, name=name, run="RUN", address=(address,), has_jobset=has_jobset)

    def launcher(self) -> Launcher:
        """See `Job.launcher`."""
        from trimesh.jobs.kubernetes.launcher import KubernetesLauncher  # noqa: PLC0415 - not before it is entered

        return KubernetesLauncher(self)


# ---- manifests -------------------------------------------------------------------------------------------------------

# Manifests that a run of a `KubernetesJob` applies: the pods of its hosts, their Jobs and the Secret of tokens; PURE.

Manifest = dict[str, Any]

JOBSET_VERSION: Final = "jobset.x-k8s.io/v1alpha2"
RUN_LABEL: Final = "trimesh-actors/run"
FIRST_LABEL: Final = "trimesh-actors/first"
"""Of pods that come later: the place of the first pod of their Job among all of the run."""

INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
AGENT: Final = "trimesh"
"""Name of the container of the agent."""

TOKENS_PATH: Final = "/run/trimesh/tokens"
STATE_PATH: Final = "/run/trimesh/state"
_STATE_FILE: Final = f"{STATE_PATH}/agent"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - a path inside of the container
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME_CHARACTERS_MAX: Final = 40
"""Names of pods are that of the JobSet, "-hosts-0-", an index of up to four digits and a suffix of six; a name of a
host has 63 characters."""


class Manifests(tuple[Manifest, ...]):
    """Objects of Kubernetes in the order in which they are made; `print(manifests)` writes them as YAML."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return them as documents of YAML, for `kubectl apply -f -`."""
        return "---\n".join(yaml_text(one) for one in self)

    @property
    def json(self) -> str:
        """The same as one List in JSON."""
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(self)}, indent=2)


@attrs.frozen
class PodsOfRun:
    """The pods of one run.

    Attributes:
        count: One for each host.
        image: Of the agent's container; None leaves it to the template.
        template: Metadata and spec of the pods, see `KubernetesJob.pod_template`.
        resources: What each of them asks for.
        queue: A queue of Kueue.
        pki: What tells agents of certificates of the user's: arguments of `trimesh host join`.
    """

    count: int
    image: str | None = None
    template: Mapping[str, Any] = {}
    resources: Mapping[str, str | int] = {}
    queue: str | None = None
    pki: tuple[str, ...] = ()


def checked_name(name: str) -> str:
    """Return the name of a run.

    Raises:
        ValueError: It cannot be part of the names of its pods.
    """
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARACTERS_MAX:
        raise ValueError(
            f"name must be up to {_NAME_CHARACTERS_MAX} characters a-z, 0-9 and -, the first a letter, got {name!r}"
        )
    return name


def checked_template(template: Mapping[str, Any] | None, image: str | None) -> Mapping[str, Any] | None:
    """Return the template of a job's pods.

    Raises:
        TypeError, ValueError: It is not a pod template, or sets fields reserved for the agent; or there is no image.
    """
    if template is None:
        if image is None:
            raise ValueError("a KubernetesJob needs image=, an image with trimesh and its extras cli and hosts")
        return None
    if not isinstance(template, Mapping):
        raise TypeError(f"pod_template must be a mapping with metadata and spec, got {template!r}")
    unknown = set(template) - {"apiVersion", "kind", "metadata", "spec"}
    if unknown:
        raise ValueError(f"pod_template has metadata and spec, as a Pod has, got {', '.join(sorted(unknown))}")
    spec = _part(template, "spec")
    agent = _agent_of(_list(spec, "containers") or [{}])
    said = [key for key in ("command", "args", "livenessProbe", "readinessProbe") if key in agent]
    if said:
        raise ValueError(
            f"the container {agent.get('name', AGENT)!r} of pod_template is that of the agent, which says "
            f"{' and '.join(said)} itself: leave that out, or name another container {AGENT!r}"
        )
    if spec.get("restartPolicy", "Never") != "Never":
        raise ValueError(
            f"pod_template must leave restartPolicy at Never, got {spec['restartPolicy']!r}: a host that has ended is "
            "lost, and its token is used up"
        )
    if image is None and not agent.get("image"):
        raise ValueError("the agent's container of pod_template needs an image, or say image=")
    return template


def manifests_of(
    pods: PodsOfRun, *, name: str, run: str, address: tuple[str, ...], has_jobset: bool = True
) -> Manifests:
    """Return the manifests of one run.

    Args:
        pods: Of it.
        name: Of its objects; see `checked_name`.
        run: A word that no other run has, by which its objects are found.
        address: Where the program listens, in the order in which pods try it.
        has_jobset: Whether the cluster has JobSets; else it is a Job with a Service.
    """
    labels = _labels(run)
    job = _job_spec(pods, _pod_template(pods, name, labels, address, has_jobset=has_jobset))
    metadata = _metadata(pods, name, labels)
    secret = _secret(name, labels)
    if has_jobset:
        jobs = [{"name": "hosts", "replicas": 1, "template": {"metadata": {"labels": labels}, "spec": job}}]
        spec = {"replicatedJobs": jobs, "failurePolicy": {"maxRestarts": 0}, **_LIFE}
        jobset = {"apiVersion": JOBSET_VERSION, "kind": "JobSet", "metadata": metadata, "spec": spec}
        return Manifests((jobset, secret))
    service: Manifest = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "selector": {RUN_LABEL: run}, "publishNotReadyAddresses": True},
    }
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {**job, **_LIFE}}
    return Manifests((whole, service, secret))


def more_manifests(pods: PodsOfRun, *, name: str, run: str, address: tuple[str, ...], first: int) -> Manifests:
    """Return the manifests for pods of a run that come later (KM-4); the Job owns the Secret.

    Args:
        pods: Those that come.
        name: Of what they come in.
        run: See `manifests_of`.
        address: See `manifests_of`.
        first: The place of the first of them among the pods of the run.
    """
    labels = {**_labels(run), FIRST_LABEL: str(first)}
    spec = {**_job_spec(pods, _pod_template(pods, name, labels, address, has_jobset=True)), **_LIFE}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(pods, name, labels), "spec": spec}
    return Manifests((job, _secret(name, labels)))


_LIFE: Final[Mapping[str, Any]] = {"ttlSecondsAfterFinished": int(limits.POD_KEPT_SECONDS)}
"""See KM-3."""


def _labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/managed-by": "trimesh", RUN_LABEL: run}


def _job_spec(pods: PodsOfRun, template: Manifest) -> Manifest:
    return {
        "completions": pods.count,
        "parallelism": pods.count,
        "completionMode": "Indexed",
        "backoffLimitPerIndex": 0,
        "template": template,
    }


def _metadata(pods: PodsOfRun, name: str, labels: Mapping[str, str]) -> Manifest:
    queue = {} if pods.queue is None else {"kueue.x-k8s.io/queue-name": pods.queue}
    return {"name": name, "labels": {**labels, **queue}}


def _secret(name: str, labels: Mapping[str, str]) -> Manifest:
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}


def agent_name(template: Mapping[str, Any]) -> str:
    """Return the name of the container of the agent in the pods of a template."""
    return str(_agent_of(_list(_part(template, "spec"), "containers") or [{}]).get("name", AGENT))


def _agent_of(containers: list[Manifest]) -> Manifest:
    """Return the container of the agent: the one with its name, else the first."""
    return next((one for one in containers if one.get("name") == AGENT), containers[0])


def _pod_template(
    pods: PodsOfRun, name: str, labels: Mapping[str, str], address: tuple[str, ...], *, has_jobset: bool
) -> Manifest:
    given = copy.deepcopy(dict(pods.template))
    metadata, spec = _part(given, "metadata"), _part(given, "spec")
    containers = _list(spec, "containers") or [{}]
    agent = _agent_of(containers)
    _be_agent(agent, pods, address)
    secret = {"secretName": name, "optional": True, "defaultMode": 0o440 if _has_group(spec) else 0o400}
    volumes = [
        {"name": "trimesh-tokens", "secret": secret},
        {"name": "trimesh-state", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts = [
        {"name": "trimesh-tokens", "mountPath": TOKENS_PATH, "readOnly": True},
        {"name": "trimesh-state", "mountPath": STATE_PATH},
    ]
    # 64 MiB of a container are too little for programs that share memory by files, as loaders of torch do
    if all(one.get("mountPath") != _SHARED_MEMORY for one in _list(agent, "volumeMounts")):
        volumes.append({"name": "trimesh-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "trimesh-shm", "mountPath": _SHARED_MEMORY})
    agent["volumeMounts"] = [*_list(agent, "volumeMounts"), *mounts]
    whole: Manifest = {
        "terminationGracePeriodSeconds": int(limits.POD_GRACE_SECONDS),
        "automountServiceAccountToken": False,  # an agent asks Kubernetes for nothing
        "enableServiceLinks": False,
        **({} if has_jobset else {"subdomain": name}),
        **spec,
        "restartPolicy": "Never",
        "containers": containers,
        "volumes": [*_list(spec, "volumes"), *volumes],
    }
    of_pods: Manifest = {"labels": {**_part(metadata, "labels"), **labels}}
    if metadata.get("annotations"):
        of_pods["annotations"] = metadata["annotations"]
    return {"metadata": of_pods, "spec": whole}


def _has_group(spec: Manifest) -> bool:
    """Tell whether files of volumes are given to a group, in which the agent is."""
    return _part(spec, "securityContext").get("fsGroup") is not None


def _part(of: Mapping[str, Any], key: str) -> Manifest:
    return cast("Manifest", of.get(key) or {})


def _list(of: Mapping[str, Any], key: str) -> list[Manifest]:
    return cast("list[Manifest]", of.get(key) or [])


def _be_agent(agent: Manifest, pods: PodsOfRun, address: tuple[str, ...]) -> None:
    agent.setdefault("name", AGENT)
    if pods.image is not None:
        agent["image"] = pods.image
    agent["command"] = [
        *("trimesh", "host", "join", *address),
        *("--token-file", f"{TOKENS_PATH}/$(JOB_COMPLETION_INDEX)"),  # a variable that each pod of such a Job has
        *("--line", "0", "--wait", f"{limits.POD_WAIT_SECONDS:g}", "--state-file", _STATE_FILE),
        *pods.pki,
    ]
    if pods.resources:
        of_agent = _part(agent, "resources")
        asked = dict(pods.resources)
        agent["resources"] = {
            **of_agent,
            **{kind: {**_part(of_agent, kind), **asked} for kind in ("requests", "limits")},
        }
    agent["readinessProbe"] = {"exec": {"command": ["grep", "-q", "joined", _STATE_FILE]}, "periodSeconds": 2}
    # The lease ends an agent that has lost its program. This ends one that does not run, when its program is gone, too.
    agent["livenessProbe"] = {
        "exec": {"command": ["sh", "-c", f"find {_STATE_FILE} -mmin -1 | grep -q ."]},
        "initialDelaySeconds": 60,
        "periodSeconds": 30,
        "failureThreshold": 2,
        "timeoutSeconds": 10,
    }


# ---- plain values as YAML, for people: blocks, and strings in double quotes, as JSON writes them ---------------------

_PLAIN: Final = re.compile(r"[A-Za-z][\w./-]*")
_WORDS: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""What YAML 1.1 takes for something else than text."""


def yaml_text(value: Any) -> str:
    """Return a value of mappings, lists, strings, numbers, booleans and None as one YAML document."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> Iterator[str]:
    match value:
        case {**items} if items:
            for key, item in items.items():
                yield from _item(f"{_scalar(key)}:", item, is_nested=not isinstance(item, list))
        case [*members] if members:
            for member in members:
                first, *rest = _lines(member)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
        case _:
            yield _scalar(value)


def _item(head: str, item: Any, *, is_nested: bool) -> Iterator[str]:
    if not isinstance(item, dict | list) or not item:
        yield f"{head} {_scalar(cast('Any', item))}"
        return
    yield head
    for line in _lines(cast("Any", item)):
        yield f"  {line}" if is_nested else line


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    written = json.dumps(value, ensure_ascii=False)
    return "".join(one if one.isprintable() else f"\\U{ord(one):08x}" for one in written)
