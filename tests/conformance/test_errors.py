"""Errors that a call raises: groups, coordinates, cancels (E01-E04, E08; rules C1, M5, X1)."""

from __future__ import annotations

import pickle
import traceback

import pytest
import trio
from tests.conformance.meshes import Backend, attempt
from tests.conformance.probe import Probe

import trimesh
from trimesh import MeshErrorGroup, ProcDied, RemoteTraceback, endpoint, this_proc

# ---- groups ----------------------------------------------------------------------------------------------------------


async def test_one_rank_that_raises(backend: Backend):
    """E01: a group of one with its coordinates; the siblings have been cancelled, the actors live on."""
    async with backend.procs({"gpus": 4}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            mixed = attempt(nursery, probes.slice(gpus=slice(1, 4)).fail_at_gate.call, KeyError("rank"), [2])
            await probes.slice(gpus=slice(1, 4)).wait.call("at the gate")
            await probes.slice(gpus=2).open_gate.call_one()
            await probes.slice(gpus=1).open_gate.call_one()
            await probes.slice(gpus=3).open_gate.call_one()
            with pytest.raises(MeshErrorGroup) as caught:
                await mixed.result()
        assert trimesh.coords(caught.value) == [{"gpus": 2}]
        assert [str(leaf) for leaf in trimesh.leaves(caught.value)] == ["'rank'"]
        assert list((await probes.rank.call()).values()) == [0, 1, 2, 3]


async def test_siblings_of_a_failed_rank_are_cancelled(backend: Backend):
    """E01, C1: and have unwound when the group is raised."""
    async with backend.procs({"gpus": 3}) as procs:
        mixed = await procs.spawn("mixed", Mixed)
        with pytest.raises(MeshErrorGroup) as caught:
            await mixed.hold_or_fail.call(1)
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        for rank in (0, 2):
            log = await mixed.slice(gpus=rank).seen.call_one()
            assert log.count("hold") == log.count("hold cancelled") <= 1


class Mixed(Probe):
    """Holds on some ranks, fails on one."""

    @endpoint(concurrency=10)
    async def hold_or_fail(self, rank: int) -> None:
        if trimesh.current_rank() == rank:
            raise KeyError("mixed")
        await Probe.hold(self)


@pytest.mark.parametrize("count", [2, 3, 8])
async def test_k_ranks_that_raise_are_k_leaves(backend: Backend, count: int):
    """E02, C1: every rank that had started and failed is there, in whatever order they were seen."""
    async with backend.procs({"gpus": 8}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            failing = attempt(nursery, probes.fail_at_gate.call, KeyError("rank"), list(range(count)))
            await probes.wait.call("at the gate")
            await probes.open_gate.call()
            with pytest.raises(MeshErrorGroup) as caught:
                await failing.result()
        assert sorted(point["gpus"] for point in trimesh.coords(caught.value)) == list(range(count))


async def test_rank_that_had_not_started_is_no_failure(backend: Backend):
    """E02: its message was cancelled in the mailbox."""
    async with backend.procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            gated = attempt(nursery, probes.slice(gpus=1).wait_for_gate.call_one)
            await probes.slice(gpus=1).wait.call_one("gate")
            with pytest.raises(MeshErrorGroup) as caught:
                await probes.fail.call(KeyError("both"))
            gated.cancel()
        assert trimesh.coords(caught.value) == [{"gpus": 0}]


async def test_group_is_strict(backend: Backend):
    """E03, X1: `call` raises a group even for a mesh of one, `call_one` and `choose` never do."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        with pytest.raises(MeshErrorGroup) as caught:
            await probe.fail.call(KeyError("one"))
        assert len(caught.value.exceptions) == 1
        for verb in ("call_one", "choose"):
            with pytest.raises(KeyError, match="one"):
                await getattr(probe.fail, verb)(KeyError("one"))


@pytest.mark.by_value
async def test_group_names_its_call_and_keeps_what_came_back(backend: Backend):
    """E01, X1: `.mesh .endpoint .partial`; results in the extent of the view that was called."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            view = probes.slice(hosts=1)
            split = attempt(nursery, view.relay.call, Picky(), "run", "__call__")
            with pytest.raises(MeshErrorGroup) as caught:
                await split.result()
        group = caught.value
        assert (group.mesh, group.endpoint) == ("probes", "relay")
        assert [dict(point) for point in trimesh.coords(group)] == [{"hosts": 1, "gpus": 1}]
        assert dict(group.partial.extent) == {"gpus": 2}
        assert list(group.partial.items()) in ([], [({"gpus": 0}, 2)])


class Picky:
    """Stands in for a handle: fails on rank 3, where it waits until the others have answered."""

    async def run(self) -> int:
        if trimesh.current_rank() == 3:
            await trio.sleep(0.2)
            raise KeyError("picky")
        return trimesh.current_rank()


async def test_split_and_derive_keep_what_belongs_to_the_group(backend: Backend):
    """E04, X1: `except*`, `split`, `subgroup` and pickling keep partial, mesh and endpoint."""
    async with backend.procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            both = attempt(nursery, probes.fail_at_gate.call, KeyError("rank"))
            await probes.wait.call("at the gate")
            await probes.open_gate.call()
            with pytest.raises(MeshErrorGroup) as caught:
                await both.result()
    group = caught.value
    matched, rest = group.split(
        lambda error: trimesh.origin(error) is not None and trimesh.coords(error)[0]["gpus"] == 1
    )
    sub = group.subgroup(KeyError)
    copied = pickle.loads(pickle.dumps(group))
    for part, points in ((matched, [1]), (rest, [0]), (sub, [0, 1]), (copied, [0, 1])):
        assert isinstance(part, MeshErrorGroup)
        assert (part.mesh, part.endpoint) == ("probes", "fail_at_gate")
        assert part.partial is not None
        assert len(part.partial) == 0
        assert sorted(point["gpus"] for point in trimesh.coords(part)) == points
        for leaf in trimesh.leaves(part):
            assert isinstance(leaf, KeyError)
            assert any("probes" in note and "gpus" in note for note in leaf.__notes__)
            assert trimesh.origin(leaf).endpoint == "fail_at_gate"
            assert isinstance(leaf.__cause__, RemoteTraceback)
            assert "fail_at_gate" in leaf.__cause__.text


@pytest.mark.daily("sim-typed")
@pytest.mark.daily("real")
async def test_except_star_matches_the_original_type(backend: Backend):
    """E04: what is not matched goes on, with its coordinates."""
    matched: list[trimesh.Point] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with backend.procs({"gpus": 3}) as procs:
            kinds = await procs.spawn("kinds", Kinds)
            try:
                async with trio.open_nursery() as nursery:
                    failing = attempt(nursery, kinds.fail_in_own_way.call)
                    await kinds.wait.call("at the gate")
                    await kinds.open_gate.call()
                    await failing.result()
            except* ZeroDivisionError as group:
                matched += trimesh.coords(group)
            except* LookupError as group:
                matched += trimesh.coords(group)
    assert matched == [{"gpus": 0}, {"gpus": 1}]
    assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [OSError]
    assert trimesh.coords(caught.value) == [{"gpus": 2}]


class Kinds(Probe):
    """Every rank raises an error of its own kind."""

    @endpoint(concurrency=10)
    async def fail_in_own_way(self) -> None:
        error = (ZeroDivisionError("0"), KeyError("1"), OSError("2"))[trimesh.current_rank()]
        await Probe.fail_at_gate(self, error)


# ---- cancelled and failed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["call", "call_one", "choose"])
async def test_error_raised_while_being_cancelled_is_not_masked(backend: Backend, verb: str):
    """E08: it comes out instead of `Cancelled`, as it would of a nursery."""
    async with backend.procs({"gpus": 1}) as procs:
        probe = await procs.spawn("probe", Probe)
        async with trio.open_nursery() as nursery:
            unwinding = attempt(nursery, getattr(probe.unwind, verb), KeyError("unwinding"))
            await probe.wait.call_one("unwind")
            unwinding.cancel()
            with pytest.raises(KeyError if verb != "call" else MeshErrorGroup) as caught:
                await unwinding.result()
        assert [type(leaf) for leaf in trimesh.leaves(caught.value)] == [KeyError]


async def test_errors_of_some_ranks_while_being_cancelled(backend: Backend):
    """E08: the ranks that unwound in peace are no failures."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        async with trio.open_nursery() as nursery:
            unwinding = attempt(nursery, probes.fail_at_gate.call, KeyError("unwinding"), [0, 2])
            await probes.wait.call("at the gate")
            unwinding.cancel()
            await probes.open_gate.call()
            with pytest.raises(MeshErrorGroup) as caught:
                await unwinding.result()
        assert trimesh.coords(caught.value) == [{"gpus": 0}, {"gpus": 2}]


@pytest.mark.daily("real")
async def test_call_settled_tells_each_rank(backend: Backend):
    """API 3: no remote failure raises or cancels; `Outcome` has ok, value, error and unwrap."""
    async with backend.procs({"gpus": 3}) as procs:
        probes = await procs.spawn("probes", Probe)
        outcomes = await probes.fail.call_settled(KeyError("one"), [1])
        assert [outcome.ok for outcome in outcomes.values()] == [True, False, True]
        assert outcomes.item(gpus=2).unwrap() == 2
        failed = outcomes.item(gpus=1)
        assert failed.value is None
        assert trimesh.coords(failed.error) == [{"gpus": 1}]
        with pytest.raises(KeyError):
            failed.unwrap()


async def test_exclude_takes_the_points_of_a_group(backend: Backend):
    """API 4, M5: a `Point` knows its mesh and rank, on any view of it; a mapping is read in the view's own labels."""
    async with backend.procs({"hosts": 2, "gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        with pytest.raises(MeshErrorGroup) as caught:
            await probes.fail.call(KeyError("bad"), [3])
        points = trimesh.coords(caught.value)
        healthy = probes.exclude(points)
        assert list((await healthy.rank.call()).values()) == [0, 1, 2]
        assert len(probes.slice(hosts=1).exclude(points)) == 1
        assert len(probes.flatten("ranks").exclude(points)) == 3
        assert list((await probes.slice(hosts=1).exclude([{"gpus": 0}]).rank.call()).values()) == [3]
        again = healthy.exclude(points)
        assert list((await again.rank.call()).values()) == [0, 1, 2]


async def test_error_passed_on_keeps_its_first_place(backend: Backend):
    """E04, EX-5: through a relay, the origin is that of the endpoint that raised it, the tracebacks are all there."""
    async with backend.procs({"gpus": 2}) as procs, this_proc().spawn("here", Probe) as here:
        probes = await procs.spawn("probes", Probe)
        with pytest.raises(KeyError) as caught:
            await here.relay.call_one(
                probes.slice(gpus=0), "relay", "call_one", probes.slice(gpus=1), "fail", "call_one", KeyError("deep")
            )
        where = trimesh.origin(caught.value)
        assert where.point == {"gpus": 1}
        assert where.endpoint == "fail"
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("in relay") >= 2


async def test_unhandled_group_prints_what_is_needed(backend: Backend):
    """API 4: coordinates and the remote traceback."""
    async with backend.procs({"gpus": 2}) as procs:
        probes = await procs.spawn("probes", Probe)
        with pytest.raises(MeshErrorGroup) as caught:
            await probes.fail.call(KeyError("printed"), [1])
    text = "".join(traceback.format_exception(caught.value))
    for part in ("probes", "probes[gpus=1]", "printed", "in fail"):
        assert part in text


def test_leaves_and_coords_take_any_exception():
    """X1: a plain exception is its own leaf; errors of the body have no coordinates."""
    plain = ValueError("plain")
    assert list(trimesh.leaves(plain)) == [plain]
    assert trimesh.coords(plain) == []
    assert trimesh.origin(plain) is None
    group = BaseExceptionGroup("g", [KeyboardInterrupt(), ExceptionGroup("h", [plain, ProcDied("dead")])])
    assert [type(leaf) for leaf in trimesh.leaves(group)] == [KeyboardInterrupt, ValueError, ProcDied]
