"""`@simulate`: one test, many seeds, each in a world of its own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast

import attrs

from trimesh import limits
from trimesh.testing.simulated.progress import STEPS_MAX
from trimesh.testing.simulated.seeded_run import SeededOptions

F = TypeVar("F", bound=Callable[..., Awaitable[None]])

OPTIONS: Final = "__trimesh_simulate__"
"""Attribute of a test function that `simulate` has decorated."""

SEEDS_DEFAULT: Final = 20
"""Seeds of a test that does not say how many: enough to see a race that every tenth schedule has."""


@attrs.frozen
class Simulated:
    """What `simulate` was told.

    Attributes:
        seeds: How many.
        sometimes: Conditions that at least one seed must reach.
        options: For each run.
    """

    seeds: int
    sometimes: tuple[str, ...]
    options: SeededOptions


def simulate(
    *,
    seeds: int = SEEDS_DEFAULT,
    hosts: int = 0,
    per_host: Mapping[str, int] | None = None,
    sometimes: tuple[str, ...] = (),
    steps_max: int = STEPS_MAX,
    **spawn: Any,
) -> Callable[[F], F]:
    """Run an async test under many seeds, each in a simulated mesh of its own, as one test item.

    A seed decides everything that is drawn: the order of tasks, ids, how long messages are under way, faults by chance.
    A failure names its seed and the command that repeats it: `pytest path::test --mesh-seed=0x2a`.

    Args:
        seeds: How many; 0, 1, 2, ... `--mesh-seeds` overrides it.
        hosts: How many hosts there are in the fixture `host_mesh`, on which `mesh` is spawned; 0 for this one alone.
        per_host: Extent of the fixture `mesh` on each host; by default `{"gpus": 2}`.
        sometimes: Names given to `chaos.sometimes` of which each must be reached under some seed.
        steps_max: Steps of tasks after which a run counts as hanging (`HangError`).
        **spawn: Further arguments of `spawn_procs` for the fixture `mesh`: grace, supervision, setup.

    The test may ask for the fixtures `mesh`, `host_mesh`, `faults`, `fault_log` and `chaos`, and for those of pytest.
    It needs the plugin `trimesh.testing.plugin`, which an installed trimesh brings.

    Raises:
        TypeError: The test is no coroutine function.
        ValueError: `seeds` is below 1, or `hosts` below 0.
    """
    if seeds < 1:
        raise ValueError(f"simulate needs at least one seed, got seeds={seeds!r}")
    if not 0 <= hosts <= limits.JOB_HOSTS_MAX:
        raise ValueError(f"hosts= is a number from 0 to {limits.JOB_HOSTS_MAX}, got {hosts!r}")
    simulated = Simulated(
        seeds, tuple(sometimes), SeededOptions(dict(per_host or {"gpus": 2}), spawn, steps_max, hosts)
    )

    def decorate(test: F) -> F:
        if not inspect.iscoroutinefunction(cast("Any", test)):
            raise TypeError(f"simulate decorates an async test, got {test!r}")
        setattr(test, OPTIONS, simulated)
        return test

    return decorate
