"""Do something at the nth step of the scheduler, for every n: what no test by hand would think of."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from tests.conformance.meshes import SimBackend

import trimesh

STEPS_MAX = 5_000
"""A body that needs more is not made for a sweep."""


class NthStep(trio.abc.Instrument):
    """Calls a function before the nth step of any task since it was armed."""

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.count = 0
        self.act: Callable[[], None] | None = None

    def arm(self, act: Callable[[], None]) -> None:
        self.act = act

    def disarm(self) -> bool:
        """Stop; return whether it has acted."""
        self.act = None
        return self.count >= self.nth

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        if self.act is not None:
            self.count += 1
            if self.count == self.nth:
                self.act()


Body = Callable[[SimBackend], Awaitable[None]]
Action = Callable[[SimBackend, trio.CancelScope], None]


def cancel(_: SimBackend, scope: trio.CancelScope) -> None:
    """Cancel the body."""
    scope.cancel()


def interrupt(*_: Any) -> None:
    """Press Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


def kill_one(backend: SimBackend, _: trio.CancelScope) -> None:
    """Let the process die that was started last."""
    alive = [child for child in backend.world.children.values() if child.report is None]
    if alive:
        alive[-1].die(signum=signal.SIGKILL)


def sweep(body: Body, action: Action, *expected: type[BaseException], stride: int = 1) -> int:
    """Run `body` in a new world for every n; return how many steps it has.

    Args:
        body: What is disturbed.
        action: What is done at the nth step.
        expected: Leaves that the body may raise.
        stride: Distance of the steps that are tried.
    """
    for nth in itertools.count(1, stride):
        assert nth < STEPS_MAX
        if not _run(body, action, nth, expected):
            return nth
    raise AssertionError("unreachable")


def _run(body: Body, action: Action, nth: int, expected: tuple[type[BaseException], ...]) -> bool:
    backend = SimBackend(nth)
    step = NthStep(nth)
    acted = False

    async def main() -> None:
        nonlocal acted
        async with backend.open():
            try:
                with trio.CancelScope() as scope:
                    step.arm(lambda: action(backend, scope))
                    await body(backend)
                acted = step.disarm()
                await trio.testing.wait_all_tasks_blocked()  # a Ctrl-C that is under way comes here
            except BaseException as error:
                acted = step.disarm()
                unexpected = [leaf for leaf in trimesh.leaves(error) if not isinstance(leaf, expected)]
                for leaf in unexpected[:1]:
                    leaf.add_note(f"at step {nth}")
                    raise
            try:
                await backend.check_clean()
            except AssertionError as error:
                error.add_note(f"at step {nth}")
                raise

    backend.run(main, instruments=[step], restrict_keyboard_interrupt_to_checkpoints=True)
    return acted
