"""What commands of Slurm have written, recorded from 22.05, and states that a test cannot bring about."""

from __future__ import annotations

import pytest

from trimesh.jobs import SlurmJob
from trimesh.jobs.words.slurm import fields_of, granted, job_state, last_words, node_address

JOB = (
    "JobId=1 JobName=tm UserId=root(0) GroupId=root(0) MCS_label=N/A Account=(null) QOS=(null) JobState={state} "
    "Reason={why} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0 RunTime=00:00:00 "
    "TimeLimit=UNLIMITED AllocNode:Sid=localhost:2996 ReqB:S:C:T=0:0:*:* NodeList=n[1-2] TRES=cpu=2,node=2,billing=2\n"
)
NODE = "NodeName=n1 Arch=x86_64 Gres=(null) NodeAddr=127.0.0.1 NodeHostName=vm Port=53997 OS=Linux 6.18 #1 SMP"


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("NODE_FAIL", "node failed"),
        ("BOOT_FAIL", "node failed"),
        ("OUT_OF_MEMORY", "out of memory"),
        ("DEADLINE", "time limit"),
        ("TIMEOUT", "time limit"),
        ("PREEMPTED", "preempted"),
        ("CANCELLED", "cancelled"),
        ("COMPLETED", "agent exit"),
        ("REVOKED", "agent exit"),
        ("SOMETHING_NEW", "agent exit"),
        ("COMPLETING", "agent exit"),
        ("PENDING", "agent exit"),
    ],
)
def test_state_that_is_not_known_to_live_is_dead(state: str, reason: str) -> None:
    said = job_state(JOB.format(state=state, why="NodeDown"))
    assert (said.is_alive, said.reason, said.text) == (False, reason, f"Slurm says that the job is {state} (NodeDown)")


def test_running_job_lives_and_a_forgotten_one_does_not() -> None:
    assert job_state(JOB.format(state="RUNNING", why="None")).is_alive
    assert job_state(JOB.format(state="CANCELLED+COMPLETING", why="None")).state == "CANCELLED"
    assert (job_state("").is_alive, job_state("").text) == (False, "Slurm does not know the job any more")
    several = JOB.format(state="RUNNING", why="None") + JOB.format(state="NODE_FAIL", why="None")
    assert job_state(several).state == "NODE_FAIL"


def test_records_and_lines_are_read() -> None:
    assert fields_of(JOB.format(state="RUNNING", why="None"))["NodeList"] == "n[1-2]"
    assert node_address(NODE) == "127.0.0.1"
    assert node_address("") == ""
    assert granted("trimesh-job 12 n[1-2]") == ("12", "n[1-2]")
    assert granted("salloc: Granted job allocation 12") is None
    assert last_words(["salloc: error: no", "", "srun: x"]) == "no; x"


def test_arguments_are_those_that_were_asked_for() -> None:
    job = SlurmJob({"a": 1, "b": 3}, gpus=8, time="4:00:00", partition="h100", options=("--exclusive",))
    assert job.salloc_options("x") == [
        "--job-name=x",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=4:00:00",
        "--partition=h100",
        "--exclusive",
    ]
    assert job == SlurmJob({"a": 1, "b": 3}, gpus=8, time="4:00:00", partition="h100", options=["--exclusive"])
