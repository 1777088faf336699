"""Whose frames of a stack are: of the library, of what it runs on, or of the program."""

from __future__ import annotations

import threading

import trio
from tests.rows import rows

from trimesh._runtime.watch import report
from trimesh._wire.exceptions.tracebacks import package_of_file, package_of_line, program_frame, shown_frames
from trimesh.actor import verbs
from trimesh.cli.text import program_lines
from trimesh.observe.run_snapshot import program_line


@rows(
    ("file", "package"),
    [
        (verbs.__file__, "trimesh"),
        (report.__file__, "trimesh"),
        ("/other/venv/lib/python3.12/site-packages/trimesh/actor/verbs.py", "trimesh"),
        ("/other/checkout/src/trimesh/_runtime/life/proc.py", "trimesh"),
        ("/home/me/trimesh/train.py", ""),
        (trio.__file__, "trio"),
        (threading.__file__, "threading"),
        ("/venv/lib/python3.12/site-packages/torch/nn/functional.py", "torch"),
        ("/venv/lib/python3.13t/site-packages/outcome.py", "outcome"),
        ("/opt/python3.12/train.py", ""),
        ("<frozen importlib._bootstrap>", "importlib"),
        ("train.py", ""),
    ],
)
def test_package_of_a_file(file: str, package: str) -> None:
    assert package_of_file(file) == package


def line(file: str, name: str) -> str:
    return f'File "{file}", line 1 in {name}'


STACK = [  # innermost first
    line(threading.__file__, "wait"),
    line("train.py", "step"),
    line(trio.__file__, "run"),
    line(verbs.__file__, "call"),
    line("train.py", "main"),
]


def test_line_of_a_stack_that_was_written_as_text() -> None:
    stack = "\n".join(["Stack (most recent call first):", *(f"  {one}" for one in STACK)])

    assert program_line(stack) == STACK[1]
    assert program_lines(stack) == [STACK[0], STACK[1], STACK[4]]
    assert program_lines(stack, 1) == [STACK[1]]


def test_plumbing_of_a_call_is_hidden() -> None:
    """What the library calls to wait for a reply is no place of the program."""
    waiting = [line(trio.__file__, "wait"), line(verbs.__file__, "_invoke_when_ready"), *STACK[1:2]]

    assert program_frame(waiting, package_of_line) == STACK[1]
    assert shown_frames(reversed(waiting), package_of_line) == STACK[1:2]
    assert program_frame(waiting[:2], package_of_line) is None
