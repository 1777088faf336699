"""What commands of Slurm have written, recorded from 22.05, and states that a test cannot bring about."""

from __future__ import annotations

import msgspec
import pytest
from tests.rows import rows

from trimesh.jobs import SlurmJob
from trimesh.jobs.slurm_output import (
    ahead_of,
    fields_of,
    granted,
    job_state,
    last_words,
    node_address,
    node_words,
    queued_job,
    seconds_of,
)

JOB = (
    "JobId=1 JobName=tm UserId=root(0) GroupId=root(0) MCS_label=N/A Account=(null) QOS=(null) JobState={state} "
    "Reason={why} Dependency=(null) Requeue=1 Restarts=0 BatchFlag=0 Reboot=0 ExitCode=0:0 RunTime=00:00:00 "
    "TimeLimit=UNLIMITED AllocNode:Sid=localhost:2996 ReqB:S:C:T=0:0:*:* NodeList=n[1-2] TRES=cpu=2,node=2,billing=2\n"
)
NODE = "NodeName=n1 Arch=x86_64 Gres=(null) NodeAddr=127.0.0.1 NodeHostName=vm Port=53997 OS=Linux 6.18 #1 SMP"


@rows(
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


def test_job_with_components_is_as_the_first_that_has_ended() -> None:
    one, other = (JOB.format(state=state, why="None") for state in ("SUSPENDED", "RUNNING"))
    assert job_state(one + other).state == "SUSPENDED"
    one, other = (JOB.format(state=state, why="None") for state in ("TIMEOUT", "NODE_FAIL"))
    assert job_state("no record\n" + one + other).state == "TIMEOUT"
    timed = job_state("JobId=1 JobState=RUNNING Reason=None RunTime=00:05:00 TimeLimit=1-00:00:01 JobState=TIMEOUT")
    assert (timed.state, timed.run_seconds, timed.limit_seconds) == ("RUNNING", 300.0, 86_401.0)


def test_reasons_that_say_nothing_are_left_out() -> None:
    for why in ("", "None", "(null)", "N/A", "Unknown"):
        assert job_state(f"JobState=TIMEOUT Reason={why}").text == "Slurm says that the job is TIMEOUT"
        assert node_words(f"State=DOWN Reason={why} [root@x]") == "DOWN"
    assert node_words("NodeName=n2 State=IDLE\n   Reason=gone away Comment=x") == "IDLE (gone away)"
    assert node_address("NodeName=n1 NodeHostName=vm") == "vm"
    assert last_words(["scontrol: fatal: no", "salloc: is", " ", "job srun: error"]) == "no; is; job srun: error"


def test_records_and_lines_are_read() -> None:
    assert fields_of(JOB.format(state="RUNNING", why="None"))["NodeList"] == "n[1-2]"
    assert node_address(NODE) == "127.0.0.1"
    assert node_address("") == ""
    assert granted("trimesh-job 12 n[1-2]") == ("12", ("n[1-2]",))
    assert granted("trimesh-job 12 n1 n[2-3]") == ("12", ("n1", "n[2-3]"))
    assert granted("salloc: Granted job allocation 12") is None
    assert last_words(["salloc: error: no", "", "srun: x"]) == "no; x"


def of_json(version: str, state: object, why: str, flags: object = None) -> str:
    """What `squeue --json` writes of a job with a limit of 4 hours that has begun at second 1000."""

    def number(value: int) -> object:
        return value if version == "22.05" else {"set": True, "infinite": False, "number": value}

    listed = [state, *(flags or [])] if version in ("23.11", "24.05", "25.05") else state  # type: ignore[misc]
    job = {
        "job_id": 7,
        "job_state": listed,
        "state_reason": why,
        "partition": "h100",
        "start_time": number(1000),
        "time_limit": number(240),
        "nodes": "n[1-2]",
    }
    return msgspec.json.encode({"meta": {"Slurm": {"release": version}}, "errors": [], "jobs": [job]}).decode()


VERSIONS = ("22.05", "23.02", "23.11", "24.05", "25.05")


@rows("version", VERSIONS)
@rows(
    "state", ["NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "TIMEOUT", "REVOKED", "NEW_ONE", ""]
)
def test_json_of_each_version_says_the_same_as_text(version: str, state: str) -> None:
    """H13: an unknown state is dead, in any form."""
    said = job_state(of_json(version, state, "NodeDown", ["COMPLETING"]))
    text = job_state(JOB.format(state=state, why="NodeDown"))
    assert (said.is_alive, said.reason, said.text) == (False, text.reason, text.text)


@rows("version", VERSIONS)
def test_json_of_each_version_has_times_and_queues(version: str) -> None:
    said = job_state(of_json(version, "RUNNING", "None", ["RESIZING"]), now=1600.0)
    assert (said.is_alive, said.run_seconds, said.limit_seconds) == (True, 600.0, 14_400.0)
    queued = queued_job(of_json(version, "PENDING", "Priority"))
    assert queued is not None
    assert queued.text(2) == (
        "Slurm job 7 is PENDING (Priority), 2 jobs ahead of it in h100, to start at 1970-01-01T00:16:40Z"
    )


def one_job(**fields: object) -> str:
    return msgspec.json.encode({"jobs": [{"job_state": "RUNNING", **fields}]}).decode()


@rows(
    ("limit", "seconds"),
    [
        (0, None),
        (1, 60.0),
        (True, None),
        ("5", None),
        ({"set": True, "infinite": False, "number": 2}, 120.0),
        ({"set": True, "infinite": True, "number": 2}, None),
        ({"set": False, "infinite": False, "number": 2}, None),
        ({"number": 2}, None),
    ],
)
def test_numbers_in_json_may_be_tables(limit: object, seconds: float | None) -> None:
    assert job_state(one_job(time_limit=limit)).limit_seconds == seconds


def test_run_time_of_json_is_counted_from_its_start() -> None:
    started = one_job(start_time=1000)
    assert job_state(started).run_seconds is None
    assert job_state(started, now=1010.0).run_seconds == 10.0
    assert job_state(started, now=990.0).run_seconds == 0.0
    assert job_state(one_job(start_time=0), now=990.0).run_seconds is None
    assert job_state("\n" + started).state == "RUNNING"


def test_queue_of_json_leaves_out_what_is_missing() -> None:
    queued = queued_job(one_job(job_id=3, partition=4))
    assert queued is not None
    assert (queued.number, queued.partition, queued.why, queued.start) == ("3", "", "", "")
    for start in (-5, 253_370_764_800, 300_000_000_000):  # the year 9999 stands for no time
        queued = queued_job(one_job(start_time=start))
        assert queued is not None
        assert (queued.number, queued.start) == ("0", "")
    assert queued_job('{"jobs": []}') is None
    assert queued_job("a|line|of|something\n6|p|PENDING|None|2026-01-01T00:00:00\n") is not None


def test_nodes_of_json_have_each_state_once() -> None:
    mixed = '{"nodes": [{"state": ["down", "DRAIN", 3], "state_flags": ["DRAIN", "POWER"], "reason": "None"}, {}]}'
    assert node_words(mixed) == "DOWN+DRAIN+POWER"
    assert node_words('{"nodes": [{"state_flags": ["DRAIN"], "reason": 3}]}') == "DRAIN"
    assert node_words('{"nodes": [{"reason": "gone"}]}') == ""


@pytest.mark.parametrize("text", ["{", "{}", '{"jobs": 3}', '{"jobs": [3]}', '{"jobs": [{"job_state": {"a": 1}}]}'])
def test_json_of_no_known_form_is_a_job_that_does_not_live(text: str) -> None:
    assert not job_state(text).is_alive
    assert job_state(text).state == ""


def test_times_and_queues_are_read_from_text() -> None:
    assert [seconds_of(text) for text in ("00:05:00", "2-04:00:00", "59:59", "UNLIMITED", "Partition_Limit", "")] == [
        *(300.0, 187_200.0, 3599.0),
        *(None, None, None),
    ]
    queued = queued_job("5+0|debug|PENDING|Resources|N/A\n5+1|debug|PENDING|None|N/A\n")
    assert queued is not None
    assert queued.text(ahead_of("3\n4+0\n4+1\n5+0\n5+1\n", queued.number)) == (
        "Slurm job 5 is PENDING (Resources), 2 jobs ahead of it in debug"
    )
    assert queued.text(ahead_of("3\n", queued.number)) == "Slurm job 5 is PENDING (Resources)"
    late = queued_job("8|h100|PENDING|Priority|2026-11-25T17:00:00")
    assert late is not None
    assert late.text(1).endswith("1 job ahead of it in h100, to start at 2026-11-25T17:00:00")
    assert queued_job("") is None


def test_states_of_nodes_are_read_from_text_and_json() -> None:
    down = (
        "NodeName=n2 Arch=x86_64 State=DOWN*+DRAIN ThreadsPerCore=1 Reason=Not responding [slurm@2026-11-25T16:00:00]"
    )
    assert node_words(down) == "DOWN*+DRAIN (Not responding)"
    assert node_words(NODE) == ""
    old = '{"nodes": [{"name": "n2", "state": "down", "state_flags": ["DRAIN"], "reason": "Not responding"}]}'
    new = '{"nodes": [{"name": "n2", "state": ["DOWN", "DRAIN"], "reason": "Not responding"}]}'
    groups = '{"sinfo": [{"node": {"state": ["DOWN", "DRAIN"]}, "reason": {"description": "Not responding"}}]}'
    assert [node_words(text) for text in (old, new, groups)] == ["DOWN+DRAIN (Not responding)"] * 3
    assert node_words("{}") == ""


def test_parts_with_resources_of_their_own_are_components() -> None:
    """Slurm hands an amount of memory on to the next component that says none: those come first."""
    parts = {"a": {"hosts": 2, "memory": "64G"}, "b": 1, "c": {"hosts": 3, "gpus": 0, "options": ["--constraint=x"]}}
    job = SlurmJob(parts, gpus=8, partition="h100", account="ml")
    assert job.parts == {"a": 2, "b": 1, "c": 3}
    assert [one.ranks for one in job.components("x")] == [(2,), (3, 4, 5), (0, 1)]
    alone = ["--job-name=x", "--ntasks-per-node=1", "--partition=h100", "--account=ml"]
    first, second, third = (set(one.options) - set(alone) for one in job.components("x"))
    assert first == {"--nodes=1", "--gpus-per-node=8"}
    assert second == {"--nodes=3", "--constraint=x"}
    assert third == {"--nodes=2", "--gpus-per-node=8", "--mem=64G"}
    assert job.salloc_options("x").count(":") == 2
    assert job == SlurmJob(parts, gpus=8, partition="h100", account="ml")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"a": {"gpus": 8}}, "must have a number of hosts"),
        ({"a": {"hosts": 1, "gpu": 8}}, "takes hosts, gpus, cpus, memory, partition, options"),
        ({"a": {"hosts": 1, "gpus": "8"}}, "got 'gpus': '8' in 'a'"),
        ({"a": {"hosts": 0}}, "at least 1 host"),
    ],
)
def test_wrong_parts_are_said(parts: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SlurmJob(parts)  # type: ignore[arg-type]


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
