"""The messages of the tensor engine: commands to the ranks, acknowledgements and values from them.

    controller                                    rank
      Open, Team, Run, Fetch ------------------>    executes commands in the order of each team
      <--------------------- Done, TensorReply, Fetched

    rank                                          first rank of its team
      Ask ------------------------------------->    what the ranks tell each other to make process groups
      <----------------------------------- Answer

    rank that sends                               rank that receives
      Offer ----------------------------------->    reads the memory that it names, or has got its bytes
      <------------------------------------ Taken

So do the controller and a rank: what one has for the other is named by a body of a command, or by a reply.

A stream of commands is one flat list. A command is a number, then its operands:

    DEFINE   number, description    from now on `number` is the operation that the description says
    FREE     [ref, ...]             forget these tensors
    RESET                           forget every definition
    RECORD   number, body, [stream, ...], formals, results, captured, carried
                                    from now on `number` is these commands, in parts, whose bodies begin at `body`
    REPLAY   number, part, first, [ref, ...], move
                                    run one part of them: before the first one these tensors become the formal ones,
                                    after the last one results are `first` and after it; moves are numbered from `move`
    FORGET   number                 forget these commands
    n >= FIRST_SIGNATURE            first output, then what the description of `n` says: refs, numbers, bodies

So an operation that was seen before takes some ten bytes. Pure: values and bytes only.
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
"""Kernels that send tensors or take them, and which of their operands is the number of the move: each run of what was
recorded has numbers of its own."""

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


class NewTeam(_Message, frozen=True, tag=2):
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


class Fetch(_Message, frozen=True, tag=12):
    """Send tensors back, as they are after all commands that came before; no command itself, so nothing counts it.

    Attributes:
        team: Whose they are.
        request: Number of the reply.
        refs: The tensors.
        is_large: Whether the controller reads them from memory of the rank, where that has room.
    """

    team: int
    request: int
    refs: list[int]
    is_large: bool = False


class Done(_Message, frozen=True, tag=4):
    """A rank has executed commands of a team.

    Attributes:
        team: Its number.
        count: How many since it was opened.
        failed: Those that have failed by themselves, not because of another, since the report before: number, what.
    """

    team: int
    count: int
    failed: list[tuple[int, str]]


class TensorReply(_Message, frozen=True, tag=5):
    """What a command was to bring back.

    Attributes:
        request: Its number.
        payload: An encoded value, or an exception; empty when the first body holds it.
        failed_at: [team, number] of the command that has failed; None for a value.
        lent: Handle of the buffer where the rest of it lies, as `Handle.fields`; None when there is no rest. The
            controller reads it, and says that it has taken the move with the number of the request.
    """

    request: int
    payload: bytes
    failed_at: tuple[int, int] | None = None
    lent: tuple[Any, ...] | None = None


class Fetched(_Message, frozen=True, tag=13):
    """Small tensors that a `Fetch` has asked for, as `pack` has packed them; others come as a `TensorReply`."""

    request: int
    data: bytes


NO_RANK: Final = -1
"""In place of a rank that has failed: none has."""

ENDED: Final = -2
"""In place of a rank that has failed: a process of the team has ended."""


class Lost(_Message, frozen=True, tag=8):
    """A process of a team has ended: nothing that needs all of the team can be done any more.

    Attributes:
        team: Its number.
    """

    team: int


class Stuck(_Message, frozen=True, tag=11):
    """A rank waits for an actor of its process, and that one maybe for an actor of the controller's process (rule N2).

    Attributes:
        calls: The calls of the sender's process to the controller's that have to end first.
        waits: What the rank waits for, if third processes are part of it.
    """

    calls: list[int]
    waits: tuple[NodeRef, ...]


class Ask(_Message, frozen=True, tag=9):
    """A rank asks the store of its team, which is in the process of the team's first rank.

    Attributes:
        controller: The process that has opened the engine.
        team: Its number there.
        ask: Number of the question, at the asker.
        verb: What is asked; see `TeamTable`.
        keys, values, numbers: What it is asked about.
    """

    controller: int
    team: int
    ask: int
    verb: str
    keys: list[str]
    values: list[bytes]
    numbers: list[int]


class Answer(_Message, frozen=True, tag=10):
    """The answer to an `Ask`.

    Attributes:
        ask: Number of the question.
        number: As the verb says.
        values: As the verb says; of a failure an encoded exception, if there is one.
        failed_place: Place in the team of the rank that could not take part, or one of the following.
    """

    ask: int
    number: int
    values: list[bytes]
    failed_place: int = NO_RANK


class Offer(_Message, frozen=True, tag=6):
    """A tensor on its way from one rank to another: where it lies; its bytes as a body; or why there is none.

    Attributes:
        controller: The process that both obey.
        move: Number there.
        handle: Of a buffer, as `Handle.fields`; None when the body has all.
        poison: Team, number and name of the command that has failed, whose error is the body.
        part: Of a global tensor: for each dimension of the mesh the one that is cut along it, and which part this is,
            as `Part.fields`; None in its place if there is none for the receiver.
    """

    controller: int
    move: int
    handle: tuple[Any, ...] | None = None
    poison: tuple[int, int, str] | None = None
    part: tuple[list[int], tuple[Any, ...] | None] | None = None


class Taken(_Message, frozen=True, tag=7):
    """What was offered is not needed any more.

    Attributes:
        controller, move: As in the offer.
        is_unread: Nothing carries bytes between the two processes: an offer with all of them as its body is waited for.
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


# ---- errors of the tensor engine that have no better name elsewhere --------------------------------------------------

PROCESS_ENDED: Final = "a process of the group has ended"
"""What `CollectiveFailed` says where that is why."""


class RecordingError(TrimeshError):
    """A function cannot be recorded, or not be replayed with such arguments: see the text."""
