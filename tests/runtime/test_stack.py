"""The stack that a process writes on request."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh._runtime.watch import stacks
from trimesh._runtime.watch.report import is_in_loop

READING = """
import ctypes
from trimesh._runtime.watch.stacks import arm_stack
print(arm_stack(), flush=True)
libc = ctypes.CDLL(None, use_errno=True)
print(libc.read(0, ctypes.create_string_buffer(8), 8), ctypes.get_errno())
"""


@pytest.mark.real
def test_asking_for_a_stack_does_not_end_a_system_call_of_c():
    """Those that the kernel can restart; C code that reads a pipe need not know of our signal."""
    command = [sys.executable, "-c", READING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        fd = int(process.stdout.readline())
        end = time.monotonic() + HANG_SECONDS
        while "line 6 in <module>" not in stacks.read_stack(process.pid, fd):
            assert time.monotonic() < end
            stacks.request_stack(process.pid)
            time.sleep(stacks.STACK_SECONDS)

        out, _ = process.communicate("12345678")

    assert out == "8 0\n"


def test_read_stack_returns_the_last_of_several():
    fd = os.memfd_create("test-stack")
    try:
        os.write(fd, b'Stack (most recent call first):\n  File "a.py", line 1 in first\n')
        os.write(fd, b'Stack (most recent call first):\n  File "b.py", line 2 in second\n')
        assert stacks.read_stack(os.getpid(), fd) == 'Stack (most recent call first):\n  File "b.py", line 2 in second'
    finally:
        os.close(fd)


def test_read_stack_of_a_process_that_wrote_none_is_empty():
    fd = os.memfd_create("test-stack")
    try:
        assert stacks.read_stack(os.getpid(), fd) == ""
    finally:
        os.close(fd)


class Between(trio.abc.Instrument):
    """Looks at the stack where Trio waits, and between two tasks."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def before_io_wait(self, timeout: float) -> None:
        self.seen.append(is_in_loop(sys._getframe(1)))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seen.append(is_in_loop(sys._getframe(1)))


def test_main_thread_is_in_its_loop_unless_code_of_a_task_runs():
    """M4: a process that a signal interrupts between two tasks is free for any."""
    between = Between()
    inside: list[bool] = []

    async def main() -> None:
        inside.append(is_in_loop(sys._getframe()))
        await trio.lowlevel.checkpoint()
        inside.append(is_in_loop(sys._getframe()))

    trio.run(main, instruments=[between])
    assert set(between.seen) == {True}
    assert inside == [False, False]
