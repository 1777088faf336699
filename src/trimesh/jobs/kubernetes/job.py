"""`KubernetesJob`: hosts that are pods, and the manifests that a run applies; PURE.

    JobSet --> one Indexed Job, a pod for each host      (Service of its own, for the names of the pods)
    Job + Service                                        where the cluster has no JobSet
    Secret --> a file for each host, `/run/trimesh/tokens/INDEX`
    Job + Secret                                         for further hosts
    Job + Service of one relay pod                       with via="port-forward"

KM-1 No token is in a manifest: the Secret is empty until the pods wait for it.
KM-2 A Job neither restarts a failed pod nor ends the others because of it: that host is lost, and the mesh decides. So
     all hosts are indices of one Job with `backoffLimitPerIndex: 0`; in a JobSet, a failed Job would end the others.
KM-3 If the program cannot delete its objects, Kubernetes does, `limits.POD_KEPT_SECONDS` after they have finished.
KM-4 Later pods, more hosts or replacements, belong to a Job of their own that has no owner: the first JobSet or Job may
     finish, and delete itself, before they end.
KM-5 A relay that has ended is started again: in its pod, or in another one at the same address, that of the Service.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import attrs

from trimesh import limits
from trimesh.jobs.job import Job, Pickle, checked_hosts
from trimesh.jobs.launcher import Launcher
from trimesh.jobs.pki import OwnPKI
from trimesh.jobs.ssh import SSH

if TYPE_CHECKING:
    from trimesh.jobs.kubernetes.attached import AttachedPods


AGENT: Final = "trimesh"
"""Name of the agent's container."""

PORT_FORWARD: Final = "port-forward"


def _checked_name(name: str | None) -> str | None:
    return None if name is None else checked_name(name)


def _checked_relay(_: object, __: object, via: Any) -> None:
    if via is not None and via != PORT_FORWARD and not isinstance(via, SSH):
        raise TypeError(f'via= takes "port-forward", a relay host, jobs.SSH("login"), or None, got {via!r}')


