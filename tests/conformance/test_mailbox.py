"""Order, slots and full mailboxes (S01, S02, S07, S08, K02; rule C4)."""

from __future__ import annotations

import contextvars
import gc
import threading
import tracemalloc
from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, RealBackend, SimBackend, attempt, fill, only_real, only_sim, tick
from tests.conformance.probe import Notes, Probe
from tests.patience import HANG_SECONDS

import trimesh
from trimesh import Actor, MeshErrorGroup, endpoint, limits, this_proc


class Slots(Actor):
    """Counts what runs at once."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.order: list[Any] = []
        self.notes = Notes()
        self.gate = trio.Event()

    async def run(self, slots: str, note: Any) -> None:
        self.now[slots] = self.now.get(slots, 0) + 1
        self.most[slots] = max(self.most.get(slots, 0), self.now[slots])
        self.order.append(note)
        self.notes.add(slots)
        await self.gate.wait()
        await trio.lowlevel.checkpoint()
        self.now[slots] -= 1

    @endpoint
    async def one(self, note: Any = None) -> None:
        await self.run("actor", note)

    @endpoint
    async def other(self, note: Any = None) -> None:
        await self.run("actor", note)

    @endpoint
    def inline(self, note: Any = None) -> None:
        self.order.append(note)

    @endpoint(concurrency=3)
    async def three(self, note: Any = None) -> None:
        await self.run("three", note)

    @endpoint(concurrency=2)
    async def two(self, note: Any = None) -> None:
        await self.run("two", note)

    @endpoint(concurrency=2, group="pair")
    async def left(self, note: Any = None) -> None:
        await self.run("pair", note)

    @endpoint(concurrency=2, group="pair")
    async def right(self, note: Any = None) -> None:
        await self.run("pair", note)

    @endpoint(group="alone")
    async def alone(self, note: Any = None) -> None:
        await self.run("alone", note)

    @endpoint(concurrency=100, group="watch")
    async def open(self) -> None:
        self.gate.set()

    @endpoint(concurrency=100, group="watch")
    async def wait(self, slots: str, count: int) -> None:
        await self.notes.wait(slots, count)

    @endpoint(concurrency=100, group="watch")
    async def report(self) -> tuple[dict[str, int], list[Any]]:
        return self.most, self.order


class Threads(Actor):
    """Meets itself in worker threads."""

    @endpoint(thread=True, concurrency=50)
    def meet(self, parties: int) -> int:
        barrier = self.__dict__.setdefault("barrier", threading.Barrier(parties))
        barrier.wait(HANG_SECONDS)
        return threading.get_ident()

    @endpoint(thread=True)
    def thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    @endpoint
    def inline(self) -> bool:
        return threading.current_thread() is threading.main_thread()


tag: contextvars.ContextVar[str] = contextvars.ContextVar("tag", default="none")


class Tagged(Actor):
    """Sets a context variable."""

    @endpoint
    async def swap(self, value: str) -> str:
        before = tag.get()
        tag.set(value)
        return before


# ---- order -----------------------------------------------------------------------------------------------------------


async def test_messages_of_one_sender_come_in_order(backend: Backend):
    """S01: through every verb, to each actor, whether the mailbox is full or not."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one = probes.slice(gpus=0)
        async with trio.open_nursery() as nursery:
            for number in range(3 * limits.MAILBOX_MESSAGES):
                match number % 5:
                    case 0:
                        await probes.note.broadcast(number)
                    case 1:
                        nursery.start_soon(probes.note.call, number)
                        await trio.testing.wait_all_tasks_blocked()
                    case 2:
                        nursery.start_soon(one.note.call_one, number)
                        await trio.testing.wait_all_tasks_blocked()
                    case 3:
                        nursery.start_soon(one.note.choose, number)
                        await trio.testing.wait_all_tasks_blocked()
                    case 4:
                        nursery.start_soon(probes.note.call_settled, number)
                        await trio.testing.wait_all_tasks_blocked()
        numbers = list(range(3 * limits.MAILBOX_MESSAGES))
        assert await one.seen.call_one() == numbers
        assert await probes.slice(gpus=1).seen.call_one() == [n for n in numbers if n % 5 in (0, 1, 4)]


async def test_messages_queued_at_a_full_mailbox_keep_their_order(backend: Backend):
    """S01: those that wait at the sender go out first in, first out, and no later one overtakes them."""
    async with backend.procs({"gpus": 1}) as procs:
        slots = await procs.spawn("slots", Slots)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slots.one.call)
            await slots.wait.call_one("actor", 1)
            queued = fill(slots.inline, "queued")
            for number in range(50):
                nursery.start_soon(slots.inline.broadcast if number % 2 else slots.inline.call_one, number)
                await tick(3)
            with pytest.raises(trio.WouldBlock):
                slots.inline.broadcast_nowait("overtaking")
            slots_open = attempt(nursery, slots.open.call)  # waits its turn at the sender, too
            nursery.start_soon(open_from_inside, backend, slots)
            await slots_open.result()
        _, order = await slots.report.call_one()
        assert order == [None, *["queued"] * queued, *range(50)]


