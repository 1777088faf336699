"""Hosts of a mesh: jobs that start agents on them, and who may be one (`identity`). `import trimesh` leaves it out."""

from trimesh.jobs.host_door import OpenDoor, open_door
from trimesh.jobs.job import Job
from trimesh.jobs.job_file import default, named_job
from trimesh.jobs.launcher import AgentExit, AgentOrder, Launcher, StartedAgent
from trimesh.jobs.local import LocalJob
from trimesh.jobs.slurm import SlurmJob
from trimesh.jobs.ssh import SSHJob
from trimesh.shape.output_line import OutputLine

__all__ = [
    "AgentExit",
    "AgentOrder",
    "Job",
    "Launcher",
    "LocalJob",
    "OpenDoor",
    "OutputLine",
    "SSHJob",
    "SlurmJob",
    "StartedAgent",
    "default",
    "named_job",
    "open_door",
]
