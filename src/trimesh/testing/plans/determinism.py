"""Deterministic scheduling: one seed, one run. Only this module uses Trio's private scheduling hooks.

Trio runs the tasks of one tick in random order. Two private names make that order a function of a seed:
`trio._core._run._r`, its random generator, and `_ALLOW_DETERMINISTIC_SCHEDULING`, which sorts a batch of tasks before
it is shuffled. pytest-trio and Hypothesis set the same two. They are tried once, at first use. If a Trio release lacks
them, runs are seeded (ids, delays, faults) but not bit-exact, and a warning is issued.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import random
import warnings
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, TypeVar

import trio
import trio.testing

T = TypeVar("T")

YOUNG_OBJECTS: Final = 50_000
"""New objects in a simulated run after which the garbage collector looks at them: some ten MiB."""

_FLAG: Final = "_ALLOW_DETERMINISTIC_SCHEDULING"
_BASE: Final = "_virtual_base"
_PROBE_TASKS: Final = 12
"""12! orders: two seeds are very unlikely to give the same one by chance."""


class NotDeterministicWarning(UserWarning):
    """The schedule of the installed Trio cannot be seeded: one seed gives similar runs, not equal ones."""


@contextmanager
def scheduled_by(seed: int) -> Generator[None, None, None]:
    """Make the order in which Trio runs tasks a function of `seed`, inside the block."""
    run: Any = trio._core._run  # noqa: SLF001 - see the head of this file
    generator: random.Random = run._r  # noqa: SLF001
    before, state = getattr(run, _FLAG), generator.getstate()
    setattr(run, _FLAG, True)
    generator.seed(seed)
    try:
        yield
    finally:
        setattr(run, _FLAG, before)
        generator.setstate(state)


async def _order_of_tasks() -> list[int]:
    order: list[int] = []

    async def note(number: int) -> None:
        for _ in range(3):
            await trio.lowlevel.checkpoint()
            order.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(_PROBE_TASKS):
            nursery.start_soon(note, number)
    return order


@functools.cache
def is_bit_exact() -> bool:
    """Return whether a seed fixes the schedule; the first use tries it with three schedules.

    Warns:
        NotDeterministicWarning: It does not, with this release of Trio.
    """
    orders: list[list[int]] = []
    try:
        for seed in (1, 1, 2):
            with scheduled_by(seed):
                orders.append(trio.run(_order_of_tasks))
    except AttributeError:
        orders = []
    if orders and orders[0] == orders[1] != orders[2]:
        return True
    warnings.warn(
        f"the schedule of Trio {trio.__version__} cannot be seeded: simulations are seeded but not bit-exact",
        NotDeterministicWarning,
        stacklevel=2,
    )
    return False


def virtual_clock() -> trio.testing.MockClock:
    """Return a clock that jumps when all tasks wait. Make it before the clocks of actors are installed."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    if hasattr(clock, _BASE):  # it advances by jumps alone, so readings need not ask the real clock, which takes longer
        vars(clock)["current_time"] = functools.partial(getattr, clock, _BASE)
    return clock


def run_seeded(
    seed: int,
    main: Callable[..., Awaitable[T]],
    *args: Any,
    clock: trio.testing.MockClock | None = None,
    instruments: Sequence[trio.abc.Instrument] = (),
) -> T:
    """Run `main` under a virtual clock that jumps when all tasks wait, with a schedule that follows from `seed`."""
    clock = clock or virtual_clock()
    with scheduled_by(seed) if is_bit_exact() else nullcontext(), _rare_collections():
        return trio.run(main, *args, clock=clock, instruments=instruments)


@contextmanager
def _rare_collections() -> Generator[None, None, None]:
    """Collect garbage less often, inside the block: by default that takes a tenth of a short run."""
    young, *old = gc.get_threshold()
    gc.set_threshold(max(young, YOUNG_OBJECTS) if young else 0, *old)
    try:
        yield
    finally:
        gc.set_threshold(young, *old)


def stream(seed: int, *purpose: object) -> random.Random:
    """Return the random numbers of one purpose, which do not depend on those drawn for another."""
    text = "/".join(map(str, (seed, *purpose)))
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16]))  # noqa: S311 - for replay
