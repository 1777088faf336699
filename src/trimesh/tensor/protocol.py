"""The messages of the tensor engine: commands to the ranks, acknowledgements and values from them.

    controller                                    rank
      Open, Team, Run ------------------------->    executes commands in the order of each team
      <------------------------------ Done, Reply

A stream of commands is one flat list. A command is a number, then its operands:

    DEFINE   number, description    from now on `number` is the operation that the description says
    FREE     [ref, ...]             forget these tensors
    RESET                           forget every definition
    RECORD   number, body, stream, formals, results, captured, carried
                                    from now on `number` is these commands, whose bodies begin at `body`
    REPLAY   number, first, [ref, ...]
                                    run them with these tensors for the formal ones; results are `first` and after it
    FORGET   number                 forget these commands
    n >= FIRST_SIGNATURE            first output, then what the description of `n` says: refs, numbers, bodies

So an operation that was seen before takes some ten bytes. Pure: values and bytes only.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trimesh.errors import ProtocolError

DEFINE: Final = 0
FREE: Final = 1
RESET: Final = 2
RECORD: Final = 3
REPLAY: Final = 4
FORGET: Final = 5
FIRST_SIGNATURE: Final = 16

REF: Final = "r"
NUMBER: Final = "n"
BODY: Final = "b"


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base; the engine is numbered by the process that opened it."""

    engine: int


class Open(_Message, frozen=True, tag=1):
    """Begin: the receiver is a rank of a mesh of processes from now on.

    Attributes:
        mesh: Its name.
        labels, sizes: Its extent.
        rank: Of the receiver.
    """

    mesh: str
    labels: list[str]
    sizes: list[int]
    rank: int


class Team(_Message, frozen=True, tag=2):
    """Some ranks of the mesh, with labels of their own, that hold tensors together.

    Attributes:
        team: Its number.
        labels, sizes: The extent of the view.
        ranks: Of the mesh, row-major in that extent.
        procs: The processes of these ranks, now.
    """

    team: int
    labels: list[str]
    sizes: list[int]
    ranks: list[int]
    procs: list[int]


class Run(_Message, frozen=True, tag=3):
    """Commands of one team.

    Attributes:
        team: Its number.
        first: Number of the first command among all of the team.
        stream: See above.
    """

    team: int
    first: int
    stream: list[Any]


class Done(_Message, frozen=True, tag=4):
    """A rank has executed commands of a team.

    Attributes:
        team: Its number.
        count: How many since it was opened.
        failed: Numbers of those that have failed by themselves, not because of another, since the report before.
    """

    team: int
    count: int
    failed: list[int]


class Reply(_Message, frozen=True, tag=5):
    """What a command was to bring back.

    Attributes:
        request: Its number.
        payload: An encoded value, or an exception; empty when the first body holds it.
        failed_at: [team, number] of the command that has failed; None for a value.
    """

    request: int
    payload: bytes
    failed_at: tuple[int, int] | None = None


AnyMessage = Open | Team | Run | Done | Reply

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(AnyMessage)

encode = _ENCODER.encode


def decode(payload: bytes | bytearray | memoryview) -> AnyMessage:
    """Decode one message.

    Raises:
        ProtocolError: It is none. Nothing else is ever raised, whatever the bytes.
    """
    try:
        message: AnyMessage = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a message of the tensor engine must be one of its structs: {error}") from error
    return message


def kinds_of(described: Any) -> str:
    """Return "r", "n" or "b" for each operand that a described argument takes."""
    match described:
        case ["r" | "n" | "b" as kind]:
            return str(kind)
        case ["l" | "t", *parts]:
            return "".join(map(kinds_of, parts))
        case ["d", *parts]:
            return "".join(map(kinds_of, parts[1::2]))
        case _:
            return ""
