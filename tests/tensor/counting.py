"""Counts what ranks execute, for tests that show what they have learnt."""

from __future__ import annotations

from typing import Any

import trimesh

_counted = {"rules": 0, "commands": 0}


def count_rules() -> None:
    """Let a rank count the operators that run by the rules."""
    from trimesh.tensor.rules.engine import RuleEngine

    RuleEngine.run = _counting(RuleEngine.run, "rules")  # type: ignore[method-assign]


def count_commands() -> None:
    """Let a rank count the commands that it executes one by one."""
    from trimesh.tensor.rank.rank import Rank

    Rank.execute = _counting(Rank.execute, "commands")  # type: ignore[method-assign]


def _counting(function: Any, what: str) -> Any:
    def counted(*args: Any) -> Any:
        _counted[what] += 1
        return function(*args)

    return counted


def _take(what: str) -> int:
    count, _counted[what] = _counted[what], 0
    return count


async def rules_run(procs: Any) -> list[int]:
    """Return how many operators each rank has run by the rules since it was asked last."""
    return await _taken(procs, "rules")


async def commands_run(procs: Any) -> list[int]:
    """Return how many commands each rank has executed one by one since it was asked last, with those that ask."""
    return await _taken(procs, "commands")


async def _taken(procs: Any, what: str) -> list[int]:
    with procs.activate():
        return list((await trimesh.call_on_shard_and_fetch(_take, what)).values())
