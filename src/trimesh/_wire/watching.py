"""The control structs of those who look on, and of debuggers, and what all have in common; see `messages`."""

# Annotations are not texts here: msgspec would compile each of them in every new process.

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of the control structs."""


class Observe(Message, frozen=True, tag=42):
    """What does the receiver do, and the processes that it owns?

    Attributes:
        number: Of the question at its sender.
        seconds: For how long the sender waits for the answer.
    """

    number: int
    seconds: float


class Observed(Message, frozen=True, tag=43):
    """The answer; its one body is what `_wire.observed` encodes."""

    number: int


class Interrupt(Message, frozen=True, tag=44):
    """Cancel a call that runs or waits in the receiver, for a person: its caller gets a `RemoteCancelled`.

    Attributes:
        caller: The process that has made it.
        call: Its number there.
        reason: For people.
    """

    caller: int
    call: int
    reason: str


class HoldNews(Message, frozen=True, tag=48):
    """News of a thread that a debugger holds: goes from owner to owner up to the controller.

    Attributes:
        proc: The process of the thread.
        hold: Number of the hold there.
        kind: "held"; then "output", "prompt" (a line is awaited) and at last "ended".
        text: What is said; of "held" the row that tells of it.
    """

    proc: int
    hold: int
    kind: str
    text: str


class Steer(Message, frozen=True, tag=49):
    """What a terminal says to a thread that a debugger holds: goes from the controller down to its process.

    Attributes:
        proc, hold: Which thread, as in `HoldNews`.
        kind: "attach", "line" or "detach".
    """

    proc: int
    hold: int
    kind: str
    text: str


class Pause(Message, frozen=True, tag=51):
    """These of your calls to me wait for a thread that a debugger holds: their deadlines are to wait, too.

    Attributes:
        calls: Their numbers; None for all, and for those that will come; empty when none wait any more.
    """

    calls: tuple[int, ...] | None


AnyMessage = Observe | Observed | Interrupt | HoldNews | Steer | Pause
