"""The stream of commands, as a rank reads it: checked whole before anything of it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol import DEFINE, FREE, RESET
from trimesh.tensor.rank import Command
from trimesh.tensor.signature import Signature, define

Step = Command | list[int]
"""A command, or tensors to forget."""


@attrs.define(eq=False)
class Reader:
    """Reads the commands of one team.

    Attributes:
        device: Of the rank.
    """

    device: torch.device
    _signatures: dict[int, Signature] = attrs.field(factory=dict[int, Signature])

    def read(self, stream: Sequence[Any], bodies: Sequence[memoryview]) -> list[Step]:
        """Return what a stream says.

        Raises:
            ProtocolError: It says nothing.
        """
        steps: list[Step] = []
        at = 0
        try:
            while at < len(stream):
                code = stream[at]
                if code == FREE:
                    steps.append(_refs(stream[at + 1]))
                    at += 2
                elif code == DEFINE:
                    self._signatures[stream[at + 1]] = define(stream[at + 2], self.device)
                    at += 3
                elif code == RESET:
                    self._signatures.clear()
                    at += 1
                else:
                    signature = self._signatures[code]
                    end = at + 2 + signature.arity
                    steps.append(_command(signature, stream[at + 1], stream[at + 2 : end], bodies))
                    at = end
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"commands must be what they were defined as, got {error!r} at {at}") from error
        return steps


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
