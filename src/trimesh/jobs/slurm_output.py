"""PURE: parsers of the output of Slurm's commands (scontrol, squeue, sinfo): job states, queue, nodes.

The launcher requests text, one line a record (`scontrol -o`), whose form is the same since Slurm 22.05. Sites may wrap
a command so that it writes JSON, which is parsed, too. Its fields have changed twice since 22.05:

    22.05     job_state "PENDING"      numbers 120, null             node state "down", state_flags ["DRAIN"]
    23.02     job_state "PENDING"      {"set": true, "number": 120}  node state ["DOWN", "DRAIN"]
    23.11 on  job_state ["PENDING"]    the same, with "infinite"     the same

Output of an unknown form gives the state "", which counts as the end of the job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

ALIVE: Final = frozenset(("RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING"))
"""States in which processes of a job may run. Any other state, even an unknown one, counts as the end of the job."""

_REASONS: Final = {
    "BOOT_FAIL": "node failed",
    "CANCELLED": "cancelled",
    "DEADLINE": "time limit",
    "NODE_FAIL": "node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time limit",
}
_FIELD: Final = re.compile(r"(?:^|\s)([A-Za-z][\w/:.]*)=(\S*)")
_GRANTED: Final = re.compile(r"trimesh-job (\d+)((?: \S+)+)")
_DURATION: Final = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_UNKNOWN: Final = ("", "None", "(null)", "N/A", "Unknown")

QUEUE_FORMAT: Final = "%i|%P|%T|%r|%S"
"""Output format of squeue: number, partition, state, reason, expected start."""


class JobState(msgspec.Struct, frozen=True):
    """State of a job as Slurm reports it.

    Attributes:
        state: Slurm's name of the state: "RUNNING", "NODE_FAIL"; "" if Slurm does not know the job.
        why: Slurm's reason, or "".
        run_seconds, limit_seconds: Run time and time limit; None if Slurm does not report it, or there is no limit.
    """

    state: str
    why: str = ""
    run_seconds: float | None = None
    limit_seconds: float | None = None

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE

    @property
    def reason(self) -> str:
        """Reason of the loss of this ended job's hosts; see `HostLost.reason`."""
        return _REASONS.get(self.state, "agent exit")

    @property
    def text(self) -> str:
        """Description for messages."""
        why = "" if self.why in _UNKNOWN else f" ({self.why})"
        return f"Slurm says that the job is {self.state}{why}" if self.state else "Slurm does not know the job any more"


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of a record of `scontrol -o show`; if a field occurs twice, its first value."""
    found = dict[str, str]()
    for name, value in _FIELD.findall(line):
        found.setdefault(name, value)
    return found


def job_state(text: str, *, now: float = 0.0) -> JobState:
    """Return the state in the output of `scontrol show job`. A job with components has ended once one of them has.

    Args:
        text: Output: one line for each component, or JSON.
        now: Unix time, from which the run time is computed: JSON has only the start. 0 leaves the run time out.
    """
    states = list[JobState]()
    if is_json(text):
        for job in jobs_in(text):
            run = None if job.start is None or not now else max(now - job.start, 0.0)
            states.append(JobState(job.state, job.why, run, job.limit_seconds))
    else:
        for line in text.splitlines():
            fields = fields_of(line)
            if "JobState" in fields:
                # a state may come with flags: CANCELLED+COMPLETING, or "CANCELLED by 1000" of other commands
                state = re.split(r"[+ ]", fields["JobState"])[0]
                run, limit = (seconds_of(fields.get(name, "")) for name in ("RunTime", "TimeLimit"))
                states.append(JobState(state, fields.get("Reason", ""), run, limit))
    dead = [one for one in states if not one.is_alive]
    return (dead or states or [JobState("")])[0]


def seconds_of(text: str) -> float | None:
    """Parse a duration of Slurm, such as "2-04:00:00" or "59:59", to seconds; None for UNLIMITED and the like."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


class QueuedJob(msgspec.Struct, frozen=True):
    """Job in the queue, as squeue reports it.

    Attributes:
        number: Job id, without the `+n` of a component.
        partition, state, why, start: As Slurm writes them; `start` is the expected start, or "".
    """

    number: str
    partition: str
    state: str
    why: str
    start: str

    def text(self, ahead: int | None) -> str:
        """Return a description for messages.

        Args:
            ahead: Number of jobs ahead of it in its partition; None if unknown.
        """
        why = "" if self.why in _UNKNOWN else f" ({self.why})"
        place = "" if ahead is None else f", {ahead} {'job' if ahead == 1 else 'jobs'} ahead of it in {self.partition}"
        start = f", to start at {self.start}" if self.start else ""
        return f"Slurm job {self.number} is {self.state}{why}{place}{start}"


def queued_job(text: str) -> QueuedJob | None:
    """Return the first job in the output of squeue, by `QUEUE_FORMAT` or as JSON; None if there is none."""
    if is_json(text):
        for job in jobs_in(text):
            return QueuedJob(str(job.number), job.partition, job.state, job.why, job.start_text)
        return None
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == len(QUEUE_FORMAT.split("|")):
            number, partition, state, why, start = fields
            return QueuedJob(number.partition("+")[0], partition, state, why, "" if start in _UNKNOWN else start)
    return None


