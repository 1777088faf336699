"""Counts the lines of some files that a process executes, with its threads and all processes that it forks."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Final


class Lines:
    """The lines of some files that have been executed. Forks note theirs in the same memory, so none is lost with them.

    Args:
        paths: The files, as code objects name them.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._firsts: Final = [0]
        for path in paths:
            self._firsts.append(self._firsts[-1] + len(Path(path).read_bytes().splitlines()) + 1)
        self._paths: Final = paths
        self._executed: Final = mmap.mmap(-1, self._firsts[-1])
        of_file = {path: self._noting(first) for path, first in zip(paths, self._firsts, strict=False)}
        self._trace = lambda frame, _event, _arg: of_file.get(frame.f_code.co_filename)

    def _noting(self, first: int) -> Callable[[FrameType, str, Any], object]:
        executed = self._executed

        def note(frame: FrameType, event: str, _: Any) -> object:
            if event == "line":
                executed[first + frame.f_lineno] = 1
            return note

        return note

    def start(self) -> None:
        """Count from here on, in this thread and in those that start."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def stop(self) -> None:
        """Count no more, also in what is forked later."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def take(self) -> dict[str, list[int]]:
        """Return the lines by file, and begin again."""
        executed = self._executed[:]
        self._executed[:] = bytes(len(executed))
        ranges = zip(self._paths, pairwise(self._firsts), strict=True)
        return {path: [line for line, one in enumerate(executed[first:end]) if one] for path, (first, end) in ranges}
