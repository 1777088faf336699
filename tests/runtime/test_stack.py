"""The stack that a process writes on request."""

from __future__ import annotations

import os

from trimesh._runtime import stack


def test_read_stack_returns_the_last_of_several():
    fd = os.memfd_create("test-stack")
    try:
        os.write(fd, b'Stack (most recent call first):\n  File "a.py", line 1 in first\n')
        os.write(fd, b'Stack (most recent call first):\n  File "b.py", line 2 in second\n')
        assert stack.read_stack(os.getpid(), fd) == 'Stack (most recent call first):\n  File "b.py", line 2 in second'
    finally:
        os.close(fd)


def test_read_stack_of_a_process_that_wrote_none_is_empty():
    fd = os.memfd_create("test-stack")
    try:
        assert stack.read_stack(os.getpid(), fd) == ""
    finally:
        os.close(fd)
