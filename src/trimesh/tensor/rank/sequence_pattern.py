"""`SequencePattern`: how the words of a sequence of commands look, to know it again without reading each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import attrs


@attrs.define
class SequenceWords:
    """What the words of a sequence are, by place: those of its stream, then those in its lists of what is forgotten.

    Attributes:
        fixed: What is the same each time: operations.
        numbers: Operands that are no tensors.
        lists: Lists of what is forgotten.
        firsts: The ref of the first tensor that a command makes, and how many it makes.
        given: Where a tensor that a sequence is given, or that it only forgets, is named first.
        again: Where a tensor is named again: that place, the one of its first name, and by how much the ref is higher.
    """

    fixed: list[int] = attrs.field(factory=list[int])
    numbers: list[int] = attrs.field(factory=list[int])
    lists: list[int] = attrs.field(factory=list[int])
    firsts: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])
    given: list[int] = attrs.field(factory=list[int])
    again: list[tuple[int, int, int]] = attrs.field(factory=list[tuple[int, int, int]])


class SequencePattern:
    """Knows a sequence again by a few comparisons of many words each.

    Args:
        words: What its words are.
        stream: The sequence, as it came.
    """

    def __init__(self, words: SequenceWords, stream: Sequence[Any]) -> None:
        self.length = len(stream)
        self._lists = [(place, len(stream[place])) for place in words.lists]
        self._fixed = _getter(words.fixed)
        self._expected = self._fixed(stream)
        self._number_places = words.numbers
        self._numbers = [repr(stream[place]) for place in words.numbers]
        self._firsts = _getter([place for place, _ in words.firsts])
        self._outputs = None if all(count == 1 for _, count in words.firsts) else [count for _, count in words.firsts]
        self._given = _getter(words.given)
        same = [(place, first) for place, first, more in words.again if not more]
        self._again, self._before = _getter([place for place, _ in same]), _getter([first for _, first in same])
        self._higher = [one for one in words.again if one[2]]

    def match(self, stream: Sequence[Any], at: int) -> tuple[Sequence[int], Sequence[int]] | None:
        """Return the refs of what the sequence is given and of what it makes, if it is what comes in a stream."""
        words = list(stream[at : at + self.length])
        if len(words) < self.length or self._fixed(words) != self._expected:
            return None
        for place, length in self._lists:
            found = words[place]
            if type(found) is not list or len(found) != length:
                return None
            words += found
        firsts, given = self._firsts(words), self._given(words)
        if set(map(type, firsts)) | set(map(type, given)) != {int} or self._again(words) != self._before(words):
            return None
        made: Sequence[int] = firsts
        if self._outputs is not None:
            pairs = zip(firsts, self._outputs, strict=True)
            made = [ref for first, count in pairs for ref in range(first, first + count)]
        if (
            any(words[place] != words[first] + more for place, first, more in self._higher)
            or len({*given, *made}) != len(given) + len(made)
            or min(given, default=0) < 0
            or [repr(words[place]) for place in self._number_places] != self._numbers
        ):
            return None
        return given, made


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what takes the words at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda words: tuple(words[place] for place in places)