@attrs.frozen
class KubernetesJob(Job):
    """Hosts that are pods: `async with KubernetesJob(4, image="...", resources={"nvidia.com/gpu": 8}) as hosts:`.

    The cluster is that of kubectl's current context, or the one in which this program is a pod. Entering applies
    `manifests()` and waits until all pods run, for as long as queues and images take. Leaving, or a cancel while
    entering, deletes the applied objects. Pods dial this program by TCP: they must be able to reach `interface`, or the
    relay of `via`.

    Attributes:
        hosts: Number of pods, or a mapping of mesh names to numbers.
        image: Image of the agent's container. It needs the versions of Python and trimesh of this program, and the
            extras `cli` and `hosts`. None takes the image in `pod_template`.
        pod_template: Metadata and spec of each pod, as a mapping: node selectors, volumes, further containers. The
            container "trimesh", else the first one, runs the agent; trimesh sets its command and probes.
        namespace: Namespace of the objects; None takes that of the context.
        env: Environment variables of the agents and their processes, over those of `pod_template`; readable in the
            manifests: secrets belong into a Secret that `pod_template` names.
        resources: Requests and limits of each pod: `{"nvidia.com/gpu": 8, "memory": "64Gi"}`.
        name: Name of the objects; None makes a unique one.
        queue: Name of a Kueue queue.
        via: Relay, if pods cannot reach this program. "port-forward" runs one in a pod of its own, which this program
            reaches through the API server; `SSH` names a host that both reach.
        interface: Address at which this program, or its relay, listens for pods; None takes that of the route to the
            API server, or of the relay's default route.
        port: Port at which this program listens; 0 lets the system choose.
        advertise: Addresses that pods dial instead, `host` or `host:port`, for example of a gateway.
        pickle: "off" unpickles nothing in this program and its processes, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, see `OwnPKI`, at paths where `pod_template` mounts them; None makes
            certificates for this job.
        insecure: "I understand" turns TLS off: any machine in the network can read and change all traffic.
    """

    hosts: int | Mapping[str, int] = attrs.field(converter=checked_hosts)
    image: str | None = attrs.field(default=None, kw_only=True)
    pod_template: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)
    namespace: str | None = attrs.field(default=None, kw_only=True)
    resources: Mapping[str, str | int] | None = attrs.field(default=None, kw_only=True)
    name: str | None = attrs.field(default=None, kw_only=True, converter=_checked_name)
    queue: str | None = attrs.field(default=None, kw_only=True)
    via: SSH | Literal["port-forward"] | None = attrs.field(default=None, kw_only=True, validator=_checked_relay)
    interface: str | None = attrs.field(default=None, kw_only=True)
    port: int = attrs.field(default=0, kw_only=True)
    advertise: tuple[str, ...] = attrs.field(default=(), kw_only=True, converter=tuple)

    def __attrs_post_init__(self) -> None:
        """Refuse an invalid pod template, and an address beside a relay."""
        checked_template(self.pod_template, self.image)
        if self.via is not None and (self.port or self.advertise):
            raise ValueError(
                f"pods of a KubernetesJob with via= dial its relay, got port={self.port} and advertise="
                f"{self.advertise!r} for this program: leave them out"
            )
        if self.via == PORT_FORWARD and self.interface is not None:
            raise ValueError(
                'the relay of a KubernetesJob with via="port-forward" listens at the address of its pod, got interface='
                f"{self.interface!r}: leave it out"
            )

    @property
    def pods(self) -> PodsOfRun:
        """Description of the pods of a run."""
        template, resources = self.pod_template or {}, self.resources or {}
        pki = () if self.pki is None else self.pki.arguments
        return PodsOfRun(sum(self.parts.values()), self.image, template, resources, self.queue, pki, self.env)

    def manifests(self, *, address: str = "ADDRESS:PORT", has_jobset: bool = True) -> Manifests:
        """Return the objects that entering the block applies; changes nothing. `print(job.manifests())` writes YAML.

        Args:
            address: Address at which this program, or its relay, would listen.
            has_jobset: Whether the cluster has JobSets; otherwise a Job with a Service is used.
        """
        name = self.name or "trimesh-run"
        relay = relay_manifests(self.pods, name=name, run="RUN") if self.via == PORT_FORWARD else ()
        hosts = manifests_of(self.pods, name=name, run="RUN", address=(address,), has_jobset=has_jobset)
        return Manifests((*relay, *hosts))

    @staticmethod
    def attach(
        hosts: int | Mapping[str, int],
        *,
        selector: str,
        secret: str,
        namespace: str | None = None,
        container: str = AGENT,
        rank: str | None = None,
        interface: str | None = None,
        port: int = 0,
        advertise: Sequence[str] = (),
        pickle: Pickle | None = None,
        pki: OwnPKI | None = None,
        insecure: str = "",
        shared: bool = False,
    ) -> AttachedPods:
        """Return hosts that are pods which something else has made: a JobSet, Kueue, Volcano, an operator.

        `async with KubernetesJob.attach(4, selector="jobset.sigs.k8s.io/jobset-name=train", secret="tokens") as hosts:`

        The pods mount the Secret, as an optional volume, and run `trimesh host join --token-file FILE --line 0 --wait
        600`. FILE is the file of the volume with the name of their rank, or their own name. Entering waits until a pod
        of each rank from 0 on runs, then puts a token and the addresses of this program into the Secret. Leaving ends
        the agents, so the pods complete; what happens to them is up to their owner.

        Args:
            hosts: Number of pods, or a mapping of mesh names to numbers.
            selector: Label selector of these pods.
            secret: Name of the Secret; made, and deleted at the end, if there is none.
            namespace: Namespace of the pods; None takes that of the context.
            container: Name of the container that runs the agent.
            rank: Label or annotation with the rank of a pod; None tries those of Indexed Jobs and JobSets,
                StatefulSets, LeaderWorkerSets, Kubeflow's training operator and Volcano.
            interface: Address at which this program listens for pods; None takes that of the route to the API server.
            port: Port at which this program listens; 0 lets the system choose.
            advertise: Addresses that pods dial instead, `host` or `host:port`.
            pickle: "off" unpickles nothing in this program and its processes; None takes the setting.
            pki: Certificates of your own authority, see `OwnPKI`; None makes certificates for this job.
            insecure: "I understand" turns TLS off.
            shared: Let actors that get the hosts as an argument spawn on them.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        from trimesh.jobs.kubernetes.attached import AttachedPods  # noqa: PLC0415 - few programs need it

        return AttachedPods(
            hosts,
            selector=selector,
            secret=secret,
            namespace=namespace,
            container=container,
            rank=rank,
            interface=interface,
            port=port,
            advertise=advertise,
            pickle=pickle,
            pki=pki,
            insecure=insecure,
            shared=shared,
        )

    def launcher(self) -> Launcher:
        """See `Job.launcher`."""
        from trimesh.jobs.kubernetes.launcher import KubernetesLauncher  # noqa: PLC0415 - not before it is entered

        return KubernetesLauncher(self)


# ---- manifests -------------------------------------------------------------------------------------------------------

Manifest = dict[str, Any]

JOBSET_VERSION: Final = "jobset.x-k8s.io/v1alpha2"
RUN_LABEL: Final = "trimesh-actors/run"
RELAY_PORT: Final = 4180
"""Port of the relay in its pod, for hosts at the address of the pod, for the program at its loopback address."""

_RELAY: Final = "from trimesh.jobs.relay_program import main; import sys; main(sys.argv[1])"
_OF_RELAY: Final = (
    *("imagePullSecrets", "serviceAccountName", "securityContext"),
    *("nodeSelector", "tolerations", "affinity"),
)
"""Fields of `pod_template` that the relay pod has, too: it has no devices, volumes or further containers."""

_RELAY_RESOURCES: Final[Mapping[str, Any]] = {
    "requests": {"cpu": "100m", "memory": "64Mi"},
    "limits": {
        "memory": "512Mi"
    },  # 4096 connections (limits.RELAY_CONNECTIONS_MAX) with 64 KiB each, and an interpreter
}
_RESTARTS_MAX: Final = (1 << 31) - 1

RELAY_LABEL: Final = "trimesh-actors/relay"
"""On the relay pod."""

FIRST_LABEL: Final = "trimesh-actors/first"
"""On pods added later: the place of the first pod of their Job among all pods of the run."""

INDEX_LABEL: Final = "batch.kubernetes.io/job-completion-index"
TOKENS_PATH: Final = "/run/trimesh/tokens"
STATE_PATH: Final = "/run/trimesh/state"
_STATE_FILE: Final = f"{STATE_PATH}/agent"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - a path inside of the container
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NAME_CHARACTERS_MAX: Final = 40
"""A pod's name is the JobSet's, "-hosts-0-", an index of up to four digits and a suffix of six; a host name has at most
63 characters."""


class Manifests(tuple[Manifest, ...]):
    """Objects of Kubernetes in the order of their creation; `print(manifests)` writes them as YAML."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the objects as YAML documents, for `kubectl apply -f -`."""
        return "---\n".join(yaml_text(one) for one in self)

    @property
    def json(self) -> str:
        """The objects as one List in JSON."""
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(self)}, indent=2)


