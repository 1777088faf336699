"""Hosts that are pods of Kubernetes. Entering such a job loads the Kubernetes client, nothing earlier does."""

from trimesh.jobs.kubernetes.job import KubernetesJob, Manifests

__all__ = ["KubernetesJob", "Manifests"]
