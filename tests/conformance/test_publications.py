"""Versions that one process publishes and others follow (N4): never torn, gone with their owner."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from tests.conformance.meshes import Backend, SimBackend, attempt, kinds, member, only_sim, tick
from tests.conformance.publishing import Follower, Publisher, Reader, is_torn, version_of
from tests.conformance.supervised import kill_and_wait, reading

import trimesh
from trimesh import Isolate, LinkLost, ProcDied, Restart, limits, observe
from trimesh._runtime.life.current import current_proc
from trimesh.rdma import Published, VersionGone
from trimesh.rdma.publications import board


async def test_readers_follow_a_publisher_that_never_pauses(backend: Backend):
    """N4: no version that a reader has taken is torn; versions only grow; the last one is seen."""
    async with backend.procs({"gpus": 4}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        readers = await procs.slice(gpus=slice(1, 4)).spawn("readers", Reader)
        handle = await publisher.handle.call_one()
        following = attempt(nursery, readers.follow.call, handle, 40)
        await publisher.publish.call_one(1, 40)
        for seen in (await following.result()).values():
            assert seen == sorted(set(seen))
            assert (min(seen) > 0, seen[-1]) == (True, 40)


async def test_version_that_is_about_to_go_is_whole_or_gone(backend: Backend):
    """N4: a reader that pins it just when the publisher takes its memory gets all of it, or `VersionGone`."""
    async with backend.procs({"gpus": 4}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        readers = await procs.slice(gpus=slice(1, 4)).spawn("readers", Reader)
        handle = await publisher.handle.call_one()
        chasing = attempt(nursery, readers.chase.call, handle, 40)
        await publisher.publish.call_one(1, 40)
        assert list((await chasing.result()).values()) == [[], [], []]


@pytest.mark.daily("real")
async def test_pinned_version_stays_as_it_is(backend: Backend):
    """N4: the publisher writes elsewhere, and waits when there is no elsewhere."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 3)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        holding = attempt(nursery, reader.hold.call_one, handle)
        await reader.pinned.call_one()
        await publisher.publish.call_one(2, 20)
        await reader.let_go.call_one()
        assert await holding.result() == 1
        assert await reader.try_pin.call_one(handle, 20) == "20"
        for never in 0, -1, 21:
            assert await reader.try_pin.call_one(handle, never) == VersionGone.__name__


async def test_publisher_waits_for_the_last_pin(backend: Backend):
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await reader.pinned.call_one()
        await publisher.publish.call_one(2)

        third = attempt(nursery, publisher.publish.call_one, 3)
        assert await reader.wait_newer.call_one(handle, 1) == 2
        await tick(20)
        assert not third.over.is_set()
        await reader.let_go.call_one()

        assert await third.result() == 3
        assert await holding.result() == 1
        assert await reader.try_pin.call_one(handle, 1) == VersionGone.__name__


