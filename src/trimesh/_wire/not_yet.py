"""A value that came before something that it stands for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


class NotYet(BaseException):
    """A value cannot be decoded yet: who decodes it waits and tries again. No `Exception`: it is no fault of the value.

    Attributes:
        wait: Returns when it is time to try again; raises if it never will be.
    """

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.wait = wait
