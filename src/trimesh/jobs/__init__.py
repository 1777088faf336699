"""Jobs: hosts from SSH, Slurm, Kubernetes or an open door, and their identities. Import `trimesh.jobs` explicitly."""

from trimesh.jobs.code import synced
from trimesh.jobs.external_hosts import OpenDoor, open_door
from trimesh.jobs.job import Job
from trimesh.jobs.job_file import KEPT, default, named_job
from trimesh.jobs.kept import AttachedJob, KeptJob, attach, extend, keep, kept, stop
from trimesh.jobs.kubernetes import KubernetesJob
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher, StartedAgent
from trimesh.jobs.local import LocalJob
from trimesh.jobs.pki import OwnPKI
from trimesh.jobs.slurm import SlurmJob
from trimesh.jobs.ssh import SSH, SSHJob
from trimesh.shape.value_mesh import OutputLine

__all__ = [
    "KEPT",
    "SSH",
    "AgentExit",
    "AgentOrder",
    "AttachedJob",
    "Job",
    "KeptJob",
    "KubernetesJob",
    "Launcher",
    "LocalJob",
    "OpenDoor",
    "OutputLine",
    "OwnPKI",
    "SSHJob",
    "SlurmJob",
    "StartedAgent",
    "attach",
    "default",
    "extend",
    "keep",
    "kept",
    "named_job",
    "open_door",
    "stop",
    "synced",
]