async def test_publisher_hears_of_a_pin_that_was_left_by_a_reader_without_a_link(backend: Backend):
    """RE-4: it took its row and its pin without a word; the publisher waits for it all the same."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        holding = attempt(nursery, reader.hold.call_one, handle, 1)
        await reader.pinned.call_one()
        await publisher.publish.call_one(2)
        third = attempt(nursery, publisher.publish.call_one, 3)
        await tick(20)
        assert not third.over.is_set()
        await reader.let_go.call_one()
        assert (await holding.result(), await third.result()) == (1, 3)


@only_sim
async def test_new_reader_needs_no_word_of_the_publisher(backend: SimBackend):
    """RE-4: what is there can be pinned and read while nothing that is sent to the publisher arrives."""
    async with backend.procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        ends = member(reader, 0).proc_id, member(publisher, 0).proc_id
        backend.lag.links[ends] = backend.lag.links[ends[::-1]] = (100.0, 100.0)
        before = trio.current_time()
        assert await reader.wait_newer.call_one(handle, 0) == 1
        assert await reader.follow.call_one(handle, 1) == [1]
        assert trio.current_time() - before < 10
        backend.lag.links.clear()


@only_sim
async def test_rows_of_readers_that_have_ended_are_given_to_others(backend: Backend, monkeypatch: pytest.MonkeyPatch):
    """BO-4: a publication is read by any number of processes, one after the other, and by so many at one time."""
    monkeypatch.setattr("trimesh.limits.PUBLISHED_READERS_MAX", 2)
    monkeypatch.setattr(board, "BOARD_BYTES", board.HEAD_BYTES + 2 * board.ROW_BYTES)
    async with backend.procs({"gpus": 1}), Published() as weights:
        for number in range(1, 4):
            async with backend.procs({"gpus": 2}) as others:
                readers = await others.spawn("readers", Reader)
                await weights.publish(version_of(number))
                assert list((await readers.follow.call(weights, number)).values()) == [[number]] * 2
                with pytest.raises(trimesh.LimitExceeded):
                    await weights.wait_newer(0)


async def test_pins_of_a_dead_reader_are_given_up(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs:
        publisher = await procs.spawn("publisher", Publisher)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        with pytest.raises(trimesh.MeshErrorGroup) as caught:
            async with backend.procs({"gpus": 1}) as doomed:
                reader = await doomed.spawn("reader", Reader)
                await reader.hold.broadcast(handle)
                await reader.pinned.call_one()
                backend.kill(reader, 0)
                await trio.sleep_forever()
        assert ProcDied in kinds(caught.value)
        assert await publisher.publish.call_one(2, 6) == 6


async def test_cancelled_reader_leaves_no_pin(backend: Backend):
    async with backend.procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader.hold.call_one, handle)
            await reader.pinned.call_one()
            nursery.cancel_scope.cancel()
        assert await publisher.publish.call_one(2, 6) == 6


async def test_two_tasks_of_a_process_share_a_pin(backend: Backend):
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        one, two = (attempt(nursery, reader.hold.call_one, handle, 1) for _ in range(2))
        await reader.pinned.call_one()
        await publisher.publish.call_one(2)
        assert await reader.try_pin.call_one(handle, 1) == "1"
        await reader.let_go.call_one()
        assert (await one.result(), await two.result()) == (1, 1)
        assert await publisher.publish.call_one(3, 6) == 6


@pytest.mark.daily("real")
async def test_end_of_the_publisher_ends_those_who_wait(backend: Backend):
    """N4: by its aclose with `ClosedResourceError`, by its death with `ProcDied`."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        assert await reader.wait_newer.call_one(handle, 0) == 1
        waiting = attempt(nursery, reader.wait_newer.call_one, handle, 1)
        await tick(20)
        await publisher.close.call_one()
        with pytest.raises(trio.ClosedResourceError):
            await waiting.result()
        assert await reader.try_pin.call_one(handle, 1) == "ClosedResourceError"


@pytest.mark.parametrize("before", ["nothing", "forgets", "closes"])
async def test_pinned_version_outlives_its_publisher(backend: Backend, before: str):
    """N4: read by its process until that lets go; not if the pin was given up, or the publication closed, before."""
    async with backend.procs({"gpus": 2}, supervision=Isolate()) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 2, 300_000)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        mapped = await reader.mapped.call_one()
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        holding = attempt(nursery, reader.hold.call_one, handle)
        await reader.pinned.call_one()
        if before == "forgets":
            await publisher.forget_readers.call_one()
            await publisher.publish.call_one(2, 3)
        elif before == "closes":
            await publisher.close.call_one()
        backend.kill(publisher, 0)
        with pytest.raises(ProcDied):
            await publisher.wait_for_ever.call_one()
        with pytest.raises(ProcDied):
            async with handle.pin(1):
                pass
        await reader.let_go.call_one()
        if before == "nothing":
            assert await holding.result() == 1
        else:
            with pytest.raises(LinkLost if before == "forgets" else (ProcDied, trio.ClosedResourceError)):
                await holding.result()
        await reader.mapped.call_one(mapped)


async def test_reader_that_asks_for_a_closed_publication_is_told(backend: Backend):
    """N4: also the first time it asks, and whatever it asks for."""
    async with backend.procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        await publisher.close.call_one()
        for _ in range(2):
            assert await reader.try_pin.call_one(handle, 1) == "ClosedResourceError"
            with pytest.raises(trio.ClosedResourceError):
                await reader.wait_newer.call_one(handle, 0)
        assert (await reader.tables.call_one())[0] == 0


