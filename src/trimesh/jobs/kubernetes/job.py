"""Hosts that are pods, as their user writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trimesh.jobs.job import Job, checked_hosts
from trimesh.jobs.kubernetes.manifests import Manifests, PodsOfRun, checked_name, checked_template, manifests_of
from trimesh.jobs.launcher import Launcher


def _checked_name(name: str | None) -> str | None:
    return None if name is None else checked_name(name)


@attrs.frozen
class KubernetesJob(Job):
    """Hosts that are pods: `async with KubernetesJob(4, image="...", resources={"nvidia.com/gpu": 8}) as hosts:`.

    The cluster is that of the current context of kubectl, or the one in which this program is a pod. Entering applies
    `manifests()` and waits until all pods run, for as long as queues and images take. Leaving deletes what was applied,
    and a cancel of the entry does, too. Pods dial this program by TCP, so they have to reach `interface`.

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
