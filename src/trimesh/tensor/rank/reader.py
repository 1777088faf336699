"""Reader of a rank's command stream: checks a whole batch before any of it runs, and recognises repeated sequences.

SQ-1 Two sequences are equal if they have the same operations with the same numbers, and each tensor operand comes from
     the same place: the same command of the sequence, or the same tensor from outside it.
SQ-2 A sequence has only operators, and kernels made of operators: no command that has bodies, sends, replies, or only
     checks.
SQ-3 Each command is counted as if it had arrived alone, and failed and lost tensors are the same as then.
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
    """Decodes the commands of one team.

    Attributes:
        device: Device of the rank.
        kernels: Operations that commands may name besides torch's own operators.
        redefined: Number of times that definitions were dropped or replaced.
    """

    device: torch.device
    kernels: Kernels
    redefined: int = 0
    _signatures: dict[int, Signature] = attrs.field(factory=dict[int, Signature])

    def read(self, stream: Sequence[Any], bodies: Sequence[memoryview]) -> list[Step]:
        """Decode a stream.

        Raises:
            ProtocolError: The stream is malformed.
        """
        steps: list[Step] = []
        at = 0
        while at < len(stream):
            at += self.read_one(stream, at, bodies, steps)
        return steps

    def read_one(self, stream: Sequence[Any], at: int, bodies: Sequence[memoryview], steps: list[Step]) -> int:
        """Decode one command and add its steps; return its number of words.

        Raises:
            ProtocolError: The command is malformed.
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
            raise ProtocolError(f"a command must fit its definition, got {error!r} at word {at}") from error

    def signature(self, number: int) -> Signature | None:
        """Return the operation with this number; None if there is none."""
        return self._signatures.get(number)

    def _read_rare(self, words: Sequence[Any], bodies: Sequence[memoryview], steps: list[Step]) -> int:
        """Decode a command that is not an operation; return its number of words."""
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
                raise ProtocolError(f"a command must have a known number and its operands, got {words!r}")
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
        raise ProtocolError(f"refs must be a list of numbers, got {refs!r}")
    return refs


def _command(signature: Signature, first: Any, operands: Sequence[Any], bodies: Sequence[memoryview]) -> Command:
    if len(operands) != signature.arity or type(first) is not int:
        raise ProtocolError(f"{signature.name} must have {signature.arity} operands, got {operands!r}")
    if signature.kinds.count("n") != signature.arity:
        operands = [_operand(kind, operand, bodies) for kind, operand in zip(signature.kinds, operands, strict=True)]
    return Command(signature, first, operands)


def _operand(kind: str, operand: Any, bodies: Sequence[memoryview]) -> Any:
    if kind == "n":
        return operand
    if type(operand) is not int or operand < 0:
        raise ProtocolError(f"a tensor or a body must be named by a number, got {operand!r}")
    return operand if kind == "r" else bodies[operand]


# ---- sequence pattern ------------------------------------------------------------------------------------------------

# `SequencePattern`: recognises a sequence of commands without decoding each.


@attrs.define
class SequenceWords:
    """Places of each kind of word in a sequence: words of its stream, then the refs in its lists of freed tensors.

    Attributes:
        fixed: Words that do not change: operations.
        numbers: Operands other than tensors.
        lists: Lists of freed tensors.
        firsts: Refs of a command's first output, each with the number of outputs.
        given: First occurrence of each tensor from outside the sequence.
        again: Later occurrence of a tensor: its place, the place of the first, and the difference of the refs.
    """

    fixed: list[int] = attrs.field(factory=list[int])
    numbers: list[int] = attrs.field(factory=list[int])
    lists: list[int] = attrs.field(factory=list[int])
    firsts: list[tuple[int, int]] = attrs.field(factory=list[tuple[int, int]])
    given: list[int] = attrs.field(factory=list[int])
    again: list[tuple[int, int, int]] = attrs.field(factory=list[tuple[int, int, int]])


class SequencePattern:
    """Recognises a sequence by a few comparisons of many words each.

    Args:
        words: Places of its words, by kind.
        stream: The sequence, as received.
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
        """Return the refs of the sequence's inputs and outputs if it stands at `at` in a stream, else None."""
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
    """Return a function that selects the words at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda words: tuple(words[place] for place in places)


# ---- repeated sequences of commands: a rank caches them and runs them as recordings ----------------------------------

# A training program issues the same operations in each step, for other tensors. The controller's operations determine
# where a batch ends (`Team.emit`), so that the batches of each step are the same, too.

GIVEN: Final = 1 << 60
"""First ref of a sequence's inputs; no controller counts this far."""

MADE: Final = 1 << 61
"""First ref of a sequence's outputs."""