@only_sim
async def test_reader_that_asks_while_a_publication_is_closed_is_told(backend: SimBackend):
    """N4: it has seen the board open, and its question comes when the publication is known no more."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery, Published() as weights:
        reader = await procs.spawn("reader", Reader)
        await weights.publish(version_of(1))
        backend.lag.links[member(reader, 0).proc_id, current_proc().proc_id] = (5.0, 5.0)
        waiting = attempt(nursery, reader.wait_newer.call_one, weights, 1)
        await trio.sleep(1)  # it has asked
        await weights.aclose()
        backend.lag.links.clear()
        with pytest.raises(trio.ClosedResourceError):
            await waiting.result()


@only_sim
async def test_reader_of_a_publication_that_was_closed_before_it_subscribed_forgets_it(backend: SimBackend):
    """PS-1: it waits for nothing, so it learns of the end by the answer."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery, Published() as weights:
        reader = await procs.spawn("reader", Reader)
        await weights.publish(version_of(1))
        backend.lag.links[member(reader, 0).proc_id, current_proc().proc_id] = (5.0, 5.0)
        pinning = attempt(nursery, reader.try_pin.call_one, weights, 1)
        await trio.sleep(1)  # it has asked
        await weights.aclose()
        backend.lag.links.clear()
        assert await pinning.result() == "1"
        await tick(20)
        assert (await reader.tables.call_one())[0] == 0


@only_sim
async def test_publication_ends_with_its_actor(backend: Backend):
    """N4: who waits is told, though the process of the actor lives on."""
    async with backend.procs({"gpus": 2}) as procs, trio.open_nursery() as nursery:
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        async with procs.slice(gpus=0).spawn("publisher", Publisher) as publisher:
            handle = await publisher.handle.call_one()
            await publisher.publish.call_one(1)
            waiting = attempt(nursery, reader.wait_newer.call_one, handle, 1)
            await tick(20)
        with pytest.raises(trio.ClosedResourceError):
            await waiting.result()
        assert await reader.try_pin.call_one(handle, 1) == "ClosedResourceError"


async def test_closed_publications_leave_nothing(backend: Backend):
    """Neither in the process that has published, nor in those that have read: however many come and go."""
    async with backend.procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        await publisher.close.call_one()
        before = [await actor.tables.call_one() for actor in (publisher, reader)]
        for _ in range(20):
            handle = await publisher.open.call_one()
            await publisher.publish.call_one(1, 2)
            assert (await reader.follow.call_one(handle, 2))[-1] == 2
            await publisher.close.call_one()
        assert await reader.try_pin.call_one(handle, 2) == "ClosedResourceError"
        assert [await actor.tables.call_one() for actor in (publisher, reader)] == before
        assert before[0][0] == before[1][0] == 0


async def test_restarted_publisher_is_another_publication(backend: Backend):
    """N4: the old handle says that its process has died, and never gives versions of the new one."""
    policy = Restart(intensity=3)
    async with backend.procs({"gpus": 1}) as others, backend.procs({"gpus": 1}, supervision=policy) as procs:
        publisher = await procs.spawn("publisher", Publisher)
        reader = await others.spawn("reader", Reader)
        old = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        async with reading(procs) as log, trio.open_nursery() as nursery:
            waiting = attempt(nursery, reader.wait_newer.call_one, old, 1)
            await tick(20)
            await kill_and_wait(backend, procs, log, 0)  # the reader may know of the death before we do
            with pytest.raises(ProcDied):
                await waiting.result()
        new = await publisher.handle.call_one()
        await publisher.publish.call_one(1)
        assert await reader.try_pin.call_one(old, 1) == "ProcDied"
        assert await reader.try_pin.call_one(new, 1) == "1"


async def test_publication_of_the_controller(backend: Backend):
    """Who spawns the mesh can publish, read its own, and read as a whole or by name."""
    async with backend.procs({"gpus": 2}) as procs, Published() as weights:
        readers = await procs.spawn("readers", Reader)
        assert await weights.publish(version_of(1)) == 1
        assert list((await readers.follow.call(weights, 1)).values()) == [[1], [1]]
        async with weights.pin() as snapshot:
            with trio.testing.assert_checkpoints():
                assert not is_torn(await snapshot.read(), 1)
            only = bytearray(1000)
            await snapshot.read_into({"b": only})
            assert only == version_of(1)["b"]
            with pytest.raises(KeyError, match="'c'"):
                await snapshot.read_into({"c": only})
            with pytest.raises(ValueError, match="size"):
                await snapshot.read_into({"b": bytearray(999)})
        last = board.VERSION_MAX
        for number in (0, 1, last + 1):
            with pytest.raises(ValueError, match=f"above the latest, 1, got {number}"):
                await weights.publish(version_of(2), version=number)
        assert await weights.publish(version_of(last), version=last) == last
        assert list((await readers.follow.call(weights, last)).values()) == [[last], [last]]


