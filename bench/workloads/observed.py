"""What observing costs: a program with control socket and flight records beside one without, in turn.

Both run at the same time, and one waits while the other makes a few calls, so that both see the same neighbours; each
sample is the ratio of what two such turns took. There are several pairs of programs, for two that do the same differ by
a few percent for as long as they run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bench.scale import Metric, Samples, Scale

KINDS = {
    "call_one": "call_one round trip",
    "call_one_pinned": "the same, all on one core",
    "batch": "an item of map",
    "tasks": "pipelined call_one, a task a call",
    "broadcast": "a broadcast, sent and drained",
}

METRICS = [
    *(Metric(f"observed_{kind}", f"{title}: observed / not", "x", goals=(1.03,)) for kind, title in KINDS.items()),
    Metric("record_call_one", "call_one on one core: processor time of its record", "us", goals=(1,)),
    Metric("record_broadcast", "a broadcast: processor time of its record", "us", goals=(1,)),
]

LACKS = dict.fromkeys(("monarch", "ray", "xoscar"), "what is switched off is of trimesh")

Turn = tuple[float, float]
"""Microseconds of a call, and of those the processor time of the actor's process."""


class Program:
    """A program that measures on request.

    Attributes:
        pid: Of its process.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.pid = process.pid
        self._process = process

    def answer(self) -> str:
        """Return the next line that it writes."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a program of this workload has ended with status {self._process.wait()}")
        return line

    def request(self, *words: object) -> Any:
        """Write a line of words and return the JSON that the program answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{' '.join(map(str, words))}\n")
        self._process.stdin.flush()
        return json.loads(self.answer())

    def turn(self, kind: str, calls: int, warm_up: int) -> Turn:
        """Let it make calls, and some before that are not measured."""
        took, busy = self.request(kind, calls, warm_up)
        return took, busy


@contextmanager
def open_program(module: str, *arguments: str, **settings: str) -> Iterator[Program]:
    """Run a module as a program that measures on request, with settings as environment variables."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": "0"} | settings,
    ) as process:
        program = Program(process)
        assert program.answer() == "ready\n"
        yield program


async def trimesh_side(scale: Scale) -> Samples:
    found: Samples = {metric.name: [] for metric in METRICS}
    for pair in range(2 * scale.spawns):
        with ExitStack() as stack:
            names = ("on", "off") if pair % 2 else ("off", "on")
            programs = {}
            for name in names:
                settings = {"TRIMESH_OBSERVE": name, "TRIMESH_RECORD": name}
                programs[name] = stack.enter_context(open_program("bench.observed_program", **settings))
            for turn in range(scale.rates):
                for kind in KINDS:
                    calls = scale.calls // 10 if kind.startswith("call_one") else scale.rate_calls
                    order = names if turn % 2 else names[::-1]
                    took = {name: programs[name].turn(kind, calls, max(1, calls // 10)) for name in order}
                    found[f"observed_{kind}"].append(took["on"][0] / took["off"][0])
                    record = {"call_one_pinned": "record_call_one", "broadcast": "record_broadcast"}.get(kind)
                    if record is not None:
                        found[record].append(took["on"][1] - took["off"][1])
    return found
