"""Messages of the tensor engine: commands to the ranks, acknowledgements and values from them.

    controller                                    rank
      Open, NewTeam, Run, Fetch --------------->    executes commands in the order of each team
      <--------------------- Done, TensorReply, Fetched

    rank                                          first rank of its team
      Ask ------------------------------------->    rendezvous of the ranks for their process groups
      <----------------------------------- Answer

    rank that sends                               rank that receives
      Offer ----------------------------------->    reads the memory that it names, or uses the bytes in it
      <------------------------------------ Taken

The controller and a rank exchange tensors in the same way; a command's body or a reply names the memory.

A stream of commands is one flat list. A command is a number, then its operands:

    DEFINE   number, description    `number` now means the operation in the description
    FREE     [ref, ...]             forget these tensors
    RESET                           forget every definition
    RECORD   number, body, [stream, ...], formals, results, captured, carried
                                    `number` now means these commands, in parts; their bodies begin at `body`
    REPLAY   number, part, first, [ref, ...], move
                                    run one part of a recording: before the first part, bind the refs to its formals;
                                    after the last, results get refs from `first` on; moves are numbered from `move`
    FORGET   number                 forget these commands
    n >= FIRST_SIGNATURE            first output, then the operands of `n`: refs, numbers, bodies

An operation that is already defined takes about ten bytes. Pure: values and bytes only.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from trimesh._wire.observed import NodeRef
from trimesh.errors import ProtocolError, TrimeshError

DEFINE: Final = 0
FREE: Final = 1
RESET: Final = 2
RECORD: Final = 3
REPLAY: Final = 4
FORGET: Final = 5
FIRST_SIGNATURE: Final = 16

MOVE_OPERANDS: Final = {"send": 1, "receive": 0, "send_parts": 1, "receive_parts": 0}
"""Kernels that send or receive tensors, with the index of the operand that is the number of the move: each replay of a
recording uses new numbers."""

REF: Final = "r"
NUMBER: Final = "n"
BODY: Final = "b"


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base class; `engine` is numbered by the process that opened the engine."""

    engine: int


class Open(_Message, frozen=True, tag=1):
    """Make the receiver a rank of a mesh of processes.

    Attributes:
        mesh: Name of the mesh.
        labels, sizes: Extent of the mesh.
        rank: Rank of the receiver.
    """

    mesh: str
    labels: list[str]
    sizes: list[int]
    rank: int


class NewTeam(_Message, frozen=True, tag=2):
    """Define a team: the ranks of a view of the mesh, which hold tensors together.

    Attributes:
        team: Number of the team.
        labels, sizes: Extent of the view.
        ranks: Ranks in the mesh, row-major in that extent.
        procs: Current processes of these ranks.
    """

    team: int
    labels: list[str]
    sizes: list[int]
    ranks: list[int]
    procs: list[int]


class Run(_Message, frozen=True, tag=3):
    """Commands of one team.

    Attributes:
        team: Number of the team.
        first: Number of the first command, counted over all commands of the team.
        stream: The commands; see the docstring of this module.
    """

    team: int
    first: int
    stream: list[Any]


class Fetch(_Message, frozen=True, tag=12):
    """Request tensors as they are after all earlier commands. It is not a command and is not counted as one.

    Attributes:
        team: Team of the tensors.
        request: Number that the reply carries.
        refs: Refs of the tensors.
        is_large: Whether the controller reads them from lent memory of the rank, if that has room.
    """

    team: int
    request: int
    refs: list[int]
    is_large: bool = False


class Done(_Message, frozen=True, tag=4):
    """Progress report: a rank has executed commands of a team.

    Attributes:
        team: Number of the team.
        count: Commands executed since the team was opened.
        failed: Root-cause failures since the last report: number of the command, description. No follow-on errors.
    """

    team: int
    count: int
    failed: list[tuple[int, str]]


class TensorReply(_Message, frozen=True, tag=5):
    """Result of a request.

    Attributes:
        request: Number of the request.
        payload: An encoded value, or an exception; empty when the first body holds it.
        failed_at: [team, number] of the command that has failed; None for a value.
        lent: Handle of the buffer that holds the rest of the value, as `Handle.fields`; None when there is no rest. The
            controller reads it and confirms with a `Taken` whose move is the number of the request.
    """

    request: int
    payload: bytes
    failed_at: tuple[int, int] | None = None
    lent: tuple[Any, ...] | None = None