@only_sim
async def test_snapshot_says_how_long_versions_are_pinned_or_unread(backend: SimBackend):
    """Q1: a pin since a `publish` first found it, unread versions since the first was published."""
    async with backend.procs({"gpus": 1}), Published() as weights, trio.open_nursery() as nursery:

        async def row() -> observe.PublicationRow:
            [found] = (await observe.snapshot()).publications
            return found

        for number in 1, 2:
            await weights.publish(version_of(number))
            await trio.sleep(2)
        seen = await row()
        assert (seen.latest, seen.unread, seen.unread_seconds, seen.pins) == (2, 2, 4.0, ())
        async with weights.pin(1):
            seen = await row()
            assert (seen.unread, seen.unread_seconds, seen.pinned, seen.pins[0].seconds) == (0, 0.0, (1,), 0.0)
            third = attempt(nursery, weights.publish, version_of(3))
            for seconds in 0, 5, 10:
                seen = await row()
                assert (seen.is_waiting, seen.pinned, seen.pins[0].seconds) == (True, (1,), seconds)
                await trio.sleep(5)
        assert await third.result() == 3
        await trio.sleep(7)
        seen = await row()
        assert (seen.is_waiting, seen.pins, seen.unread, seen.unread_seconds) == (False, (), 1, 7.0)
        async with weights.pin(2):
            seen = await row()
            assert (seen.pins[0].seconds, seen.unread, seen.unread_seconds) == (0.0, 0, 0.0)
        assert ((await row()).unread, (await row()).unread_seconds) == (0, 0.0)


