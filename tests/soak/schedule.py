"""What happens under one seed of the mixed workload: the policy, what callers do, what goes wrong. Drawn ahead."""

from __future__ import annotations

import random
from typing import Any, Final

import attrs

from trimesh import ActorFailed, Backoff, FailFast, Isolate, ProcDied, Restart, Unresponsive

CALLERS: Final = 4
DEADLINES: Final = (0.02, 0.3, 1.0, 2.5)
PAUSES: Final = (0.0, 0.0, 0.05, 0.5)
BALLAST: Final = (0, 0, 0, 0, 0, 2_000, 100_000)
"""Bytes beside the arguments; the last is more than rides in one frame."""

CALLS: Final = ("call", "call", "call_settled", "call_one", "choose", "broadcast", "broadcast_nowait", "retried")
ENDPOINTS: Final = ("one", "one", "three", "three", "again", "inline", "threaded")
HOWS: Final = ("at once", "at once", "sleep", "sleep", "fail", "hold", "unwind slowly", "fail when cancelled")

OTHERS: Final[dict[str, float]] = {"items": 3, "map": 3, "channel": 3, "flood": 0.15, "spawn": 1, "nest": 1, "procs": 1}
"""What callers do beside calls, and how often."""

TROUBLES: Final[dict[str, float]] = {
    "kill": 4,
    "stop": 1,
    "partition": 2,
    "between": 1,
    "delay": 2,
    "lag": 1,
    "raise": 3,
    "late": 1,
    "lose": 1,
    "actor": 4,
    "replace": 2,
}
"""Faults, and what is done to members on purpose, and how often."""

SHARE: Final = 0.5
"""Probability with which one seed has a kind at all: what always happens together hides what happens alone."""


@attrs.frozen
class Step:
    """One thing that a caller does.

    Attributes:
        number: The token that travels with it.
        kind: A verb, or one of `OTHERS`.
        endpoint, how, seconds, ballast: What is called, and what it is to do.
        mesh, ranks: Where.
        deadline: Seconds, or None.
        via: Who calls: None for the controller, a rank, or -1 for the actor of another mesh.
        pause: Seconds until the next step.
    """

    number: int
    kind: str
    endpoint: str
    how: str
    seconds: float
    mesh: int
    ranks: tuple[int, ...]
    deadline: float | None
    via: int | None
    pause: float
    ballast: int

    def __str__(self) -> str:
        where = f"{'wv'[self.mesh]}[{','.join(map(str, self.ranks))}]"
        text = f"{self.kind} {self.endpoint}({self.number}, {self.how!r}, {self.seconds:.3g}) on {where}"
        text += "" if self.deadline is None else f" within {self.deadline:g} s"
        return text + ("" if self.via is None else f" by {'another mesh' if self.via < 0 else self.via}")

    __repr__ = __str__


@attrs.frozen
class Trouble:
    """One thing that goes wrong.

    Attributes:
        number: Of the fault.
        after: Seconds since the one before.
        kind: One of `TROUBLES`.
        mesh, rank, other: Whom.
        how: Of a kill.
        seconds: How long.
        nth: Of an endpoint's starts.
        endpoint: Which.
    """

    number: int
    after: float
    kind: str
    mesh: int
    rank: int
    other: int
    how: str
    seconds: float
    nth: int
    endpoint: str

    def __repr__(self) -> str:
        how = self.how if self.kind == "kill" else f"{self.seconds:.3g} s"
        return f"{self.kind} {self.rank} ({how})"