class Fetched(_Message, frozen=True, tag=13):
    """Small tensors requested by a `Fetch`, packed by `pack`; all others arrive as a `TensorReply`."""

    request: int
    data: bytes


NO_RANK: Final = -1
"""`Answer.failed_place` when no rank has failed."""

ENDED: Final = -2
"""`Answer.failed_place` when a process of the team has ended."""


class Lost(_Message, frozen=True, tag=8):
    """A process of a team has ended, so operations that need the whole team fail from now on.

    Attributes:
        team: Number of the team.
    """

    team: int


class Stuck(_Message, frozen=True, tag=11):
    """A rank waits for an actor of its process, which may wait for an actor of the controller's process (rule N2).

    Attributes:
        calls: Calls from the sender's process to the controller's that have to end first.
        waits: Nodes of the sender's process that the rank waits for, if other processes have to end them; empty if
            there are `calls`.
    """

    calls: list[int]
    waits: tuple[NodeRef, ...]


class Ask(_Message, frozen=True, tag=9):
    """Query of a rank to the store of its team, which is in the process of the team's first rank.

    Attributes:
        controller: The process that has opened the engine.
        team: Number of the team there.
        ask: Number of the query, counted by the sender.
        verb: Name of the query; see `TeamTable`.
        keys, values, numbers: Arguments of the query.
    """

    controller: int
    team: int
    ask: int
    verb: str
    keys: list[str]
    values: list[bytes]
    numbers: list[int]


class Answer(_Message, frozen=True, tag=10):
    """Answer to an `Ask`.

    Attributes:
        ask: Number of the query.
        number: Result, by verb.
        values: Results, by verb; after a failure an encoded exception, if there is one.
        failed_place: Place in the team of the rank that could not take part, or `NO_RANK`, or `ENDED`.
    """

    ask: int
    number: int
    values: list[bytes]
    failed_place: int = NO_RANK


class Offer(_Message, frozen=True, tag=6):
    """Offer of a tensor from one rank to another: a buffer to read, its bytes as a body, or the error in its place.

    Attributes:
        controller: The process that controls both ranks.
        move: Number of the move, given by the controller.
        handle: Handle of a buffer, as `Handle.fields`; None when the body holds all bytes.
        poison: Team, number and name of the command that has failed; the body is its error.
        part: For a global tensor: the tensor dimension that is cut along each dimension of the mesh, then the part as
            `Part.fields`, or None if the receiver gets no part.
    """

    controller: int
    move: int
    handle: tuple[Any, ...] | None = None
    poison: tuple[int, int, str] | None = None
    part: tuple[list[int], tuple[Any, ...] | None] | None = None


class Taken(_Message, frozen=True, tag=7):
    """Release of an offered tensor: its memory is not needed any more.

    Attributes:
        controller, move: As in the offer.
        is_unread: The receiver cannot read memory of the sender, and waits for an offer with all bytes in its body.
    """

    controller: int
    move: int
    is_unread: bool = False


AnyMessage = Open | NewTeam | Run | Fetch | Done | TensorReply | Fetched | Offer | Taken | Lost | Ask | Answer | Stuck

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(AnyMessage)

encode = _ENCODER.encode


def decode(payload: bytes | bytearray | memoryview) -> AnyMessage:
    """Decode one message.

    Raises:
        ProtocolError: The bytes are not a message. No bytes make it raise anything else.
    """
    try:
        message: AnyMessage = _DECODER.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a message of the tensor engine must be one of its structs: {error}") from error
    return message


def kinds_of(described: Any) -> str:
    """Return the kind, "r", "n" or "b", of each operand that an encoded argument takes."""
    match described:
        case ["r" | "n" | "b" as kind]:
            return str(kind)
        case ["l" | "t", *parts]:
            return "".join(map(kinds_of, parts))
        case ["d", *parts]:
            return "".join(map(kinds_of, parts[1::2]))
        case _:
            return ""


# ---- errors of the tensor engine -------------------------------------------------------------------------------------

PROCESS_ENDED: Final = "a process of the group has ended"
"""Text of a `CollectiveFailed` that was caused by the end of a process."""


class RecordingError(TrimeshError):
    """A function cannot be recorded, or cannot be replayed with these arguments; the text has the reason."""