@only_sim
async def test_small_tensors_beside_a_large_one_are_read_together(backend: SimBackend):
    """N4: in one transfer; all of them, some, and one."""
    size = limits.PUBLISHED_COPY_BYTES_MAX
    tensors = {name: bytes([number]) * (1000 + number) for number, name in enumerate("abcd", start=1)}
    tensors |= {"one": b"1", "large": bytes(range(250)) * (size // 250 + 1), "z": b"end"}
    async with backend.procs({"gpus": 1}), Published() as weights:
        await weights.publish(tensors)
        async with weights.pin() as snapshot:
            assert await snapshot.read() == tensors
            for names in ("bd", "c", ["large", "z", "a"]):
                found = {name: bytearray(len(tensors[name])) for name in names}
                await snapshot.read_into(found)
                assert found == {name: tensors[name] for name in names}
            assert not snapshot.is_lent
            found = bytearray(snapshot.whole().nbytes)
            assert snapshot.is_lent
            await snapshot.whole().read_into(found)
            for name, data in tensors.items():
                at = snapshot.entry(name).offset
                assert found[at : at + len(data)] == data


async def test_larger_versions_get_other_memory(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, Published() as weights:
        reader = await procs.spawn("reader", Reader)
        for number, size in enumerate([30, 3000, 300_000, 30], start=1):
            await weights.publish(version_of(number, size))
            assert (await reader.follow.call_one(weights, number))[-1] == number


@pytest.mark.parametrize("size", [3000, 300_000])
@pytest.mark.seeds(5)
async def test_follower_computes_with_one_version_at_a_time(backend: Backend, size: int):
    """FO-1: a task that looks at its tensors beside it never sees some of one version and some of the next."""
    async with backend.procs({"gpus": 3}) as procs, trio.open_nursery() as nursery:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 2, size)
        followers = await procs.slice(gpus=slice(1, 3)).spawn("followers", Follower, size)
        handle = await publisher.handle.call_one()
        following = attempt(nursery, followers.follow.call, handle, 10)
        await publisher.publish.call_one(1, 10)
        for seen in (await following.result()).values():
            assert seen == sorted(set(seen))
        assert list((await followers.count_mixed.call()).values()) == [0, 0]


async def test_follower_ends_with_its_publication(backend: Backend):
    """API 7: a loop over its versions is left when there will be no other; its death is an error."""
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        follower = await procs.spawn("follower", Follower)
        async with backend.procs({"gpus": 1}) as others:
            publisher = await others.spawn("publisher", Publisher)
            closed = await publisher.handle.call_one()
            await publisher.publish.call_one(1)
            following = attempt(nursery, follower.follow.call_one, closed)
            assert await follower.wait_for.call_one(1) == 1
            await publisher.close.call_one()
            assert await following.result() == [1]
            stopped = await publisher.open.call_one()
            await publisher.publish.call_one(1, 2)
            following = attempt(nursery, follower.follow.call_one, stopped)
            assert await follower.wait_for.call_one(2) == 2
        assert await following.result() == [2]
        assert [await follower.follow.call_one(handle) for handle in (closed, stopped)] == [[], []]


async def test_follower_says_how_its_publisher_has_died(backend: Backend):
    async with backend.procs({"gpus": 1}) as procs, trio.open_nursery() as nursery:
        follower = await procs.spawn("follower", Follower)
        with pytest.raises(trimesh.MeshErrorGroup):
            async with backend.procs({"gpus": 1}) as doomed:
                publisher = await doomed.spawn("publisher", Publisher)
                handle = await publisher.handle.call_one()
                await publisher.publish.call_one(1)
                following = attempt(nursery, follower.follow.call_one, handle)
                await follower.count_mixed.call_one()
                backend.kill(publisher, 0)
                await trio.sleep_forever()
        with pytest.raises(ExceptionGroup) as died:
            await following.result()
        assert kinds(died.value) == [ProcDied]


async def test_follower_goes_on_with_a_restarted_publisher(backend: Backend):
    """API 7: `renew` brings the publication that has come in place of one whose process has died."""
    policy = Restart(intensity=3)
    async with backend.procs({"gpus": 1}) as others, backend.procs({"gpus": 1}, supervision=policy) as procs:
        publisher = await procs.spawn("publisher", Publisher)
        follower = await others.spawn("follower", Follower)
        handle = await publisher.handle.call_one()
        await publisher.publish.call_one(1, 5)
        async with reading(procs) as log, trio.open_nursery() as nursery:
            following = attempt(nursery, follower.follow.call_one, handle, 1, publisher)
            assert await follower.wait_for.call_one(5) == 5
            await kill_and_wait(backend, procs, log, 0)
            await publisher.publish.call_one(1)
            assert await following.result() == [5, 1]


async def test_what_does_not_fit_is_found_before_a_tensor_is_changed(backend: Backend):
    """FO-2, and a mapping of some names takes over these."""
    async with backend.procs({"gpus": 1}), Published() as weights:
        await weights.publish(version_of(1))
        live = {"a": bytearray(3000), "b": bytearray(999)}
        with pytest.raises(ValueError, match="'b' must have the size it was published with"):
            await anext(weights.follow(live))
        assert live["a"] == bytes(3000)
        for wrong, error in ({"c": live["a"]}, KeyError), ({"a": bytes(3000)}, ValueError), ({"a": 1}, TypeError):
            with pytest.raises(error):
                await anext(weights.follow(wrong))
        with pytest.raises(TypeError, match="a module or a mapping"):
            weights.follow(live["a"])
        assert await anext(weights.follow({"a": live["a"]})) == 1
        assert live["a"] == version_of(1)["a"]


async def test_followers_wait_for_a_lock_and_do_not_share_a_loop(backend: Backend):
    """API 7: who computes with a lock held finds nothing changed under it."""
    async with backend.procs({"gpus": 1}), Published() as weights, trio.open_nursery() as nursery:
        await weights.publish(version_of(1))
        live, lock = {"a": bytearray(3000)}, trio.Lock()
        following = weights.follow(live, lock=lock)
        async with lock:
            taken = attempt(nursery, following.__anext__)
            await tick(50)
            with pytest.raises(trio.BusyResourceError):
                await anext(following)
            assert live["a"] == bytes(3000)
        assert await taken.result() == 1
        assert live["a"] == version_of(1)["a"]
