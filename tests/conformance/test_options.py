"""Options of a call: retries (rule C6; S02, R09), and options that a verb does not have."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, only_sim
from tests.conformance.probe import Notes, Probe

import trimesh
from trimesh import Actor, Backoff, MeshErrorGroup, ProcDied, Restart, Retry, endpoint
from trimesh._runtime.life.current import current_proc


class Flaky(Actor):
    """Fails a number of times."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.left: dict[str, int] = {}

    @endpoint(concurrency=100, idempotent=True)
    async def fail(self, times: dict[int, int], error: Exception) -> int:
        """Raise as many times as is said for this rank, then return the rank."""
        self.notes.add("run")
        rank = trimesh.current_rank()
        left = self.left.setdefault("fail", times.get(rank, 0))
        self.left["fail"] = left - 1
        if left > 0:
            raise error
        return rank

    @endpoint(concurrency=100, idempotent=True)
    async def fail_or_hold(self, times: dict[int, int], error: Exception) -> int:
        """As `fail`, but hold instead of returning."""
        rank = await Flaky.fail(self, times, error)
        self.notes.add("holding")
        try:
            await trio.sleep_forever()
        finally:
            self.notes.add("unwound")
        return rank

    @endpoint(concurrency=100, idempotent=True)
    async def fail_where(self, ranks: list[int]) -> int:
        """Raise on some ranks, always."""
        self.notes.add("run")
        if trimesh.current_rank() in ranks:
            raise ConnectionError(trimesh.current_rank())
        return trimesh.current_rank()

    @endpoint(concurrency=100, idempotent=True)
    async def fail_beside(self, error: Exception) -> None:
        """Raise on the first rank, and then, as they are cancelled, this error on the others."""
        self.notes.add("run")
        if trimesh.current_rank() == 0:
            raise ConnectionError
        try:
            await trio.sleep_forever()
        except trio.Cancelled:
            raise error from None

    @endpoint
    async def once(self) -> None: ...

    @endpoint(concurrency=100, group="watch")
    async def runs(self) -> int:
        return self.notes.log.count("run")

    @endpoint(concurrency=100, group="watch")
    async def log(self) -> list[Any]:
        return self.notes.log

    @endpoint(concurrency=100, group="watch")
    async def wait(self, note: str, count: int = 1) -> None:
        await self.notes.wait(note, count)


ERROR = ConnectionError("flaky")
TWICE = Retry(2, on=(ConnectionError,))


