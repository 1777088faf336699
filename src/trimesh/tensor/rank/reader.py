"""The stream of commands, as a rank reads it: checked whole before anything of it runs.

SQ-1 Two sequences are the same if they have the same operations with the same numbers, and tensors of the same places:
     made by the same one of their commands, or given by the same others.
SQ-2 Only operators are in a sequence, and what is made of such: nothing that has bodies, that sends or answers, or that
     only checks.
SQ-3 Each command counts as if it had come alone, and what has failed, or was lost, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh import limits
from trimesh.errors import ProtocolError
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE, FREE
from trimesh.tensor.rank.kernel import Kernels, Poison, Signature, define
from trimesh.tensor.rank.rank import (
    Command,
    Forget,
    Free,
    Rank,
    Replay,
    ReplayRecord,
    Step,
    TeamOnRank,
    is_of_operators,
    varying,
)

if TYPE_CHECKING:
    from trimesh.tensor.dtensor.local_trace import LearntReplay


@attrs.define(eq=False)
class CommandReader:
    """Reads the commands of one team.

    Attributes:
        device: Of the rank.
        kernels: What commands may name beside torch's own operators.
        redefined: How often definitions were forgotten, or given to something else.
    """

    device: torch.device
    kernels: Kernels
    redefined: int = 0
    _signatures: dict[int, Signature] = attrs.field(factory=dict[int, Signature])

    def read(self, stream: Sequence[Any], bodies: Sequence[memoryview]) -> list[Step]:
        """Return what a stream says.

        Raises:
            ProtocolError: It says nothing.
        """
        steps: list[Step] = []
        at = 0
        while at < len(stream):
            at += self.read_one(stream, at, bodies, steps)
        return steps

    def read_one(self, stream: Sequence[Any], at: int, bodies: Sequence[memoryview], steps: list[Step]) -> int:
        """Add what a stream says at a place; return how many words it says that with.

        Raises:
            ProtocolError: It says nothing.
        """
        try:
            code = stream[at]
            if code >= FIRST_SIGNATURE:
                signature = self._signatures[code]
                words = 2 + signature.arity
                steps.append(_command(signature, stream[at + 1], stream[at + 2 : at + words], bodies))
                return words
            if code == FREE:
                steps.append(Free(_refs(stream[at + 1])))
                return 2
            return self._read_rare(stream[at : at + _WORDS[code]], bodies, steps)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"commands must be what they were defined as, got {error!r} at {at}") from error

    def signature(self, number: int) -> Signature | None:
        """Return what is defined so; None if nothing is."""
        return self._signatures.get(number)

    def _read_rare(self, words: Sequence[Any], bodies: Sequence[memoryview], steps: list[Step]) -> int:
        """Read a command that is no operation; return how many words it has."""
        match words:
            case [messages.DEFINE, int(number), description]:
                self.redefined += number in self._signatures
                self._signatures[number] = define(description, self.device, self.kernels)
            case [messages.RESET]:
                self.redefined += 1
                self._signatures.clear()
            case [messages.RECORD, int(number), int(body), [*streams], formals, results, captured, [*carried]]:
                parts = [list(map(varying, self.read(stream, bodies[body:]))) for stream in streams]
                pairs = [(one, other) for one, other in map(_refs, carried)]
                local = [self.kernels.local_replay() for _ in parts]
                steps.append(ReplayRecord(number, parts, _refs(formals), _refs(results), _refs(captured), pairs, local))
            case [messages.REPLAY, int(number), int(part), int(first), formals, int(move)]:
                steps.append(Replay(number, part, first, _refs(formals), move))
            case [messages.FORGET, int(number)]:
                steps.append(Forget(number))
            case _:
                raise ProtocolError(f"a command must be one of those that there are, got {words!r}")
        return len(words)


_WORDS: Final = {
    messages.DEFINE: 3,
    messages.RESET: 1,
    messages.RECORD: 8,
    messages.REPLAY: 6,
    messages.FORGET: 2,
}


def _refs(refs: Any) -> list[int]:
    if not isinstance(refs, list) or not all(type(ref) is int for ref in refs):
        raise ProtocolError(f"tensors are forgotten by a list of numbers, got {refs!r}")
    return refs


def _command(signature: Signature, first: Any, operands: Sequence[Any], bodies: Sequence[memoryview]) -> Command:
    if len(operands) != signature.arity or type(first) is not int:
        raise ProtocolError(f"{signature.name} takes {signature.arity} operands, got {operands!r}")
    if signature.kinds.count("n") != signature.arity:
        operands = [_operand(kind, operand, bodies) for kind, operand in zip(signature.kinds, operands, strict=True)]
    return Command(signature, first, operands)


def _operand(kind: str, operand: Any, bodies: Sequence[memoryview]) -> Any:
    if kind == "n":
        return operand
    if type(operand) is not int or operand < 0:
        raise ProtocolError(f"a tensor, or a body, has a number, got {operand!r}")
    return operand if kind == "r" else bodies[operand]


# ---- sequence pattern ------------------------------------------------------------------------------------------------

# `SequencePattern`: how the words of a sequence of commands look, to know it again without reading each.


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


# ---- sequences of commands that come again: a rank keeps them, and runs them as it runs recordings -------------------

# A program that trains issues the same operations in each step, for other tensors. The controller ends a batch where
# its operations say so (`Team.emit`), so that the batches are the same in each step, too.

GIVEN: Final = 1 << 60
"""The first of the refs that stand for tensors that a sequence is given: no controller has counted so far."""

MADE: Final = 1 << 61
"""The first of those that stand for what it makes."""


@attrs.define(eq=False)
class KeptSequence:
    """Commands, with refs of their own.

    Attributes:
        steps: In order.
        freed: Which of the tensors that they are given they forget, by number.
        unused: Those of them that they only forget.
        left: Which of those that they make they do not forget, by number.
        local: Runs what it can of them.
        pattern: Knows them again.
        next: What came after them the last time.
    """

    steps: Sequence[Step]
    freed: frozenset[int]
    unused: frozenset[int]
    left: Sequence[int]
    local: LearntReplay
    pattern: SequencePattern
    next: KeptSequence | None = None


@attrs.frozen
class SequenceRun:
    """Run kept commands for some tensors.

    Attributes:
        kept: They.
        given: Refs of the tensors that they are given.
        made: Refs of those that they make.
    """

    kept: KeptSequence
    given: Sequence[int]
    made: Sequence[int]

    def execute(self, rank: Rank, team: TeamOnRank) -> None:
        kept, values = self.kept, rank.values
        self._begin(rank)
        done = kept.local.run(rank, team, kept.steps, 0)
        for step in kept.steps[done:]:
            step.execute(rank, team)
        for number in kept.left:
            values[self.made[number]] = values.pop(MADE + number)
        for number, ref in enumerate(self.given):
            found = values.pop(GIVEN + number, None)
            if type(found) is Poison and ref in values and type(values[ref]) is not Poison:
                values[ref] = found  # it was to be written to

    def _begin(self, rank: Rank) -> None:
        """Give tensors the refs that they have here; those that will be forgotten have only these from now on."""
        kept, values = self.kept, rank.values
        for number, ref in enumerate(self.given):
            found = values.pop(ref, None) if number in kept.freed else values.get(ref)
            if found is not None and number not in kept.unused:
                values[GIVEN + number] = found
        if rank.results:
            for number in kept.freed:
                rank.results.pop(self.given[number], None)


# ---- reads the stream of commands, and knows sequences in it again ---------------------------------------------------


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
