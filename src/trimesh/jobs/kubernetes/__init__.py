"""Hosts that are pods of Kubernetes; no package of Kubernetes is loaded before such a job is entered."""

from trimesh.jobs.kubernetes.job import KubernetesJob, Manifests

__all__ = ["KubernetesJob", "Manifests"]