async def test_call_one_is_tried_again(backend: Backend):
    """C6: a new call id each attempt."""
    async with backend.procs({"gpus": 1}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        before, retries = current_proc().new_call_id(), current_proc().metrics.retries
        assert await flaky.fail.options(retry=TWICE).call_one({0: 2}, ERROR) == 0
        assert current_proc().new_call_id() == before + 4
        assert current_proc().metrics.retries == retries + 2
        assert await flaky.runs.call_one() == 3


async def test_last_error_has_the_others_as_context(backend: Backend):
    """C6: raised bare, after `max` further attempts."""
    async with backend.procs({"gpus": 1}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        with pytest.raises(ConnectionError) as caught:
            await flaky.fail.options(retry=TWICE).call_one({0: 5}, ERROR)
        chain: list[BaseException] = [caught.value]
        while (context := chain[-1].__context__) is not None:
            chain.append(context)
        assert [type(error) for error in chain] == [ConnectionError] * 3
        assert all(trimesh.origin(error).point == {"gpus": 0} for error in chain)
        assert any("attempt 3" in note for note in caught.value.__notes__)
        assert await flaky.runs.call_one() == 3


async def test_other_errors_are_raised_at_once(backend: Backend):
    """C6, S02."""
    async with backend.procs({"gpus": 1}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        with pytest.raises(ConnectionError):
            await flaky.fail.options(retry=Retry(2, on=(KeyError, ProcDied))).call_one({0: 5}, ERROR)
        assert await flaky.runs.call_one() == 1


async def test_choose_prefers_members_that_were_not_tried(backend: Backend):
    """C6."""
    async with backend.procs({"gpus": 3}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        for good in range(3):
            bad = [rank for rank in range(3) if rank != good]
            assert await flaky.fail_where.options(retry=TWICE).choose(bad) == good
        runs = list((await flaky.runs.call()).values())
        assert sum(runs) <= 9
        with pytest.raises(ConnectionError):
            await flaky.fail_where.options(retry=TWICE).choose([0, 1, 2])
        assert list((await flaky.runs.call()).values()) == [count + 1 for count in runs]


async def test_call_tries_only_the_failed_ranks_again(backend: Backend):
    """C6, S02."""
    async with backend.procs({"gpus": 4}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        values = await flaky.fail.options(retry=TWICE).call({1: 2, 3: 1}, ERROR)
        assert list(values.values()) == [0, 1, 2, 3]
        assert values.item(gpus=3) == 3
        assert list((await flaky.runs.call()).values()) == [1, 3, 1, 2]


@only_sim  # where both ranks begin before one of them fails
async def test_call_is_made_again_whole_only_if_each_failure_is_named(backend: Backend):
    """C6: one rank whose error is another one may have done what must not be done twice."""
    async with backend.procs({"gpus": 2}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        handle = flaky.fail_beside.options(retry=Retry(2, on=(ConnectionError,), whole=True))
        with pytest.RaisesGroup(ConnectionError, ValueError):
            await handle.call(ValueError())
        assert list((await flaky.runs.call()).values()) == [1, 1]
        with pytest.raises(MeshErrorGroup) as caught:
            await handle.call(ConnectionError())
        assert set(kinds(caught.value)) == {ConnectionError}
        assert list((await flaky.runs.call()).values()) == [4, 4]
        assert any("attempt 3; earlier attempts: MeshErrorGroup" in note for note in caught.value.__notes__)
        first = caught.value.__context__
        assert isinstance(first, MeshErrorGroup)
        assert isinstance(first.__context__, MeshErrorGroup)


@pytest.mark.parametrize("whole", [None, True])
async def test_call_tries_all_ranks_again_that_are_restarted_together(backend: Backend, *, whole: bool | None):
    """C6: they may wait for each other. It is what a policy that restarts all of them means, if nothing is said."""
    policy = Restart("one_for_one" if whole else "one_for_all", backoff=Backoff(0.01))
    async with backend.procs({"gpus": 3}, supervision=policy) as procs:
        meeting = await procs.spawn("meeting", Meeting)
        async with trio.open_nursery() as nursery:
            retry = Retry(3, on=ProcDied, whole=whole)
            step = attempt(nursery, meeting.step.options(retry=retry).call)
            await meeting.wait.call("in a step")
            backend.kill(procs, 1)
            values = await step.result()
        assert list(values.values()) == [2, 1, 2] if whole else [1, 1, 1]


@only_sim
@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all"])
async def test_silent_rank_beside_another_failure_is_not_called_again(backend: SimBackend, strategy: Any):
    """C6: unless it ends with a dead one: else it may still run."""
    async with backend.procs({"gpus": 2}, supervision=Restart(strategy, backoff=Backoff(0.01)), grace=100) as procs:
        silent = await procs.spawn("silent", Silent)
        retry = Retry(2, on=(ConnectionError, ProcDied), whole=True)
        verb = silent.step.options(retry=retry, abandon_after=0.1)
        with pytest.RaisesGroup(ConnectionError, trimesh.Unresponsive):
            await verb.call()
        assert (await silent.runs.call()).values() == (1, 1)
        if strategy == "one_for_one":
            async with trio.open_nursery() as nursery:
                step = attempt(nursery, verb.call, False)
                await silent.slice(gpus=0).wait.call_one("held")
                await silent.slice(gpus=1).wait.call_one("held", 2)
                backend.kill(procs, 0)
                with pytest.RaisesGroup(ProcDied, trimesh.Unresponsive):
                    await step.result()


class Silent(Probe):
    """Its first rank raises, or is held; the other one hears no cancel."""

    @endpoint(idempotent=True, concurrency=10)
    async def step(self, does_raise: bool = True) -> None:
        self.notes.add("run")
        if trimesh.current_rank():
            self.notes.add("held")
            with trio.CancelScope(shield=True):
                await trio.sleep(30)
        if does_raise:
            raise ConnectionError
        self.notes.add("held")
        await trio.sleep_forever()

    @endpoint(concurrency=100, group="watch")
    async def runs(self) -> int:
        return self.notes.log.count("run")


@pytest.mark.parametrize(("grace", "abandon_after"), [(0.2, None), (1.0, 0.1)])
@pytest.mark.parametrize("is_from_actor", [False, True])
async def test_ranks_that_hear_no_cancel_are_called_again(
    backend: Backend, grace: float, abandon_after: float | None, *, is_from_actor: bool
):
    """C6, X4: as those in a collective. They end with the dead one, before the call has given them up or later."""
    policy = Restart("one_for_all", backoff=Backoff(0.01))
    async with (
        backend.procs({"gpus": 3}, supervision=policy, grace=grace) as procs,
        backend.procs({"others": 1}, name="others") as others,
    ):
        deaf = await procs.spawn("deaf", Deaf)
        caller = await others.spawn("caller", DeafCaller)
        call = caller.call.call_one if is_from_actor else call_deaf
        async with trio.open_nursery() as nursery:
            step = attempt(nursery, call, deaf, abandon_after)
            await deaf.wait.call("deaf")
            backend.kill(procs, 1)
            assert await step.result() == [1, 1, 1]


class Deaf(Probe):
    """Hears no cancel in its first process."""

    @endpoint(idempotent=True, concurrency=10)
    async def step(self) -> int:
        if trimesh.context(self).incarnation == 0:
            self.notes.add("deaf")
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
        return trimesh.context(self).incarnation


async def call_deaf(deaf: Deaf, abandon_after: float | None) -> list[int]:
    verb = deaf.step.options(retry=Retry(3), abandon_after=abandon_after)
    return [*(await verb.call()).values()]


class DeafCaller(Actor):
    @endpoint
    async def call(self, deaf: Deaf, abandon_after: float | None) -> list[int]:
        return await call_deaf(deaf, abandon_after)


@pytest.mark.parametrize("stage", ["before", "in", "after"])
async def test_call_whose_ranks_meet_is_made_again_whole(backend: Backend, stage: str):
    """C6: whether a rank is lost before the others wait for it, while it waits with them, or when they have met."""
    policy = Restart("one_for_one", backoff=Backoff(0.01))
    async with backend.procs({"gpus": 3}, supervision=policy) as procs, backend.procs({"gpus": 1}) as others:
        barrier = await others.spawn("barrier", Barrier, 3)
        meeting = await procs.spawn("meeting", BarrierStep, barrier, stage)
        async with trio.open_nursery() as nursery:
            step = attempt(nursery, meeting.step.options(retry=Retry(3, whole=True)).call)
            if stage == "in":
                await barrier.wait.call_one("waits", 2)
            else:
                await meeting.slice(gpus=1).wait.call_one("held")
            backend.kill(procs, 1)
            values = await step.result()
        assert values.values() == (0, 1, 0)
        met = [log.count("met") for log in (await meeting.seen.call()).values()]
        assert met == ([2, 1, 2] if stage == "after" else [1, 1, 1])


class Barrier(Probe):
    """Lets callers go when all of them are there; one that is cancelled, or has died, is there no more."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.waiting, self.met = size, 0, trio.Event()

    @endpoint(concurrency=10)
    async def meet(self) -> None:
        self.waiting += 1
        self.notes.add("waits")
        met = self.met
        if self.waiting == self.size:
            met.set()
            self.waiting, self.met = 0, trio.Event()
        try:
            await met.wait()
        finally:
            if met is self.met:
                self.waiting -= 1


class BarrierStep(Probe):
    """A step in which all ranks meet; one rank stays at a stage of its first run."""

    def __init__(self, barrier: Barrier, stage: str) -> None:
        super().__init__()
        self.barrier, self.stage, self.runs = barrier, stage, 0

    async def _stay(self, stage: str, rank: int) -> None:
        if (self.stage, self.runs, trimesh.current_rank(), trimesh.context(self).incarnation) == (stage, 1, rank, 0):
            self.notes.add("held")
            await trio.sleep_forever()

    @endpoint(idempotent=True, concurrency=10)
    async def step(self) -> int:
        self.runs += 1
        await self._stay("before", 1)
        await self._stay("in", 2)
        await self.barrier.meet.call_one()
        self.notes.add("met")
        await self._stay("after", 1)
        return trimesh.context(self).incarnation


class Meeting(Probe):
    """Steps of a member end in its second one, or in its first one if it was started again."""

    @endpoint(idempotent=True, concurrency=10)
    async def step(self) -> int:
        self.steps = getattr(self, "steps", 0) + 1
        self.notes.add("in a step")
        if trimesh.context(self).incarnation == 0 and self.steps == 1:
            await trio.sleep_forever()
        return self.steps


async def test_call_that_fails_in_the_end_cancels_the_others(backend: Backend):
    """C6, C1, E01: like any other call, with what came back."""
    async with backend.procs({"gpus": 3}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        with pytest.raises(MeshErrorGroup) as caught:
            await flaky.fail_or_hold.options(retry=TWICE).call({1: 9}, ERROR)
        assert kinds(caught.value) == [ConnectionError]
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
        assert len(caught.value.partial) == 0
        assert [log.count("unwound") - log.count("holding") for log in (await flaky.log.call()).values()] == [0, 0, 0]
        with pytest.raises(MeshErrorGroup) as caught:
            await flaky.fail_where.options(retry=Retry(1, on=KeyError)).call([1])
        assert caught.value.mesh == "flaky"
        assert set(caught.value.partial.values()) <= {0, 2}


async def test_empty_view(backend: Backend):
    """M6, K01."""
    async with backend.procs({"gpus": 2}) as procs:
        flaky = (await procs.spawn("flaky", Flaky)).slice(gpus=slice(0, 0))
        handle = flaky.fail.options(retry=TWICE)
        with trio.testing.assert_checkpoints():
            assert list((await handle.call({}, ERROR)).items()) == []
        for verb in (handle.call_one, handle.choose):
            with pytest.raises(ValueError, match="member"):
                await verb({}, ERROR)


async def test_cancel_ends_every_attempt(backend: Backend):
    """C01, C03: a running one, and the wait for the next."""
    async with backend.procs({"gpus": 2}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        async with trio.open_nursery() as nursery:
            held = attempt(nursery, flaky.fail_or_hold.options(retry=TWICE).call, {0: 1}, ERROR)
            await flaky.wait.call("holding")
            held.cancel()
        assert held.cancelled
        assert [log[-1] for log in (await flaky.log.call()).values()] == ["unwound"] * 2
        for verb in ("call", "choose"):
            with trio.move_on_after(0.3) as scope:
                handle = flaky.fail_where.options(retry=Retry(1, on=ConnectionError, backoff=1_000.0))
                await getattr(handle, verb)([0, 1])
            assert scope.cancelled_caught


@only_sim
async def test_backoff_is_kept(backend: SimBackend):
    """C6."""
    async with backend.procs({"gpus": 1}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        start = trio.current_time()
        retry = Retry(3, on=ConnectionError, backoff=float)
        assert await flaky.fail.options(retry=retry).call_one({0: 3}, ERROR) == 0
        assert trio.current_time() - start == 6.0


async def test_death_is_followed_by_another_member(backend: Backend):
    """R09, C6: a holder elsewhere, whom the death does not cancel, chooses another member."""
    async with backend.procs({"gpus": 1}) as others:
        chooser = await others.spawn("chooser", Chooser)
        keeper = await others.spawn("keeper", Flaky)
        async with trio.open_nursery() as nursery:
            with pytest.raises(MeshErrorGroup) as owners:
                async with backend.procs({"gpus": 2}) as procs:
                    flaky = await procs.spawn("flaky", Flaky)
                    choosing = attempt(nursery, chooser.choose.call_one, flaky)
                    await flaky.slice(gpus=0).wait.call_one("holding")
                    backend.kill(procs, 0)
                    await trio.sleep_forever()
            assert kinds(owners.value) == [ProcDied]
            assert await choosing.result() in (["ProcDied", "MeshStopped"], ["ProcDied", "RemoteCancelled"])
        assert await keeper.runs.call_one() == 0


class Chooser(Actor):
    @endpoint
    async def choose(self, flaky: Flaky) -> list[str]:
        """Choose with a retry; return the names of the errors of the attempts, the first one first."""
        try:
            await flaky.fail_or_hold.options(retry=Retry(3)).choose({}, ERROR)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test looks at it
            names = []
            link: BaseException | None = error
            while link is not None:
                names.append(type(link).__name__)
                link = link.__context__
            return names[::-1]
        return []


@pytest.mark.parametrize(
    ("option", "verbs"),
    [
        ("merge", ["call", "call_settled", "call_one", "choose", "broadcast", "broadcast_nowait"]),
        ("window", ["call", "call_settled", "call_one", "choose", "broadcast", "broadcast_nowait"]),
        ("retry", ["call_settled", "broadcast", "broadcast_nowait", "stream"]),
    ],
)
async def test_option_that_a_verb_does_not_have_is_refused(backend: Backend, option: str, verbs: list[str]):
    """C6."""
    values: dict[str, Any] = {"merge": "collect", "window": 3, "retry": TWICE}
    async with backend.procs({"gpus": 1}) as procs:
        flaky = await procs.spawn("flaky", Flaky)
        handle = flaky.fail_where.options(**{option: values[option]})
        for verb in verbs:
            with pytest.raises(TypeError, match=f"{option} of flaky.fail_where means nothing for {verb}"):
                await getattr(handle, verb)([])
        with pytest.raises(TypeError, match="idempotent"):
            flaky.once.options(retry=TWICE)
        assert await flaky.runs.call_one() == 0