class Schedule:
    """All that happens under one seed.

    Attributes:
        procs: Members of the mesh.
        policy: Of the processes.
        actor_policy: Of the actors, or None for that.
        grace: Seconds.
        callers: What each does, in order.
        troubles: What goes wrong, in order; nothing in one schedule of four.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.procs = draw.choice((2, 2, 3))
        self.policy = self._policy()
        self.actor_policy = self._actor_policy()
        self.grace = draw.choice((1.0, 10.0))
        self._kinds = self._swarm({"calls": 20, **OTHERS})
        self._verbs = self._swarm(dict.fromkeys(CALLS, 1))
        self._hows = self._swarm(dict.fromkeys(HOWS, 1))
        self._number = 0
        self.callers = [[self._step() for _ in range(draw.randint(1, 7))] for _ in range(CALLERS)]
        kinds = self._swarm(TROUBLES)
        is_calm = draw.random() < 0.25
        self.troubles = [] if is_calm else [self._trouble(number, kinds) for number in range(draw.randint(1, 6))]

    @property
    def is_calm(self) -> bool:
        """Whether nothing goes wrong but what callers ask for."""
        return not self.troubles

    def _swarm(self, weights: dict[str, float]) -> dict[str, float]:
        chosen = {kind: weight for kind, weight in weights.items() if self.draw.random() < SHARE}
        return chosen or dict([self.draw.choice(list(weights.items()))])

    def _one(self, weights: dict[str, float]) -> str:
        return self.draw.choices(list(weights), list(weights.values()))[0]

    def _policy(self) -> Any:
        draw = self.draw
        kind = draw.random()
        if kind < 0.2:
            return FailFast()
        if kind < 0.35:
            return Isolate()
        return Restart(
            draw.choice(("one_for_one", "one_for_one", "one_for_all", "rest_for_one")),
            intensity=draw.choice((1, 1_000, 1_000, 1_000)),
            period=draw.choice((1.0, 1_000.0)),
            backoff=Backoff(draw.choice((0.0, 0.0, 0.05, 1.0))),
            on=draw.choice(((ProcDied,), (ProcDied, ActorFailed), (ProcDied, ActorFailed, Unresponsive))),
        )

    def _actor_policy(self) -> Any:
        if self.draw.random() < 0.5:
            return None
        backoff = Backoff(self.draw.choice((0.0, 0.2)))
        return Restart(intensity=self.draw.choice((1, 1_000)), backoff=backoff, on=(ActorFailed,))

    def _step(self) -> Step:
        draw = self.draw
        self._number += 1
        kind = self._one(self._kinds)
        if kind == "calls":
            kind = self._one(self._verbs)
        how = self._one(self._hows)
        endpoint = draw.choice(ENDPOINTS)
        if kind.startswith("broadcast") and how in ("hold", "fail when cancelled"):
            how = "sleep"
        if kind == "retried":
            endpoint = "again"
        count = 1 if kind == "call_one" else draw.randint(1, self.procs)
        seconds = draw.choice((draw.uniform(0, 1.0), draw.uniform(0, 0.1)))
        needs_deadline = how == "hold" and endpoint not in ("inline", "threaded")
        return Step(
            number=self._number,
            kind=kind,
            endpoint=endpoint,
            how=how,
            seconds=seconds,
            mesh=draw.randrange(2),
            ranks=tuple(sorted(draw.sample(range(self.procs), count))),
            deadline=draw.choice(DEADLINES) if needs_deadline or draw.random() < 0.3 else None,
            via=draw.choice((None, None, None, -1, draw.randrange(self.procs))),
            pause=draw.choice(PAUSES),
            ballast=draw.choice(BALLAST),
        )

    def _trouble(self, number: int, kinds: dict[str, int]) -> Trouble:
        draw = self.draw
        return Trouble(
            number=number,
            after=draw.choice((0.0, draw.uniform(0, 0.2), draw.uniform(0, 2.0))),
            kind=self._one(kinds),
            mesh=draw.randrange(2),
            rank=draw.randrange(self.procs),
            other=draw.randrange(self.procs),
            how=draw.choice(("sigkill", "sigkill", "sigterm", "sigsegv", "abort", "exit(0)", "exit(3)", "oom")),
            seconds=draw.choice((draw.uniform(0.01, 1.0), draw.uniform(0.01, 6.0))),
            nth=draw.randint(1, 4),
            endpoint=draw.choice(ENDPOINTS),
        )
