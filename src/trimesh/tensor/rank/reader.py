"""The stream of commands, as a rank reads it: checked whole before anything of it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol import messages
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE, FREE
from trimesh.tensor.rank.kernel import Kernels
from trimesh.tensor.rank.rank import Command, Free, Step
from trimesh.tensor.rank.replay import Forget, Replay, ReplayRecord, varying
from trimesh.tensor.rank.signature import Signature, define


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
