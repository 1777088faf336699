"""Runs that only say what they do: views of as many processes as wanted, merged as those of a real run are."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from trimesh._wire import observed
from trimesh._wire.observed import (
    ActorRow,
    CallRow,
    DiskRow,
    EventRow,
    GPURow,
    HostRow,
    LinkRow,
    OutputRow,
    PinRow,
    ProcRow,
    ProcView,
    PublicationRow,
    SampleRow,
    WaitRow,
)
from trimesh.errors import ConnectError
from trimesh.observe import Cause, RunSnapshot
from trimesh.observe.past import Past
from trimesh.observe.run_snapshot import merge

STACK = """Stack (most recent call first):
  File "train.py", line 88 in backward
  File "train.py", line 51 in step
  File "/usr/lib/python3/dist-packages/trio/_core/_run.py", line 2 in run
"""


class RiggedSource:
    """A run of `hosts` times `gpus` ranks, a few of which are in trouble.

    Attributes:
        acts: What was asked to be done: what, target.
        is_gone: Whether it does not answer any more.
    """

    def __init__(self, hosts: int = 512, gpus: int = 8, *, is_well: bool = False) -> None:
        self.hosts, self.gpus, self.is_well = hosts, gpus, is_well
        self.acts = list[tuple[str, str]]()
        self.is_gone = False
        self.looks = 0
        self._random = random.Random(7)
        self._gpus = tuple(
            GPURow(index=index, percent=90 - index, memory_bytes=141 << 30, used_bytes=index << 34, celsius=60)
            for index in range(gpus)
        )
        self._disks = (
            DiskRow(path="/tmp", nbytes=1 << 40, free_bytes=1 << 39),
            DiskRow(path="/dev/shm", nbytes=1 << 40, free_bytes=1 << 34),
        )

    def snapshot(self) -> RunSnapshot:
        """Return what all say, as it is merged of a real run."""
        if self.is_gone:
            raise ConnectError("the run of process 4242 has ended")
        self.looks += 1
        return merge(self.views(), 1_800_000_000.0 + self.looks)

    def samples(self, after: int) -> tuple[int, list[SampleRow]]:
        """Return a loss of each rank, of one more step each time."""
        at, found = 1_800_000_000.0 + after, list[SampleRow]()
        for rank in range(min(64, self.hosts * self.gpus)):
            values = {"loss": float(rank)}
            found.append(SampleRow(at=at, proc="1", name=f"trainer{rank}", mesh="trainer", step=after, values=values))
        return after + 1, found

    def past(self, after: float, *, curves: bool) -> Past:
        """Return nothing: it keeps no history."""
        return Past()

    def views(self) -> list[ProcView]:
        """Return what each process says."""
        states = {} if self.is_well else {77: "stuck", 78: "stuck", 300: "silent", 1234: "dead", 2222: "stopped"}
        controller = ProcRow(id="0", pid=4242, memory_bytes=90 << 20)
        made, children, views = list[CallRow](), list[ProcRow](), list[ProcView]()
        for rank in range(self.hosts * self.gpus):
            point = {"hosts": rank // self.gpus, "gpus": rank % self.gpus}
            state = states.get(rank % 4096, "running")
            inside = ",".join(f"{label}={place}" for label, place in point.items())
            proc = ProcRow(
                id=f"{rank + 1:x}",
                parent="0",
                name=f"trainers[{inside}]",
                mesh="trainers",
                point=point,
                pid=10_000 + rank,
                host=f"node{rank // self.gpus}",
                state=state,
                stalled_seconds=6.0 + self.looks if state == "stuck" else 0.0,
                stack=STACK if state in ("stuck", "silent") else "",
                memory_bytes=(2 << 30) + self._random.randrange(1 << 29) + (12 << 30) * (rank == 900),
            )
            children.append(proc)
            call = CallRow(
                id=f"0.{self.looks}@{proc.id}",
                proc=proc.id,
                name=f"trainer[{inside}]",
                mesh="trainer",
                point=point,
                endpoint="step",
                caller="controller",
                caller_proc="0",
                state="running",
                age=1.5,
                left=58.5,
                at='File "train.py", line 51, in step',
            )
            made.append(call)
            queued = self._random.randrange(4) if self._random.random() < 0.2 else 0
            actor = ActorRow(
                proc=proc.id, name=call.name, mesh="trainer", point=point, cls="Trainer", queued=queued, running=1
            )
            link = LinkRow(
                proc=proc.id,
                peer="0",
                messages_sent=self.looks * 40,
                messages_received=self.looks * (30 + rank % 50),
                bytes_sent=self.looks << 16,
                bytes_received=self.looks << 17,
                queued_bytes=(1 << 20) * (rank == 5),
            )
            if state in ("running", "stuck"):
                views.append(ProcView(proc=proc, actors=(actor,), calls=(call,), links=(link,)))
        events = () if self.is_well else tuple(self._events())
        job = observed.JobRow(
            id="0", pid=4242, host="login1", command="python train.py --config large.toml", started_at=1_799_985_000.0
        )
        hosts = tuple(self._machine(f"node{number}") for number in range(self.hosts))
        root = ProcView(
            proc=controller, children=tuple(children), calls=tuple(made), events=events, job=job, hosts=hosts
        )
        return [root, *views]

    def _machine(self, name: str) -> HostRow:
        if name == "node7" and not self.is_well:
            return HostRow(name=name, agent="silent")
        return HostRow(
            name=name, agent="running", pid=900, at=1_800_000_000.0 + self.looks, cpus=192,
            cpu_seconds=40.0 * self.looks, memory_bytes=2 << 40, memory_free_bytes=1 << 40,
            received_bytes=self.looks << 24, sent_bytes=self.looks << 20, disks=self._disks, gpus=self._gpus,
            trimesh="0.1.0", python="3.12.4", kernel="6.8.0",
        )  # fmt: skip

    def _events(self) -> Sequence[EventRow]:
        return [
            EventRow(
                number=1,
                at=1_799_999_940.0,
                kind="Died",
                name="trainers[hosts=154,gpus=2]",
                mesh="trainers",
                point={"hosts": 154, "gpus": 2},
                text="ProcDied: trainers[hosts=154,gpus=2] was killed by SIGKILL (pid 11234); memory was short",
                is_failure=True,
                causes=("MemoryError: 12.0 GiB asked for", 'at File "train.py", line 40, in load'),
            )
        ]

    def output(self, after: int) -> Sequence[OutputRow]:
        """Return lines that several ranks have written."""
        return [
            OutputRow(
                number=number, at=1_800_000_000.0 + number // 4, name=f"trainers[hosts=0,gpus={number % 4}]",
                stream=1 + (number % 9 == 0), text=f"step {number // 4}: loss {3.0 / (1 + number // 4):.4f}",
            )
            for number in range(after + 1, max(after + 1, 200 + self.looks))
        ]  # fmt: skip

    def kill(self, proc_id: str) -> None:
        """Note it."""
        self.acts.append(("kill", proc_id))

    def cancel(self, call_id: str) -> None:
        """Note it."""
        self.acts.append(("cancel", call_id))

    def has_ended(self) -> bool:
        """Return whether it is over."""
        return self.is_gone

    def cores(self) -> dict[str, float]:
        """Return nothing: they are counted."""
        return {}

    def cause(self) -> Cause | None:
        """Return what it has died of."""
        return Cause(
            kind="died", text="trainers[hosts=154,gpus=2] has died first: SIGKILL", name="trainers[hosts=154,gpus=2]"
        )


class KeepingSource(RiggedSource):
    """A rank holds a lock in C, another one keeps a version of a third one, and those of a fourth one are not read."""

    def views(self) -> list[ProcView]:
        """Return what each process says."""
        [root, *views] = super().views()
        names = {view.proc.id: view for view in views}
        silent = msgspec.structs.replace(names["2"].proc, state="silent", kernel_state="S", stack=STACK)
        children = tuple(silent if one.id == silent.id else one for one in root.children)
        pin = PinRow(proc="4", version=1, seconds=75.0)
        rows = {
            "3": PublicationRow(proc="3", number=1, latest=2, slots=2, pins=(pin,), pinned=(1,), is_waiting=True),
            "5": PublicationRow(proc="5", number=2, latest=40, slots=2, unread=40, unread_seconds=75.0),
        }
        said = [
            msgspec.structs.replace(view, publications=(rows[proc_id],)) if proc_id in rows else view
            for proc_id, view in names.items()
            if proc_id != silent.id
        ]
        return [msgspec.structs.replace(root, children=children), *said]


class WaitingSource(RiggedSource):
    """Calls that wait for each other, and many that wait for one."""

    def views(self) -> list[ProcView]:
        """Return what each process says."""
        [root, *views] = super().views()
        calls = list[CallRow]()
        for number, (name, endpoint, *waits) in enumerate(
            [
                ("a[gpus=0]", "meet", "1"),
                ("b[gpus=0]", "ping", "2"),
                ("b[gpus=0]", "meet", "3"),
                ("a[gpus=0]", "ping", "0"),
                ("front[gpus=0]", "ask", "0"),
                *((f"asker[gpus={rank}]", "ask", "6") for rank in range(1)),
                ("store[gpus=3]", "read"),
                *((f"asker[gpus={rank}]", "ask", "6") for rank in range(1, 30)),
            ]
        ):
            calls.append(
                CallRow(
                    id=str(number),
                    proc="1",
                    name=name,
                    mesh=name.partition("[")[0],
                    endpoint=endpoint,
                    caller="controller",
                    state="waiting" if waits else "running",
                    age=12.0 + number,
                    left=48.0 if "meet" in endpoint else None,
                    waits=tuple(WaitRow(kind="call", call=other) for other in waits),
                    at=f'File "serve.py", line {30 + len(endpoint)}, in {endpoint}',
                )
            )
        return [msgspec.structs.replace(root, calls=(*calls, *root.calls)), *views]