@attrs.define(eq=False)
class KeptSequence:
    """A cached sequence of commands, with refs of its own.

    Attributes:
        steps: The commands, in order.
        freed: Numbers of the inputs that the sequence frees.
        unused: Numbers of the inputs that it only frees.
        left: Numbers of the outputs that it does not free.
        local: Learnt replay, which runs as many steps as it can.
        pattern: Recognises the sequence.
        next: The sequence that followed it last time.
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
    """Run of a cached sequence on some tensors.

    Attributes:
        kept: The sequence.
        given: Refs of its inputs.
        made: Refs of its outputs.
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
                values[ref] = found  # a write to it has failed

    def _begin(self, rank: Rank) -> None:
        """Bind the inputs to the sequence's own refs; inputs that it frees lose their other ref now."""
        kept, values = self.kept, rank.values
        for number, ref in enumerate(self.given):
            found = values.pop(ref, None) if number in kept.freed else values.get(ref)
            if found is not None and number not in kept.unused:
                values[GIVEN + number] = found
        if rank.results:
            for number in kept.freed:
                rank.results.pop(self.given[number], None)


# ---- reader that recognises repeated sequences -----------------------------------------------------------------------


@attrs.frozen
class _Form:
    """Layout of a signature's commands; places count from the first word.

    Attributes:
        words: Number of words.
        refs, numbers: Places of refs, and of numbers.
        outputs: Number of new tensors.
    """

    words: int
    refs: Sequence[int]
    numbers: Sequence[int]
    outputs: int


@attrs.define
class _Stretch:
    """Longest run of commands in a stream that can be a sequence.

    Attributes:
        begin, end: Place of the first word, and of the one after the last.
        count: Number of commands.
        words: The commands, with refs of their own.
        numbers: Operands other than tensors, as text: -0.0 equals 0.0, and nan does not equal itself.
        given, made: See `SequenceRun`.
        unused: Numbers of the inputs that are only freed.
        names: The sequence's own ref for each ref that is not freed.
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
        """Add the next command; return whether it matches its definition."""
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
        """Add the next FREE command; return whether it is well-formed."""
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
        """Return the sequence's own ref for a ref; None if the word is not a ref."""
        named = self.names.get(ref)
        if named is None and type(ref) is int and 0 <= ref < GIVEN:
            named = self.names[ref] = GIVEN + len(self.given)
            self.given.append(ref)
        return named

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that equal sequences share (SQ-1)."""
        return tuple(self.words), tuple(self.numbers)

    @property
    def streamed(self) -> list[Any]:
        """The commands as a stream, without inputs that are only freed."""
        stream: list[Any] = []
        for word in self.words:
            if type(word) is tuple:
                stream.append([ref for ref in word if ref - GIVEN not in self.unused])
            else:
                stream.append(word)
        return stream


@attrs.define(eq=False)
class SequenceReader:
    """Decodes the commands of one team and recognises repeated sequences.

    Attributes:
        reader: Decodes single commands.
        new_local: Makes the executor of a sequence.
    """

    reader: CommandReader
    new_local: Callable[[], LearntReplay]
    _forms: dict[int, _Form | None] = attrs.field(factory=dict[int, "_Form | None"])
    _seen: set[int] = attrs.field(factory=set[int])
    _kept: dict[tuple[Any, ...], KeptSequence] = attrs.field(factory=dict[tuple[Any, ...], KeptSequence])
    _latest: KeptSequence | None = None
    _redefined: int = 0

    def read(self, stream: Sequence[Any], bodies: Sequence[memoryview]) -> list[Step]:
        """Decode a stream; repeated sequences become a `SequenceRun` each.

        Raises:
            ProtocolError: The stream is malformed.
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
        """Return the commands from a place on that can be a sequence; None if one is malformed."""
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
        except TypeError:  # a word that is not a number
            return None
        return stretch

    def _form(self, code: Any) -> _Form | None:
        """Return the layout of a signature's commands; None if no sequence may have them."""
        if code in self._forms or code < FIRST_SIGNATURE:
            return self._forms.get(code)
        signature = self.reader.signature(code)
        if signature is None:
            return None
        form = self._forms[code] = _form(signature)
        return form

    def _found(self, stretch: _Stretch, stream: Sequence[Any]) -> KeptSequence | None:
        """Return the cached sequence of these commands, if they have occurred before."""
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
        """Sort the words of a sequence by kind."""
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
    """Return the layout of a signature's commands; None if no sequence may have them (SQ-2)."""
    is_check = max(signature.outs, default=-1) < 0 and not signature.writes
    if is_check or "b" in signature.kinds or not is_of_operators(signature):
        return None
    refs = [2 + place for place, kind in enumerate(signature.kinds) if kind == "r"]
    numbers = [2 + place for place, kind in enumerate(signature.kinds) if kind == "n"]
    return _Form(2 + signature.arity, refs, numbers, max(signature.outs, default=-1) + 1)
