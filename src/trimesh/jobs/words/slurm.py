"""What the commands of Slurm write, and which states of a job mean that it lives; PURE.

Text is read, one line a record (`scontrol -o`), which is the same from 22.05 to today. JSON is not: its fields have
changed twice since, and that of 22.05 leaves out no job.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

ALIVE: Final = frozenset(("RUNNING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "RESIZING"))
"""States of a job whose processes may run. Every other one, also one that nothing here knows, is the end of it."""

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
_GRANTED: Final = re.compile(r"trimesh-job (\d+) (\S+)")


class JobState(msgspec.Struct, frozen=True):
    """What Slurm says of a job.

    Attributes:
        state: In its word: "RUNNING", "NODE_FAIL"; "" where it does not know the job.
        why: In its words, or "".
    """

    state: str
    why: str = ""

    @property
    def is_alive(self) -> bool:
        """Whether its processes may run."""
        return self.state in ALIVE

    @property
    def reason(self) -> str:
        """What a host is lost by that this job has ended on; see `HostLost.reason`."""
        return _REASONS.get(self.state, "agent exit")

    @property
    def text(self) -> str:
        """The same in words."""
        why = f" ({self.why})" if self.why not in ("", "None") else ""
        return f"Slurm says that the job is {self.state}{why}" if self.state else "Slurm does not know the job any more"


def fields_of(line: str) -> dict[str, str]:
    """Return the fields of a record that `scontrol -o show` has written; of fields named twice the first one."""
    found = dict[str, str]()
    for name, value in _FIELD.findall(line):
        found.setdefault(name, value)
    return found


def job_state(text: str) -> JobState:
    """Return what `scontrol -o show job` says; of a job of several parts the first one that does not live."""
    states = list[JobState]()
    for line in text.splitlines():
        fields = fields_of(line)
        if "JobState" in fields:
            # a state may come with flags: CANCELLED+COMPLETING, or "CANCELLED by 1000" of other commands
            state = re.split(r"[+ ]", fields["JobState"])[0]
            states.append(JobState(state, fields.get("Reason", "")))
    dead = [one for one in states if not one.is_alive]
    return (dead or states or [JobState("")])[0]


def node_address(text: str) -> str:
    """Return the address of a node, as `scontrol -o show node` says it; "" where it does not."""
    fields = fields_of(text)
    return fields.get("NodeAddr") or fields.get("NodeHostName", "")


def granted(line: str) -> tuple[str, str] | None:
    """Return number and nodes of the allocation that a line of ours says, or None."""
    found = _GRANTED.fullmatch(line.strip())
    return None if found is None else (found[1], found[2])


def last_words(lines: Sequence[str]) -> str:
    """Return what a command of Slurm has written, without the names of the command."""
    return "; ".join(re.sub(r"^(salloc|srun|scontrol): (error: |fatal: )?", "", line) for line in lines if line.strip())
