"""JSON that commands of Slurm write (`squeue --json`, `sinfo --json`), of any version since 22.05; PURE.

    22.05     job_state "PENDING"      numbers 120, null             node state "down", state_flags ["DRAIN"]
    23.02     job_state "PENDING"      {"set": true, "number": 120}  node state ["DOWN", "DRAIN"]
    23.11 on  job_state ["PENDING"]    the same, with "infinite"     the same

What is not of any known form counts as unknown: a state of "", which no job lives in.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_YEAR_9999: Final = 253_370_764_800.0


class JobText(msgspec.Struct, frozen=True):
    """One job.

    Attributes:
        number: Of it; 0 where it is not said.
        partition, state, why: In the words of Slurm; "" where they are not said.
        start: When it has started, or is expected to, in seconds since the epoch; None where that is not said.
        limit_seconds: How long it may run; None without a limit.
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
    """One node.

    Attributes:
        state, why: In the words of Slurm; "" where they are not said.
    """

    state: str
    why: str


def is_json(text: str) -> bool:
    """Return whether what a command has written is JSON."""
    return text.lstrip().startswith("{")


def jobs_in(text: str) -> list[JobText]:
    """Return the jobs that are told of; none where it is no JSON of Slurm."""
    return [_job(one) for one in _listed(text, "jobs")]


def nodes_in(text: str) -> list[NodeText]:
    """Return the nodes that are told of, or the groups of nodes of sinfo; none where it is no JSON of Slurm."""
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
    """Return a state: text, or the first of a list, whose others are flags."""
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
