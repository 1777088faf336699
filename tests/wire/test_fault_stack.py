"""Stacks of `faulthandler` without the frames of the library."""

from __future__ import annotations

import os

from tests.rows import rows

from trimesh import config
from trimesh._wire.exceptions.tracebacks import is_hidden, last_words, shown_stack

STDLIB = os.path.dirname(os.__file__)
OWN = os.path.dirname(config.__path__[0])

CRASH = f"""loading
Fatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/home/me/logger.py", line 3 in write

Current thread 0x00007f0000000002 (most recent call first):
  File "{STDLIB}/ctypes/__init__.py", line 519 in string_at
  File "{STDLIB}/contextlib.py", line 80 in inner
  File "/home/me/train.py", line 17 in step
  File "{OWN}/_runtime/actors/server.py", line 241 in _first_step
  File "/v/lib/python3.11/site-packages/trio/_core/_run.py", line 900 in unrolled_run
  File "/home/me/train.py", line 40 in main
  File "/home/me/train.py", line 50 in <module>
  File "<string>", line 1 in <module>

Extension modules: msgspec._core, _cffi_backend (total: 2)
"""


def test_last_words_of_a_crash_are_the_frames_of_the_user() -> None:
    """Z10: innermost first, that of the standard library only where the crash was."""
    assert last_words(CRASH).split("; ") == [
        "Fatal Python error: Segmentation fault",
        f'File "{STDLIB}/ctypes/__init__.py", line 519 in string_at',
        'File "/home/me/train.py", line 17 in step',
        'File "/home/me/train.py", line 40 in main',
    ]


@rows(
    ("tail", "words"),
    [
        ("", ""),
        ("good\nbye\n", "bye"),
        ("torch: out of memory\nExtension modules: numpy (total: 1)\n", "torch: out of memory"),
        ('  File "a.py", line 1 in f\n', '  File "a.py", line 1 in f'.strip()),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Python frame>\n",
         "Fatal Python error: Aborted"),
    ],
)  # fmt: skip
def test_last_words_of_other_ends_are_the_last_line(tail: str, words: str) -> None:
    """Z10."""
    assert last_words(tail) == words


@rows(
    ("line", "hidden"),
    [
        (f'  File "{OWN}/_runtime/actors/server.py", line 1 in serve', True),
        ('  File "/v/lib/python3.11/site-packages/outcome/_impl.py", line 1 in send', True),
        ('  File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1 in forward', False),
        ('  File "<frozen runpy>", line 1 in _run_code', True),
        ('  File "train.py", line 1 in step', False),
        (f'  File "{OWN}/errors.py", line 1, in traceback_of_python', False),
        ("Extension modules: numpy (total: 1)", True),
        ("step 3", False),
    ],
)
def test_lines_of_the_library_are_hidden(line: str, hidden: bool) -> None:
    assert is_hidden(line) is hidden


def test_nothing_is_hidden_with_full_tracebacks() -> None:
    with config.configured(traceback="full"):
        assert not any(map(is_hidden, CRASH.splitlines()))


def test_stack_of_the_library_alone_is_shown() -> None:
    stack = f'Stack (most recent call first):\n  File "{OWN}/_runtime/life/worker.py", line 1 in main'

    assert shown_stack(stack) == stack
    assert shown_stack(f'{stack}\n  File "train.py", line 1 in <module>').splitlines() == [
        "Stack (most recent call first):",
        '  File "train.py", line 1 in <module>',
    ]
