"""Values that are nested too deep, or without an end (rule PL-2)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from trimesh import limits
from trimesh._wire.pickled.payload import Encoder


class ReducesToItself:
    """A mistake: its reduction holds another of its kind, and so on."""

    def __reduce__(self) -> Any:
        return ReducesToItself, (ReducesToItself(),)


def error_on_a_stack_of(nbytes: int, call: Callable[[], object]) -> Exception | None:
    """Return what a call raises on a thread with a stack of this size: it bounds recursion since Python 3.14."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is what the test asks about
            raised.append(error)

    before = threading.stack_size(nbytes)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    return raised[0] if raised else None


def test_encode_names_an_endless_recursion() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]

    error = error_on_a_stack_of(1 << 20, lambda: Encoder().encode(value, what="the value"))

    assert isinstance(error, TypeError)
    assert "RecursionError" in str(error)
    assert isinstance(error.__cause__, RecursionError)
    assert not hasattr(error.__cause__, "__notes__")  # Python 3.14 adds one for each level
    while value:  # taken apart by hand: freeing it in one go is deep, too
        value = value[0]


def test_search_for_the_offending_part_ends_after_some_stack_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DIAGNOSIS_OVERFLOWS", 3)
    value: Any = ReducesToItself()
    for _ in range(5):
        value = [value]

    with pytest.raises(TypeError, match=r"RecursionError.* at \[0\]\[0\]\[0\] \(a builtins.list\)"):
        Encoder().encode(value, what="the value")


def test_encode_names_the_object_that_reduces_to_itself() -> None:
    with pytest.raises(TypeError, match=r"RecursionError.* at \['model'\] \(a .*ReducesToItself\)"):
        Encoder().encode({"step": 1, "model": ReducesToItself()}, what="the value")
