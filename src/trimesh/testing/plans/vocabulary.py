"""The faults that a test can plan, one record each. PURE: what is wanted, not how it is done.

An *executor* makes a record happen: `sim` in simulated processes, `proc` in real ones. Each says which it can do.

| fault | what it means |
|---|---|
| `EndpointFault` | the nth start of an endpoint at some members raises, or is late |
| `LostCall` | a frame of the nth call is lost; a link is reliable, so the link is lost with it |
| `Death` | a process ends, stops or is stuck, by one of `HOWS` |
| `LinkFault` | messages between two places are late, lost, repeated or damaged |
| `Partition` | two places do not hear of each other until it is healed |
| `SpawnFault` | the nth process from now on is not started, or ends before its first word |
| `ClockFault` | the clock of some processes jumps, runs at another rate, or each is wrong by an amount of its own |
| `ProcessorFault` | some processes compute for a while whenever an endpoint starts there |
| `LoopLag` | some processes do nothing for a while |
| `ResourceFault` | the system refuses memory or descriptors to some processes |
| `HostFault` | a host of a simulated job is lost, or cut off until it is healed |
| `TransferFault` | the nth transfer of a buffer that some processes make raises, or is late |
"""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Hashable
from typing import Final, Literal

import attrs

Place = tuple[Hashable, int] | None
"""A member: the key of its process mesh and its rank, for all its incarnations; None for the controller."""

Loss = Literal["request", "reply", "in_flight"]
Direction = Literal["both", "a_to_b", "b_to_a"]
Stage = Literal["launch", "handshake"]
Refusal = Literal["ENOSPC", "EMFILE"]
Moment = Literal["now", "start", "end"]
MOMENTS: Final[tuple[Moment, ...]] = ("now", "start", "end")

LOSSES: Final = ("request", "reply", "in_flight")
DIRECTIONS: Final = ("both", "a_to_b", "b_to_a")
STAGES: Final = ("launch", "handshake")
REFUSALS: Final = ("ENOSPC", "EMFILE")
SIGNALS: Final = {
    "sigkill": signal.SIGKILL,
    "sigterm": signal.SIGTERM,
    "sigsegv": signal.SIGSEGV,
    "abort": signal.SIGABRT,
    "oom": signal.SIGKILL,
}
HOWS: Final = (*SIGNALS, "sigstop", "exit(n)", "hold_gil(seconds)")
_WITH_NUMBER: Final = re.compile(r"(exit|hold_gil)\((\d+(?:\.\d+)?)\)")


@attrs.frozen
class Where:
    """Members that a fault is for.

    Attributes:
        text: For people, as `w[gpus=2]`.
        places: Their processes.
    """

    text: str
    places: tuple[Place, ...]


@attrs.frozen
class EndpointFault:
    """From the `nth` start on, counted for each member since this was planned, `times` starts misbehave.

    Attributes:
        mesh, ranks: The actor mesh, and the members of it.
        error: What is raised instead of running the endpoint, or None.
        seconds: By how much the start is late.
    """

    where: Where
    mesh: int
    ranks: tuple[int, ...]
    endpoint: str
    nth: int = 1
    times: int = 1
    error: BaseException | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        effect = f"delays({self.seconds:g})" if self.error is None else f"raises({type(self.error).__name__})"
        return f"at {self.where.text}.{self.endpoint} nth={self.nth}: {effect}"


@attrs.frozen
class LostCall:
    """The nth call of an endpoint loses a frame, and its process the link to the caller.

    Attributes:
        mesh, ranks: The actor mesh, and the members of it.
        what: "request" (the endpoint does not run), "in_flight" (it is running), "reply" (it has run).
    """

    where: Where
    mesh: int
    ranks: tuple[int, ...]
    endpoint: str
    what: Loss
    nth: int = 1

    def __str__(self) -> str:
        return f"call {self.where.text}.{self.endpoint} nth={self.nth}: lose({self.what})"


@attrs.frozen
class Death:
    """Processes end, or stop answering, now.

    Attributes:
        how: One of `HOWS`.
        moment: When a real process ends by "sigkill": at once; or at the start, or the end, of its next endpoint.
    """

    where: Where
    how: str
    moment: Moment = "now"

    def __str__(self) -> str:
        at = "" if self.moment == "now" else f" at the {self.moment} of an endpoint"
        return f"kill {self.where.text}: {self.how}{at}"


@attrs.frozen
class LinkFault:
    """Messages between two places are disturbed until the fault is healed.

    Attributes:
        kind: "drop" and "reset" end the link at the message that is hit, "corrupt" damages it, which breaks the
            protocol and so ends the link, "duplicate" sends it twice, "delay", "reorder" and "bandwidth" make it late.
        amount: Probability for "drop", "duplicate" and "corrupt"; seconds for "delay" and "reorder"; bytes a second for
            "bandwidth"; bytes for "reset".
    """

    a: Where
    b: Where
    kind: Literal["drop", "delay", "duplicate", "reorder", "corrupt", "bandwidth", "reset"]
    amount: float
    direction: Direction = "both"

    def covers(self, source: Place, target: Place) -> bool:
        """Tell whether what `source` sends to `target` is disturbed."""
        forth = source in self.a.places and target in self.b.places
        back = source in self.b.places and target in self.a.places
        return (forth and self.direction != "b_to_a") or (back and self.direction != "a_to_b")

    @property
    def is_certain(self) -> bool:
        """Whether it must hit something, and not by chance only."""
        return self.kind not in ("drop", "duplicate", "corrupt") or self.amount >= 1

    def __str__(self) -> str:
        return f"link {self.a.text} - {self.b.text}: {self.kind}({self.amount:g})"