async def open_from_inside(backend: Backend, slots: Slots) -> None:
    """Open the gate through another process, whose mailbox window is its own."""
    async with backend.procs({"gpus": 1}, name="openers") as openers:
        relay = await openers.spawn("relay", Probe)
        await relay.relay.call_one(slots, "open", "call_one")


async def test_nothing_runs_twice(backend: Backend):
    """S02: whatever becomes of the call."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            for number in range(60):
                call = attempt(nursery, probes.note.call, number)
                await tick(number % 7)
                if number % 3 == 0:
                    call.cancel()
        for log in (await probes.seen.call()).values():
            assert len(log) == len(set(log))
            assert {number for number in range(60) if number % 3} <= set(log)


# ---- slots -----------------------------------------------------------------------------------------------------------


async def test_slots_bound_what_runs_at_once(backend: Backend):
    """S08, C4: endpoints without options share one slot; `concurrency=` alone is a group of its own."""
    async with backend.procs({"gpus": 1}) as procs:
        slots = await procs.spawn("slots", Slots)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                for name in ("one", "other", "three", "two", "left", "right", "alone"):
                    nursery.start_soon(getattr(slots, name).call)
            for name, count in {"actor": 1, "three": 3, "two": 2, "pair": 2, "alone": 1}.items():
                await slots.wait.call_one(name, count)
            await trio.testing.wait_all_tasks_blocked()
            most, _ = await slots.report.call_one()
            assert most == {"actor": 1, "three": 3, "two": 2, "pair": 2, "alone": 1}
            await slots.open.call()
        most, order = await slots.report.call_one()
        assert most == {"actor": 1, "three": 3, "two": 2, "pair": 2, "alone": 1}
        assert len(order) == 28


async def test_order_within_a_group_is_order_of_start(backend: Backend):
    """C4."""
    async with backend.procs({"gpus": 1}) as procs:
        slots = await procs.spawn("slots", Slots)
        await slots.open.call()
        for number in range(40):
            await (slots.left if number % 3 else slots.right).broadcast(number)
        await slots.wait.call_one("pair", 40)
        _, order = await slots.report.call_one()
        assert order == list(range(40))


def test_groups_must_agree():
    """C4: endpoints of one group state the same concurrency, else `TypeError` at class definition."""
    with pytest.raises(TypeError, match=r"group 'g'.*first says 2 and second says 3"):

        class Broken(Actor):
            @endpoint(concurrency=2, group="g")
            async def first(self) -> None: ...

            @endpoint(concurrency=3, group="g")
            async def second(self) -> None: ...


@only_real
async def test_threads_are_bound_by_the_slots_alone(backend: RealBackend):
    """C4: `thread=True` with 50 slots runs 50 at once."""
    async with backend.procs({"gpus": 1}) as procs:
        threads = await procs.spawn("threads", Threads)
        async with trio.open_nursery() as nursery:
            met = [attempt(nursery, threads.meet.call_one, 50) for _ in range(50)]
        assert len({call.value for call in met}) == 50
        assert await threads.inline.call_one()
        assert not await threads.thread.call_one()


async def test_context_variables_of_a_message_are_its_own(backend: Backend):
    """S08: what one message sets, the next does not see; nor does its caller's context travel."""
    tag.set("caller")
    async with backend.procs({"gpus": 1}) as procs:
        tagged = await procs.spawn("tagged", Tagged)
        assert [await tagged.swap.call_one(value) for value in "abc"] == ["none"] * 3
        async with trio.open_nursery() as nursery:
            calls = [attempt(nursery, tagged.swap.call_one, value) for value in "defgh"]
        assert [call.value for call in calls] == ["none"] * 5


# ---- full mailboxes --------------------------------------------------------------------------------------------------