def ahead_of(text: str, number: str) -> int | None:
    """Return the number of jobs ahead of one in a list of job ids sorted by squeue; None if it is not in the list."""
    before = set[str]()
    for line in text.split():
        found = line.partition("+")[0]
        if found == number:
            return len(before)
        before.add(found)
    return None


def node_words(text: str) -> str:
    """Return "STATE (reason)" of a node from `scontrol -o show node`, or from JSON of it or of sinfo; "" if unknown."""
    if is_json(text):
        found = nodes_in(text)
        state, why = (found[0].state, found[0].why) if found else ("", "")
    else:
        state = fields_of(text).get("State", "")
        said = re.search(r"\sReason=(.*?)(?: \[|$| \w+=)", text.strip())  # contains blanks, unlike values of `_FIELD`
        why = said[1] if said else ""
    return f"{state} ({why})" if state and why not in _UNKNOWN else state


def node_address(text: str) -> str:
    """Return the address of a node from `scontrol -o show node`; "" if it has none."""
    fields = fields_of(text)
    return fields.get("NodeAddr") or fields.get("NodeHostName", "")


def granted(line: str) -> tuple[str, tuple[str, ...]] | None:
    """Parse the line `trimesh-job ID NODES...` that the launcher's command prints in its allocation; None for others.

    Returns:
        The job id, and a list of nodes for each component of the job.
    """
    found = _GRANTED.fullmatch(line.strip())
    return None if found is None else (found[1], tuple(found[2].split()))


def last_words(lines: Sequence[str]) -> str:
    """Join the output lines of a command of Slurm to one message, without prefixes such as `srun: error: `."""
    return "; ".join(re.sub(r"^(salloc|srun|scontrol): (error: |fatal: )?", "", line) for line in lines if line.strip())


# ---- JSON of Slurm's commands, of any version since 22.05 ------------------------------------------------------------

_YEAR_9999: Final = 253_370_764_800.0


class JobText(msgspec.Struct, frozen=True):
    """One job in JSON output.

    Attributes:
        number: Job id; 0 if missing.
        partition, state, why: As Slurm writes them; "" if missing.
        start: Unix time of its start, past or expected; None if missing.
        limit_seconds: Time limit; None without one.
    """

    number: int
    partition: str
    state: str
    why: str
    start: float | None
    limit_seconds: float | None

    @property
    def start_text(self) -> str:
        """`start` as Slurm writes a time, in UTC, or ""."""
        if self.start is None or not 0 < self.start < _YEAR_9999:
            return ""
        return f"{datetime.fromtimestamp(self.start, UTC):%Y-%m-%dT%H:%M:%SZ}"


class NodeText(msgspec.Struct, frozen=True):
    """One node, or group of nodes, in JSON output.

    Attributes:
        state, why: As Slurm writes them; "" if missing.
    """

    state: str
    why: str


def is_json(text: str) -> bool:
    """Return whether the output of a command is JSON."""
    return text.lstrip().startswith("{")


def jobs_in(text: str) -> list[JobText]:
    """Parse the jobs in JSON of Slurm; an empty list for other text."""
    return [_job(one) for one in _listed(text, "jobs")]


def nodes_in(text: str) -> list[NodeText]:
    """Parse the nodes, or sinfo's groups of nodes, in JSON of Slurm; an empty list for other text."""
    return [_node(one) for name in ("nodes", "sinfo") for one in _listed(text, name)]


def _listed(text: str, name: str) -> list[Mapping[str, Any]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError):
        return []
    return [table for one in _list(found.get(name)) if (table := _table(one)) is not None]


def _list(value: Any) -> list[Any]:
    return msgspec.convert(value, list[Any]) if isinstance(value, list) else []


def _table(value: Any) -> dict[str, Any] | None:
    return msgspec.convert(value, dict[str, Any]) if isinstance(value, dict) else None


def _job(job: Mapping[str, Any]) -> JobText:
    start, limit = _number(job.get("start_time")), _number(job.get("time_limit"))
    return JobText(
        int(_number(job.get("job_id")) or 0),
        _text(job.get("partition")),
        _word(job.get("job_state")),
        _text(job.get("state_reason")),
        start or None,
        None if not limit else limit * 60,
    )


def _node(node: Mapping[str, Any]) -> NodeText:
    why = node.get("reason")
    group = _table(node.get("node"))  # sinfo since 23.02: {"node": {"state": [...]}, "reason": {"description": ...}}
    state = node.get("state") if group is None else group.get("state")
    told = _table(why)
    why = why if told is None else told.get("description")
    words = [_word(state), *_words(state)[1:], *_words(node.get("state_flags"))]
    return NodeText("+".join(dict.fromkeys(word for word in words if word)), _text(why))


def _words(value: Any) -> list[str]:
    return [one.upper() for one in _list(value) if isinstance(one, str)]


def _word(value: Any) -> str:
    """Return a state in upper case: JSON has a string, or a list of the state and its flags."""
    if isinstance(value, str):
        return value.upper()
    return (_words(value) or [""])[0]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    table = _table(value)
    if table is not None:
        if not table.get("set") or table.get("infinite"):
            return None
        value = table.get("number")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
