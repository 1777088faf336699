"""Reads the stream of commands, and knows sequences in it again: see `sequence`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trimesh import limits
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE, FREE
from trimesh.tensor.rank.rank import Step
from trimesh.tensor.rank.reader import CommandReader
from trimesh.tensor.rank.replay import is_of_operators
from trimesh.tensor.rank.sequence import GIVEN, MADE, KeptSequence, SequenceRun
from trimesh.tensor.rank.sequence_pattern import SequencePattern, SequenceWords
from trimesh.tensor.rank.signature import Signature

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.learnt_replay import LearntReplay


@attrs.frozen
class _Form:
    """What the words of a signature's commands are: places from the first word on.

    Attributes:
        words: How many.
        refs, numbers: Places of these.
        outputs: How many tensors it makes.
    """

    words: int
    refs: Sequence[int]
    numbers: Sequence[int]
    outputs: int


@attrs.define
class _Stretch:
    """Commands of a stream, as far as they can be a sequence.

    Attributes:
        begin, end: Place of their first word, and of the one after their last.
        count: How many they are.
        words: They, with refs of their own.
        numbers: What is among their operands beside tensors, as text: -0.0 equals 0.0, and nan nothing.
        given, made: See `SequenceRun`.
        unused: The numbers of those that are given and only forgotten.
        names: The refs that stand for what is not forgotten.
    """

    begin: int
    end: int
    count: int = 0
    words: list[Any] = attrs.field(factory=list[Any])
    numbers: list[str] = attrs.field(factory=list[str])
    given: list[int] = attrs.field(factory=list[int])
    made: list[int] = attrs.field(factory=list[int])
    unused: set[int] = attrs.field(factory=set[int])
    names: dict[int, int] = attrs.field(factory=dict[int, int])

    def command(self, form: _Form, stream: Sequence[Any]) -> bool:
        """Take the next one; return whether it is as it was defined."""
        words = list(stream[self.end : self.end + form.words])
        if len(words) < form.words or type(words[1]) is not int:
            return False
        first = words[1]
        for place in form.refs:
            named = self._named(words[place])
            if named is None:
                return False
            words[place] = named
        self.numbers += [repr(words[place]) for place in form.numbers]
        words[1] = MADE + len(self.made)
        for ref in range(first, first + form.outputs):
            self.names[ref] = MADE + len(self.made)
            self.made.append(ref)
        self.words += words
        self.end += form.words
        self.count += 1
        return True

    def free(self, stream: Sequence[Any]) -> bool:
        """Take word of what is forgotten; return whether it is as it should be."""
        refs = stream[self.end + 1] if self.end + 1 < len(stream) else None
        if type(refs) is not list:
            return False
        forgotten: list[int] = []
        for ref in refs:
            if ref not in self.names:
                self.unused.add(len(self.given))
            named = self._named(ref)
            if named is None:
                return False
            forgotten.append(named)
            del self.names[ref]
        self.words += (FREE, tuple(forgotten))
        self.end += 2
        return True

    def _named(self, ref: Any) -> int | None:
        """Return what stands for a ref; None if that is none."""
        named = self.names.get(ref)
        if named is None and type(ref) is int and 0 <= ref < GIVEN:
            named = self.names[ref] = GIVEN + len(self.given)
            self.given.append(ref)
        return named

    @property
    def key(self) -> tuple[Any, ...]:
        """What sequences that are the same have in common."""
        return tuple(self.words), tuple(self.numbers)

    @property
    def streamed(self) -> list[Any]:
        """The commands, as a stream; what they only forget is no part of it."""
        stream: list[Any] = []
        for word in self.words:
            if type(word) is tuple:
                stream.append([ref for ref in word if ref - GIVEN not in self.unused])
            else:
                stream.append(word)
        return stream


@attrs.define(eq=False)
class SequenceReader:
    """Reads the commands of one team, and knows sequences again.

    Attributes:
        reader: Reads each.
        new_local: Makes what runs a sequence.
    """

    reader: CommandReader
    new_local: Callable[[], LearntReplay]
    _forms: dict[int, _Form | None] = attrs.field(factory=dict[int, "_Form | None"])
    _seen: set[int] = attrs.field(factory=set[int])
    _kept: dict[tuple[Any, ...], KeptSequence] = attrs.field(factory=dict[tuple[Any, ...], KeptSequence])
    _latest: KeptSequence | None = None
    _redefined: int = 0

    def read(self, stream: Sequence[Any], bodies: Sequence[memoryview]) -> list[Step]:
        """Return what a stream says.

        Raises:
            ProtocolError: It says nothing.
        """
        steps: list[Step] = []
        at = 0
        while at < len(stream):
            if self._redefined != self.reader.redefined:
                self._forget()
            expected = None if self._latest is None else self._latest.next
            refs = None if expected is None else expected.pattern.match(stream, at)
            if expected is not None and refs is not None:
                steps.append(SequenceRun(expected, *refs))
                self._latest = expected
                at += expected.pattern.length
                continue
            is_short = len(stream) - at < 2 * limits.TENSOR_SEQUENCE_COMMANDS_MIN  # a command has two words at least
            stretch = None if is_short else self._stretch(stream, at)
            if stretch is None:
                return [*steps, *self.reader.read(stream[at:], bodies)]
            found = self._found(stretch, stream) if stretch.count >= limits.TENSOR_SEQUENCE_COMMANDS_MIN else None
            if found is not None:
                steps.append(SequenceRun(found, stretch.given, stretch.made))
                if self._latest is not None:
                    self._latest.next = found
                self._latest = found
            else:
                steps += self.reader.read(stream[at : stretch.end], bodies)
            at = stretch.end
            if at < len(stream):
                at += self.reader.read_one(stream, at, bodies, steps)
        return steps

    def _forget(self) -> None:
        self._redefined = self.reader.redefined
        self._forms.clear()
        self._kept.clear()
        self._latest = None

    def _stretch(self, stream: Sequence[Any], begin: int) -> _Stretch | None:
        """Return the commands from a place on that can be a sequence; None if one is not what it should be."""
        stretch = _Stretch(begin, begin)
        try:
            while stretch.end < len(stream):
                code = stream[stretch.end]
                if code == FREE:
                    is_right = stretch.free(stream)
                else:
                    form = self._form(code)
                    if form is None:
                        break
                    is_right = stretch.command(form, stream)
                if not is_right:
                    return None
        except TypeError:  # something that is no number
            return None
        return stretch

    def _form(self, code: Any) -> _Form | None:
        """Return what commands of a signature are; None if they are in no sequence."""
        if code in self._forms or code < FIRST_SIGNATURE:
            return self._forms.get(code)
        signature = self.reader.signature(code)
        if signature is None:
            return None
        form = self._forms[code] = _form(signature)
        return form

    def _found(self, stretch: _Stretch, stream: Sequence[Any]) -> KeptSequence | None:
        """Return a sequence, if it has come before."""
        key = stretch.key
        try:
            found = self._kept.get(key)
            seen = hash(key)
        except TypeError:  # an operand that is a list
            return None
        if found is None and seen in self._seen:
            if len(self._kept) >= limits.TENSOR_SEQUENCES_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._keep(stretch, stream)
        elif found is None:
            if len(self._seen) >= limits.TENSOR_SEQUENCES_SEEN:
                self._seen.clear()
            self._seen.add(seen)
        return found

    def _keep(self, stretch: _Stretch, stream: Sequence[Any]) -> KeptSequence:
        names = set(stretch.names.values())
        return KeptSequence(
            steps=self.reader.read(stretch.streamed, ()),
            freed=frozenset(number for number in range(len(stretch.given)) if GIVEN + number not in names),
            unused=frozenset(stretch.unused),
            left=[number for number in range(len(stretch.made)) if MADE + number in names],
            local=self.new_local(),
            pattern=SequencePattern(self._words(stretch), stream[stretch.begin : stretch.end]),
        )

    def _words(self, stretch: _Stretch) -> SequenceWords:
        """Find out what the words of a sequence are."""
        words = SequenceWords()
        named: dict[int, tuple[int, int]] = {}

        def name(place: int, ref: int) -> None:
            if ref in named:
                words.again.append((place, *named[ref]))
            else:
                named[ref] = place, 0
                words.given.append(place)

        at, listed = 0, len(stretch.words)
        while at < len(stretch.words):
            code = stretch.words[at]
            words.fixed.append(at)
            if code == FREE:
                words.lists.append(at + 1)
                for ref in stretch.words[at + 1]:
                    name(listed, ref)
                    listed += 1
                at += 2
                continue
            form = self._forms[code]
            assert form is not None
            for place in form.refs:
                name(at + place, stretch.words[at + place])
            words.numbers += [at + place for place in form.numbers]
            words.firsts.append((at + 1, form.outputs))
            named.update((stretch.words[at + 1] + index, (at + 1, index)) for index in range(form.outputs))
            at += form.words
        return words


def _form(signature: Signature) -> _Form | None:
    """Return what commands of a signature are; None if they are in no sequence."""
    is_check = max(signature.outs, default=-1) < 0 and not signature.writes
    if is_check or "b" in signature.kinds or not is_of_operators(signature):
        return None
    refs = [2 + place for place, kind in enumerate(signature.kinds) if kind == "r"]
    numbers = [2 + place for place, kind in enumerate(signature.kinds) if kind == "n"]
    return _Form(2 + signature.arity, refs, numbers, max(signature.outs, default=-1) + 1)
