"""Where a Ctrl-C is raised while blocks are open (O6)."""

from __future__ import annotations

import ctypes

import pytest
import trio

from trimesh._runtime.tasks.interrupt import interruptible


class Block:
    proc = None
    is_stopping = is_interrupted = is_killed = False

    def kill_now(self) -> None:
        raise AssertionError("there was one Ctrl-C only")


class Leaves:
    """Is interrupted by the call of its `__aexit__`, which Python makes no frame for."""

    __aexit__ = ctypes.PyDLL(None).PyErr_SetInterrupt

    async def __aenter__(self) -> None:
        pass


def test_interrupt_waits_while_a_block_is_called_to_leave_and_not_awaited_yet() -> None:
    """O6: raised there, it would leave the block never, and what it owns would live on."""

    async def main() -> None:
        with interruptible(Block()):
            with pytest.raises(TypeError, match="__await__"):  # what that call returns; not KeyboardInterrupt
                async with Leaves():  # type: ignore[attr-defined]
                    pass
            with pytest.raises(KeyboardInterrupt):
                await trio.lowlevel.checkpoint()

    trio.run(main)