@attrs.frozen
class PodsOfRun:
    """The pods of one run.

    Attributes:
        count: Number of pods, one for each host.
        image: Image of the agent's container; None takes that of the template.
        template: Metadata and spec of the pods, see `KubernetesJob.pod_template`.
        resources: Requests and limits of each pod.
        queue: Name of a Kueue queue.
        pki: Arguments of `trimesh host join` that name the user's certificates.
        env: Environment variables of the agent's container.
    """

    count: int
    image: str | None = None
    template: Mapping[str, Any] = {}
    resources: Mapping[str, str | int] = {}
    queue: str | None = None
    pki: tuple[str, ...] = ()
    env: Mapping[str, str] = {}


def checked_name(name: str) -> str:
    """Return the name if it can be that of a run.

    Raises:
        ValueError: It cannot be part of the names of pods.
    """
    if not _NAME.fullmatch(name) or len(name) > _NAME_CHARACTERS_MAX:
        raise ValueError(
            f"name= must have 1 to {_NAME_CHARACTERS_MAX} characters a-z, 0-9 and -, begin with a letter and not end "
            f"with -, got {name!r}"
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
        raise ValueError(f"pod_template must have only metadata and spec, as a Pod, got {', '.join(sorted(unknown))}")
    spec = _part(template, "spec")
    agent = _agent_of(_list(spec, "containers") or [{}])
    said = [key for key in ("command", "args", "livenessProbe", "readinessProbe") if key in agent]
    if said:
        raise ValueError(
            f"pod_template must not set {' and '.join(said)} of the container {agent.get('name', AGENT)!r}, which runs "
            f"the agent: leave that out, or name another container {AGENT!r}"
        )
    if spec.get("restartPolicy", "Never") != "Never":
        raise ValueError(
            f"pod_template must leave restartPolicy at Never, got {spec['restartPolicy']!r}: an agent that has ended "
            "cannot join again, as its token is used up"
        )
    if image is None and not agent.get("image"):
        raise ValueError("the agent's container must have an image: set it in pod_template, or pass image=")
    return template


def manifests_of(
    pods: PodsOfRun, *, name: str, run: str, address: tuple[str, ...], has_jobset: bool = True
) -> Manifests:
    """Return the manifests of one run.

    Args:
        pods: The pods of the run.
        name: Name of its objects; see `checked_name`.
        run: Unique label value by which its objects are found.
        address: Addresses of the program, in the order in which pods try them.
        has_jobset: Whether the cluster has JobSets; otherwise the result is a Job with a Service.
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
    """Return the manifests for further pods of a run (KM-4).

    Args:
        pods: The further pods.
        name: Name of their Job and Secret.
        run: See `manifests_of`.
        address: See `manifests_of`.
        first: Place of the first of them among the pods of the run.
    """
    labels = {**_labels(run), FIRST_LABEL: str(first)}
    spec = {**_job_spec(pods, _pod_template(pods, name, labels, address, has_jobset=True)), **_LIFE}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(pods, name, labels), "spec": spec}
    return Manifests((job, _secret(name, labels)))


def relay_manifests(pods: PodsOfRun, *, name: str, run: str) -> Manifests:
    """Return the manifests of the relay pod of a run (KM-5).

    Args:
        pods: The hosts, whose image and template it takes.
        name, run: See `manifests_of`.
    """
    metadata = {"name": f"{name}-relay", "labels": _labels(run)}
    own = {**_labels(run), RELAY_LABEL: run}
    of_pods, given = _part(pods.template, "metadata"), _part(pods.template, "spec")
    agent = _agent_of(_list(given, "containers") or [{}])
    order = {
        "interface": "$(POD_IP)",
        "towards": "",
        "port": RELAY_PORT,
        "lease": limits.POD_RELAY_LEASE_SECONDS,
        "beat": limits.RELAY_BEAT_SECONDS,
        "connections": limits.RELAY_CONNECTIONS_MAX,
    }
    container: Manifest = {
        **{key: agent[key] for key in ("imagePullPolicy", "securityContext") if key in agent},
        "name": agent.get("name", AGENT),
        "image": pods.image or agent.get("image"),
        "command": ["python3", "-c", _RELAY, json.dumps(order)],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": RELAY_PORT}],
        "resources": _RELAY_RESOURCES,
    }
    spec: Manifest = {
        **{key: copy.deepcopy(given[key]) for key in _OF_RELAY if key in given},
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "OnFailure",
        "containers": [container],
    }
    template: Manifest = {"metadata": {"labels": {**_part(of_pods, "labels"), **own}}, "spec": spec}
    if of_pods.get("annotations"):
        template["metadata"]["annotations"] = dict(of_pods["annotations"])
    job = {"backoffLimit": _RESTARTS_MAX, "template": template, **_LIFE}
    service = {"selector": {RELAY_LABEL: run}, "ports": [{"port": RELAY_PORT}], "publishNotReadyAddresses": True}
    return Manifests(
        (
            {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        )
    )


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
    """Return the name of the agent's container in the pods of a template."""
    return str(_agent_of(_list(_part(template, "spec"), "containers") or [{}]).get("name", AGENT))


def _agent_of(containers: list[Manifest]) -> Manifest:
    """Return the agent's container: the one named `AGENT`, else the first."""
    return next((one for one in containers if one.get("name") == AGENT), containers[0])


def _pod_template(
    pods: PodsOfRun, name: str, labels: Mapping[str, str], address: tuple[str, ...], *, has_jobset: bool
) -> Manifest:
    given = copy.deepcopy(dict(pods.template))
    metadata, spec = _part(given, "metadata"), _part(given, "spec")
    containers = _list(spec, "containers") or [{}]
    agent = _agent_of(containers)
    _set_agent(agent, pods, address)
    secret = {"secretName": name, "optional": True, "defaultMode": 0o440 if _has_group(spec) else 0o400}
    volumes = [
        {"name": "trimesh-tokens", "secret": secret},
        {"name": "trimesh-state", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]
    mounts = [
        {"name": "trimesh-tokens", "mountPath": TOKENS_PATH, "readOnly": True},
        {"name": "trimesh-state", "mountPath": STATE_PATH},
    ]
    # The default of 64 MiB is too little for programs that share memory by files, such as torch's data loaders.
    if all(one.get("mountPath") != _SHARED_MEMORY for one in _list(agent, "volumeMounts")):
        volumes.append({"name": "trimesh-shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "trimesh-shm", "mountPath": _SHARED_MEMORY})
    agent["volumeMounts"] = [*_list(agent, "volumeMounts"), *mounts]
    whole: Manifest = {
        "terminationGracePeriodSeconds": int(limits.POD_GRACE_SECONDS),
        "automountServiceAccountToken": False,  # an agent sends no requests to Kubernetes
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
    """Return whether files of volumes belong to a group of the agent."""
    return _part(spec, "securityContext").get("fsGroup") is not None


def _part(of: Mapping[str, Any], key: str) -> Manifest:
    return cast("Manifest", of.get(key) or {})


def _list(of: Mapping[str, Any], key: str) -> list[Manifest]:
    return cast("list[Manifest]", of.get(key) or [])


def _set_agent(agent: Manifest, pods: PodsOfRun, address: tuple[str, ...]) -> None:
    agent.setdefault("name", AGENT)
    if pods.image is not None:
        agent["image"] = pods.image
    agent["command"] = [
        *("trimesh", "host", "join", *address),
        *("--token-file", f"{TOKENS_PATH}/$(JOB_COMPLETION_INDEX)"),  # set in each pod of an Indexed Job
        *("--line", "0", "--wait", f"{limits.POD_WAIT_SECONDS:g}", "--state-file", _STATE_FILE),
        *pods.pki,
    ]
    if pods.env:
        others = [one for one in _list(agent, "env") if one.get("name") not in pods.env]
        # Kubernetes would replace $(NAME) in a value by another variable.
        own = [{"name": name, "value": value.replace("$(", "$$(")} for name, value in pods.env.items()]
        agent["env"] = [*others, *own]
    if pods.resources:
        of_agent = _part(agent, "resources")
        asked = dict(pods.resources)
        agent["resources"] = {
            **of_agent,
            **{kind: {**_part(of_agent, kind), **asked} for kind in ("requests", "limits")},
        }
    agent["readinessProbe"] = {"exec": {"command": ["grep", "-q", "joined", _STATE_FILE]}, "periodSeconds": 2}
    # An agent that has lost its program ends by its lease. This probe also ends one that hangs or was stopped.
    agent["livenessProbe"] = {
        "exec": {"command": ["sh", "-c", f"find {_STATE_FILE} -mmin -1 | grep -q ."]},
        "initialDelaySeconds": 60,
        "periodSeconds": 30,
        "failureThreshold": 2,
        "timeoutSeconds": 10,
    }


# ---- plain values as readable YAML: blocks, and strings in double quotes, as in JSON ---------------------------------

_PLAIN: Final = re.compile(r"[A-Za-z][\w./-]*")
_WORDS: Final = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
"""Words that YAML 1.1 does not read as strings unless they are quoted."""


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
