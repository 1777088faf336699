"""What is open in this process and is not to be in a child that is forked from it."""

from __future__ import annotations

import os
import weakref
from typing import Generic, Protocol, TypeVar


class Forgettable(Protocol):
    """Something of this process alone."""

    def forget(self) -> None:
        """In a forked child: close the copies of descriptors, at once and without a word to other processes."""


T = TypeVar("T", bound=Forgettable)


class ForgottenInChildren(Generic[T]):
    """Objects of one kind that are open; a forked child forgets them. One that is lost is not kept."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[T] = weakref.WeakSet()
        os.register_at_fork(after_in_child=self._forget)

    def add(self, thing: T) -> None:
        """Note one that is open."""
        self._open.add(thing)

    def discard(self, thing: T) -> None:
        """Note one that is closed. Idempotent."""
        self._open.discard(thing)

    def __contains__(self, thing: T) -> bool:
        """Whether one is open, and was not forgotten."""
        return thing in self._open

    def _forget(self) -> None:
        for thing in list(self._open):
            thing.forget()
        self._open.clear()