@attrs.frozen
class Partition:
    """Nothing passes between two places until it is healed; it is then delivered, in order."""

    a: Where
    b: Where
    direction: Direction = "both"

    def __str__(self) -> str:
        return f"partition {self.a.text} - {self.b.text}: {self.direction}"


@attrs.frozen
class SpawnFault:
    """The nth process that is started from now on fails."""

    nth: int
    stage: Stage

    def __str__(self) -> str:
        return f"spawn nth={self.nth}: {self.stage}"


@attrs.frozen
class ClockFault:
    """The wall clock of processes is set, or all their clocks run `1 + drift` times as fast.

    Attributes:
        jump: Seconds by which it is set forward.
        drift: Share by which it runs faster.
        skew: Each is set forward or back by a time of its own, up to so many seconds.
    """

    where: Where
    jump: float = 0.0
    drift: float = 0.0
    skew: float = 0.0

    def jumps(self, draw: random.Random) -> tuple[float, ...]:
        """Return by how much the wall clock of each place is set forward."""
        return tuple(self.jump + draw.uniform(-self.skew, self.skew) for _ in self.where.places)

    def __str__(self) -> str:
        kind = "drift" if self.drift else "skew" if self.skew else "jump"
        effect = f"{kind}({self.drift or self.skew or self.jump:g})"
        return f"clock {self.where.text}: {effect}"


@attrs.frozen
class ProcessorFault:
    """Whenever an endpoint starts in one of these processes, the process first computes for `seconds`."""

    where: Where
    seconds: float

    def __str__(self) -> str:
        return f"processor {self.where.text}: slow({self.seconds:g})"


@attrs.frozen
class LoopLag:
    """Processes take no message and send none for `seconds`; their heartbeats go on."""

    where: Where
    seconds: float

    def __str__(self) -> str:
        return f"loop {self.where.text}: lag({self.seconds:g})"


@attrs.frozen
class ResourceFault:
    """The system refuses what the links of some processes need, `times` times from the `nth` on, counted for each.

    Attributes:
        error: "ENOSPC": there is no shared memory, for a ring or a segment. "EMFILE": there is no descriptor, for one
            of these or for what a peer passes.
    """

    where: Where
    error: Refusal
    nth: int = 1
    times: int = 1

    def __str__(self) -> str:
        return f"resources {self.where.text} nth={self.nth}: fails({self.error})"


@attrs.frozen
class TransferFault:
    """From the `nth` transfer on, counted for each process since this was planned, `times` transfers misbehave.

    A transfer is a read, a write or an atomic operation of a buffer, also inside of a publication.

    Attributes:
        error: What is raised instead of making the transfer, or None.
        seconds: By how much it is late.
    """

    where: Where
    nth: int = 1
    times: int = 1
    error: BaseException | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        effect = f"delays({self.seconds:g})" if self.error is None else f"raises({type(self.error).__name__})"
        return f"transfer {self.where.text} nth={self.nth}: {effect}"


@attrs.frozen
class HostFault:
    """A host of a job is lost, hears and says nothing until it is healed, or has a bad network.

    Attributes:
        host: Its rank among those of the job.
        kind: "lose" or "cut"; of real networks alone, "drop", "bandwidth" or "reset".
        direction: Of a cut, and of what drops: "a_to_b" is to the host, "b_to_a" from it.
        amount: Probability of "drop" for a packet; bytes a second of "bandwidth".
    """

    host: int
    kind: Literal["lose", "cut", "drop", "bandwidth", "reset"]
    direction: Direction = "both"
    amount: float = 0.0

    def __str__(self) -> str:
        amount = f" {self.amount:g}" if self.amount else ""
        return f"host {self.host}: {self.kind}{amount}" + ("" if self.direction == "both" else f"({self.direction})")


MemberFault = (
    EndpointFault
    | LostCall
    | Death
    | LinkFault
    | Partition
    | SpawnFault
    | ClockFault
    | ProcessorFault
    | LoopLag
    | ResourceFault
    | TransferFault
)
"""What happens to members."""

Fault = MemberFault | HostFault


@attrs.frozen
class Fired:
    """A fault that happened.

    Attributes:
        time: Seconds since the run began; virtual in a simulation.
        site: Where in the runtime.
        where: Coordinates.
        fault: Which.
    """

    time: float
    site: str
    where: str
    fault: Fault


def parse_how(how: str) -> tuple[str, float]:
    """Return (kind, number) of a way to die: `exit(3)` gives ("exit", 3.0), `sigkill` ("sigkill", 0.0).

    Raises:
        ValueError: There is no such way.
    """
    found = _WITH_NUMBER.fullmatch(how)
    if found is not None:
        return found[1], float(found[2])
    if how in SIGNALS or how == "sigstop":
        return how, 0.0
    raise ValueError(f"a process is killed by one of {', '.join(HOWS)}; got {how!r}")


def checked_count(name: str, value: int) -> int:
    """Return a number that counts from 1.

    Raises:
        ValueError: It is smaller, or no whole number.
    """
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} counts from 1, got {value!r}")
    return value


def checked_amount(name: str, value: float, *, most: float = float("inf")) -> float:
    """Return an amount that is positive and at most `most`.

    Raises:
        ValueError: It is not.
    """
    if not 0 < value <= most:
        raise ValueError(f"{name} must be above 0 and at most {most:g}, got {value!r}")
    return float(value)