async def test_full_mailbox_makes_the_sender_wait(backend: Backend):
    """S07, API 3: `broadcast` waits for room, in order; `broadcast_nowait` raises `WouldBlock`, having sent nothing."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        one = probes.slice(gpus=0)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, one.wait_for_gate.call_one)
            await one.wait.call_one("gate")
            queued = fill(one.note, "queued")
            with pytest.raises(trio.WouldBlock):
                probes.note.broadcast_nowait("to nobody")
            waiting = attempt(nursery, probes.note.broadcast, "waited")
            await tick(10)
            assert not waiting.over.is_set()
            gated.cancel()
            await waiting.result()
        await probes.wait.call("waited")
        assert await one.seen.call_one() == ["gate", *["queued"] * queued, "waited"]
        assert await probes.slice(gpus=1).seen.call_one() == ["waited"]


async def test_full_mailbox_does_not_hold_up_control(backend: Backend):
    """S07: cancels, acknowledgements, and the stop of the mesh go through."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, probe.hold.call_one)
            await probe.wait.call_one("hold")
            fill(probe.note, "queued")
            waiting = attempt(nursery, probe.note.call_one, "waiting")
            await tick(10)
            held.cancel("first")
            waiting.cancel()
            for call in (held, waiting):
                await call.over.wait()
                assert call.cancelled
            other = await procs.spawn("other", Probe)
            assert await other.rank.call_one() == 0
            with pytest.raises(MeshErrorGroup) as caught:
                async with procs.spawn("full", Probe) as full:
                    fill(full.hold)
                    raise LookupError
            assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [LookupError]
            nursery.cancel_scope.cancel()
        with trio.CancelScope() as scope:
            async with procs.spawn("cancelled", Probe) as full:
                fill(full.hold)
                scope.cancel()
                await trio.sleep_forever()
        assert scope.cancelled_caught


@only_sim
async def test_large_messages_fill_a_mailbox_by_bytes(backend: SimBackend):
    """API 3: bytes count, too; one message above the bound goes through when nothing else waits."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, probe.wait_for_gate.call_one)
            await probe.wait.call_one("gate")
            piece = b"x" * (limits.MAILBOX_BYTES // 4)
            sent = 0
            with pytest.raises(trio.WouldBlock):
                for sent in range(100):  # noqa: B007 - how far it came
                    probe.note.broadcast_nowait(piece)
            assert sent in (3, 4)
            gated.cancel()
            await probe.wait.call_one(piece, sent)
        huge = b"y" * (limits.MAILBOX_BYTES + 1)
        assert await probe.note.call_one(huge) == huge
        probe.note.broadcast_nowait(huge)
        await probe.wait.call_one(huge, 2)


@only_sim
@pytest.mark.one_seed("what is allocated is the same in every order, and counting it takes seconds")
async def test_memory_stays_bounded_when_the_consumer_is_slow(backend: SimBackend):
    """S07, S03 for messages: senders that give up leave nothing queued."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, probe.wait_for_gate.call_one)
            await probe.wait.call_one("gate")
            fill(probe.note, "queued")
            gc.collect()
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(60):  # three times the bound below
                with trio.move_on_after(1):
                    await probe.note.broadcast(b"z" * 100_000)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
            tracemalloc.stop()
            assert grown < 2_000_000
            gated.cancel()


@pytest.mark.by_value
async def test_nowait_never_blocks(backend: Backend):
    """K02: and has no checkpoint."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        with trio.testing.assert_no_checkpoints():
            probes.note.broadcast_nowait("now")
            for view in (probes.slice(gpus=0), probes.alive(), probes.flatten("ranks"), probes.exclude([{"gpus": 0}])):
                assert len(view) in (1, 2)
            with pytest.raises(TypeError):
                probes.note.broadcast_nowait()
        await probes.wait.call("now")
        reference = Holder(probes)
        async with this_proc().spawn("here", Probe) as here:
            await here.relay.call_one(reference, "nowait", "__call__")
        await probes.wait.call("by reference")


class Holder:
    """Sends from where it was sent to."""

    def __init__(self, probes: Probe) -> None:
        self.probes = probes

    async def nowait(self) -> None:
        with trio.testing.assert_no_checkpoints():
            self.probes.note.broadcast_nowait("by reference")


async def test_nowait_without_a_link_would_block(backend: Backend):
    """K02: to a process that this one has never talked to; after the first call it goes."""
    async with backend.procs() as procs:
        probes = await procs.spawn("probes", Probe)
        relays = await procs.spawn("relays", Remote)
        assert await relays.slice(gpus=0).try_nowait.call_one(probes.slice(gpus=1)) == "would block"
        await relays.slice(gpus=0).call_first.call_one(probes.slice(gpus=1))
        assert await relays.slice(gpus=0).try_nowait.call_one(probes.slice(gpus=1)) == "sent"
        await probes.slice(gpus=1).wait.call_one("now")


class Remote(Actor):
    """Sends to another process."""

    @endpoint
    async def try_nowait(self, target: Probe) -> str:
        try:
            target.note.broadcast_nowait("now")
        except trio.WouldBlock:
            return "would block"
        return "sent"

    @endpoint
    async def call_first(self, target: Probe) -> int:
        return await target.rank.call_one()
