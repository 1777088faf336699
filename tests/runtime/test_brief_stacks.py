"""Stacks in the log of a block that waits: a few lines that say where a program is."""

from __future__ import annotations

import importlib
import threading

import trio

from trimesh._runtime.watch.stacks import FRAMES_MAX, brief
from trimesh.actor import verbs


def frame(file: str, indent: str = "    ") -> str:
    return f'{indent}File "{file}", line 1 in run'


FROZEN = frame("<frozen importlib._bootstrap>")
TORCH = frame("/venv/lib/python3.12/site-packages/torch/__init__.py")


def test_import_of_a_library_is_a_few_lines() -> None:
    """BS-1: of 16 frames of an import that are the library and the program; and of two stacks each."""
    stack = [TORCH, *[FROZEN] * 6, frame(importlib.__file__), *[TORCH, FROZEN] * 2, frame("train.py"), frame("app.py")]
    more = "    and 9 frames more"

    assert brief(["  procs[gpus=0] pid 7: running", *stack, more, "    a thread:", frame("a.py", "      ")]) == [
        "  procs[gpus=0] pid 7: running",
        *[TORCH] * 3,
        frame("train.py"),
        "    a thread:",
        frame("a.py", "      "),
    ]


def test_stack_without_the_program_keeps_its_innermost_frames() -> None:
    """BS-2: a process that only starts, say."""
    stack = [FROZEN, frame(threading.__file__), frame(trio.__file__), *[frame(verbs.__file__)] * 9]

    assert brief(stack) == stack[1 : 1 + FRAMES_MAX]
    assert brief([FROZEN] * 9) == [FROZEN] * FRAMES_MAX
