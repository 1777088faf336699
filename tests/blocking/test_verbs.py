"""Meshes without `await`: every verb, over real processes (K06)."""

from __future__ import annotations

import concurrent.futures
import inspect
import pickle
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
import trio
from tests.conformance.probe import Probe
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import Actor, MeshErrorGroup, configured, endpoint

pytestmark = [pytest.mark.real, pytest.mark.daily]


def worker_of(handle: object) -> type[Worker]:
    """Return the face of a handle that came as an argument."""
    return tb.face(cast("Worker", handle))


class Worker(Actor):
    @endpoint
    async def step(self, number: int) -> int:
        return number + 1

    @endpoint
    async def rollouts(self, count: int) -> AsyncIterator[int]:
        for number in range(count):
            yield number

    @endpoint(thread=True)
    def ask(self, other: Any, number: int) -> Any:
        """Call another actor from a thread of this one."""
        return worker_of(other).step.call_one(number)

    @endpoint(thread=True)
    def spawn_inside(self) -> int:
        with tb.spawn_procs({"gpus": 2}) as procs:
            return sum(procs.spawn("inner", Worker).step.call(1).values())

    @endpoint
    def ask_inline(self, other: Any) -> Any:
        return worker_of(other).step.call_one(1)


@pytest.fixture(scope="module")
def procs() -> Iterator[tb.ProcMesh]:
    # Its history would begin in the midst of a test, which would seem to have left it behind.
    with configured(history=0), tb.spawn_procs({"gpus": 2}) as procs:
        yield procs


def test_listing_of_scripts() -> None:
    """K06: the listing of the guide."""
    with tb.spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker)
        assert workers.step.call(1).values() == (2, 2)
        with workers.rollouts.stream(3) as results:
            assert sorted((point["gpus"], item) for point, item in results) == [
                (r, n) for r in (0, 1) for n in (0, 1, 2)
            ]
        future = workers.step.call.submit(2)
        assert future.result(timeout=60).values() == (3, 3)


def test_every_verb_works(procs: tb.ProcMesh) -> None:
    """K06: call, call_settled, call_one, choose, broadcast, broadcast_nowait, stream, map, and their options."""
    probes = procs.spawn("probes", Probe)
    one = probes.slice(gpus=0)

    assert probes.note.call("called").values() == ("called", "called")
    settled = probes.fail.call_settled(ValueError("no"), ranks=[1])
    assert [outcome.ok for outcome in settled.values()] == [True, False]
    assert one.note.call_one("one") == "one"
    assert probes.note.choose("chosen") == "chosen"
    one.note.broadcast("cast")
    one.note.broadcast_nowait("cast at once")
    one.wait.call_one("cast at once")
    assert [note for note in one.seen.call_one() if note != "chosen"] == ["called", "one", "cast", "cast at once"]
    with probes.note.options(window=4).map(range(5)) as results:
        assert sorted(results) == [(n, n) for n in range(5)]
    assert probes.rank.call().item(gpus=1) == probes.slice(gpus=slice(1, 2)).rank.call().values()[0]
    assert (len(probes), probes.size("gpus"), dict(probes.extent), probes.name) == (2, 2, {"gpus": 2}, "probes")
    assert len(probes.alive()) == len(probes.exclude([])) == len(probes.statistics().members)


def test_arguments_are_checked_and_errors_are_the_same(procs: tb.ProcMesh) -> None:
    """K06, C5, E01, E03."""
    probes = procs.spawn("probes", Probe)
    with pytest.raises(TypeError, match="missing"):
        probes.note.call()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="must be called by a verb"):
        probes.note("x")
    with pytest.raises(AttributeError, match="no endpoint 'missing'"):
        getattr(probes, "missing")  # noqa: B009
    with pytest.raises(MeshErrorGroup) as caught:
        probes.fail.call(LookupError("no"), ranks=[1])
    assert trimesh.coords(caught.value) == [{"gpus": 1}]
    assert caught.value.partial is not None
    with pytest.raises(LookupError, match="no"):
        probes.slice(gpus=1).fail.call_one(LookupError("no"))
    with pytest.raises(ExceptionGroup) as started:
        procs.spawn("broken", Broken)
    assert [type(leaf) for leaf in trimesh.leaves(started.value)] == [LookupError, LookupError]


class Broken(Actor):
    def __init__(self) -> None:
        raise LookupError("broken")


def test_stream_that_is_left_early_cancels_its_producers(procs: tb.ProcMesh) -> None:
    """S04, K06."""
    probes = procs.spawn("probes", Probe)
    with probes.hold_many.stream("left"):
        probes.wait.call("left")
    assert all("left cancelled" in notes for notes in probes.seen.call().values())


def test_handles_travel(procs: tb.ProcMesh) -> None:
    """K06: sent to an actor a handle is that of `trimesh`; what comes back has a face without `await`."""
    probes, other = procs.spawn("probes", Probe), procs.spawn("other", Probe)
    one = probes.slice(gpus=0)
    assert one.relay.call_one(other, "note", "call", "relayed").values() == ("relayed", "relayed")
    came = pickle.loads(pickle.dumps(other))
    assert type(came) is trimesh.ActorMesh
    assert one.note.call_one([other])[0].name == "other"
    with tb.enter(trimesh.open_channel(int, capacity=1)) as (port, receiver):
        tb.run(port.send, 5)
        assert tb.run(receiver.receive) == 5


def test_endpoint_in_a_thread_calls_without_await(procs: tb.ProcMesh) -> None:
    """K06: in the thread of an endpoint the calls are done by the Trio run of its process."""
    workers = procs.spawn("workers", Worker)
    first, second = workers.slice(gpus=0), workers.slice(gpus=1)
    assert first.ask.call_one(second, 1) == 2
    assert first.spawn_inside.call_one() == 4


