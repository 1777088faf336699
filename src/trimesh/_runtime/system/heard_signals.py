"""Signals that end a program of this library, received also where its starter has blocked them."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager

import trio


def open_heard_signals(*signals: signal.Signals) -> AbstractContextManager[AsyncIterator[int]]:
    """Receive signals as `trio.open_signal_receiver`; unblock them, as a process inherits the mask of its starter."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    return trio.open_signal_receiver(*signals)