def test_endpoint_that_runs_inline_is_refused(procs: tb.ProcMesh) -> None:
    """K06: it would stop the Trio run that is to do the work."""
    workers = procs.spawn("workers", Worker)
    with pytest.raises(RuntimeError, match=r"must not be used in a Trio task.*thread=True"):
        workers.slice(gpus=0).ask_inline.call_one(workers.slice(gpus=1))


def test_trio_task_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="must not be used in a Trio task"), tb.spawn_procs({"gpus": 1}):
            pass

    trio.run(main)


def test_several_threads_call_at_once(procs: tb.ProcMesh) -> None:
    """K06: each gets its own result."""
    workers = procs.spawn("workers", Worker)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(workers.step.call, range(40)))
    assert [values.values() for values in found] == [(n + 1, n + 1) for n in range(40)]


def test_futures(procs: tb.ProcMesh) -> None:
    """C01, K06: cancel cancels the endpoint; errors and values come as of any future."""
    probe = procs.spawn("probes", Probe).slice(gpus=0)
    held = probe.hold_many.call_one.submit("held")
    probe.wait.call_one("held")
    assert held.running()
    assert held.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        held.result(timeout=60)
    assert "held cancelled" in probe.seen.call_one()
    assert (held.cancelled(), held.cancel()) == (True, False)
    failed = probe.fail.call_one.submit(LookupError("no"))
    with pytest.raises(LookupError, match="no"):
        failed.result(timeout=60)
    done = concurrent.futures.wait([probe.note.call_one.submit(n) for n in range(3)], timeout=60).done
    assert sorted(future.result() for future in done) == [0, 1, 2]


def test_events_are_read_by_a_thread(procs: tb.ProcMesh) -> None:
    """K06, T3."""
    probes = procs.spawn("probes", Probe)
    with probes.events() as events:
        assert {next(events).point["gpus"], next(events).point["gpus"]} == {0, 1}  # type: ignore[union-attr]


def test_warm_host_adopts_meshes() -> None:
    """M1, O1, K06."""
    with tb.this_host().warm(preload=("json",)) as host:
        procs = host.spawn_procs({"gpus": 1}).adopt()
        assert procs.spawn("workers", Worker).step.call_one(1) == 2
        with pytest.raises(RuntimeError, match="has no block of its own"):
            procs.close()


def test_actors_with_a_block_of_their_own(procs: tb.ProcMesh) -> None:
    """M1, K06."""
    with procs.spawning("workers", Worker) as workers:
        assert workers.step.call(1).values() == (2, 2)
    with pytest.raises(MeshErrorGroup):
        workers.step.call(1)
    with tb.this_proc().spawning("own", Worker) as own:
        assert own.step.call_one(1) == 2


def test_actor_of_a_name_is_one(procs: tb.ProcMesh) -> None:
    """M9, K06: it belongs to the block of the processes."""
    first = procs.get_or_spawn("one", Worker)
    assert procs.get_or_spawn("one", Worker).step.call_one(1) == first.step.call_one(1)
    with pytest.raises(TypeError, match="is of class Worker, got Probe"):
        procs.get_or_spawn("one", Probe)


def test_handler_decides_without_await() -> None:
    """P5, K06: in the thread of Trio; the death that it takes leaves the block."""
    seen: queue.SimpleQueue[trimesh.Failure] = queue.SimpleQueue()

    def handler(failure: trimesh.Failure) -> bool:
        seen.put(failure)
        return True

    with tb.spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker)
        with procs.on_failure(handler):
            procs.kill([{"gpus": 1}])
            failure = seen.get(timeout=HANG_SECONDS)
            assert failure.points == ({"gpus": 1},)
        assert list(workers.alive().step.call(1).values()) == [2]


def test_mesh_of_a_script_grows_and_shrinks() -> None:
    """K06, P6, P7."""
    with tb.spawn_procs({"replica": 1}, supervision=trimesh.Isolate()) as procs:
        workers = procs.spawn("workers", Worker)
        with procs.membership() as views:
            assert next(views).extent == {"replica": 1}
            assert len(procs.resize(replica=3)) == 3
            assert [point["replica"] for point in next(views).joined] == [1, 2]
            now = tb.current_view(workers)
            assert list(now.step.call(1).values()) == [2, 2, 2]
            procs.resize(replica=1)
            with pytest.raises(trimesh.MembershipChanged):
                now.slice(replica=2).step.call_one(1)
            assert len(tb.current_view(procs)) == 1


def test_signatures_are_those_of_trimesh() -> None:
    """K06: all parameters of what is awaited there."""

    def parameters(function: Any) -> list[inspect.Parameter]:
        return list(inspect.signature(function).parameters.values())

    assert parameters(tb.HostMesh.spawn_procs) == parameters(trimesh.HostMesh.spawn_procs)
    assert parameters(tb.HostMesh.warm) == parameters(trimesh.HostMesh.warm)
    for name in (
        "spawn",
        "get_or_spawn",
        "on_failure",
        "supervised",
        "replace",
        "resize",
        "membership",
        "kill",
        "stop",
        "settled",
        "alive",
        "statistics",
        "slice",
        "exclude",
    ):
        assert parameters(getattr(tb.ProcMesh, name)) == parameters(getattr(trimesh.ProcMesh, name)), name
    for name in ("options", "stream", "map", "broadcast_nowait"):
        mine, theirs = getattr(tb.Endpoint, name), getattr(trimesh.Endpoint, name)
        assert [one.name for one in parameters(mine)] == [one.name for one in parameters(theirs)], name
