"""Large bodies between processes of one host travel in shared memory: copied once, private to each reader (V1)."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import trio
import trio.testing
from tests.conformance.transports import MIB, NativeBackend, Recorder, World, pattern, wait_sent

from trimesh import limits
from trimesh._transport.interface import DownReason, Lane, Link

pytestmark = pytest.mark.real

LARGE = limits.FRAME_PAYLOAD_BYTES_MAX + 1
SIZES = [LARGE, MIB, 5 * MIB + 3]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    backend = NativeBackend(local=True)
    try:
        async with trio.open_nursery() as nursery:
            yield World(backend, nursery)
            nursery.cancel_scope.cancel()
    finally:
        backend.close()
    gc.collect()
    assert segments() == mappings() == 0


def segment_sizes() -> list[int]:
    """Return the bytes of each segment that has a descriptor in this process: those of its pools."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/self/fd/{fd}"
            if "trimesh-segment" in os.readlink(path):
                found.append(os.stat(path).st_size)
    return found


def segments() -> int:
    return len(segment_sizes())


def mappings() -> int:
    """Return how many mappings of segments this process has, shared ones of pools and private ones of readers."""
    return Path("/proc/self/maps").read_text().count("trimesh-segment")


def star(world: World, count: int) -> tuple[list[Link], list[Recorder]]:
    """One running transport joined to `count` running ones: its links, and what the others see."""
    centre = world.transport()
    others = [world.transport() for _ in range(count)]
    links = [world.connect(centre, other)[0] for other in others]
    world.start(centre)
    return links, [world.start(other) for other in others]


def take(recorder: Recorder) -> memoryview:
    """Return the only body of the only message, which the recorder forgets."""
    ((body,),) = (message.bodies for message in recorder.messages)
    recorder.messages.clear()
    return body


async def pass_one(link: Link, recorder: Recorder, body: bytes) -> memoryview:
    await wait_sent([link.send(b"", [body])])
    await recorder.wait_messages(1)
    return take(recorder)


async def wait_given_back() -> None:
    """Let releases travel: one tick of the reader, one of the sender, with time for each to wake."""
    for _ in range(5):
        await trio.testing.wait_all_tasks_blocked()


# ---- V1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_write_into_a_body_is_seen_by_nobody_else(world: World, size: int):
    """V1: by no other reader, not by the sender, not by the next message in that segment."""
    links, sees = star(world, 2)
    group = links[0].transport.define_group(links)
    for round_ in range(3):
        sent = bytearray(pattern(size, round_))
        await wait_sent([group.cast(b"", [sent])])
        for recorder in sees:
            await recorder.wait_messages(1)
        first, second = (take(recorder) for recorder in sees)
        assert first == second == sent
        first[:] = bytes(size)
        assert second == sent == pattern(size, round_)
        second[size // 2] ^= 1
        assert first[size // 2] == 0
        del first, second
        await wait_given_back()
    assert segments() == 1  # each round has used the same one


async def test_arrays_arrive_writable(world: World):
    """V1: a tensor over memory that cannot be written to dies by a signal."""
    (link,), (sees,) = star(world, 1)
    torch = pytest.importorskip("torch")
    await wait_sent([link.send(b"", [np.arange(100_000.0).data.cast("B"), np.ones(50_000).data.cast("B")])])
    (message,) = await sees.wait_messages(1)

    array = np.frombuffer(message.bodies[0])
    tensor = torch.frombuffer(message.bodies[1], dtype=torch.float64)
    array += 1
    tensor[7] = 3

    assert array.sum() == np.arange(1.0, 100_001.0).sum()
    assert tensor[6:9].tolist() == [1, 3, 1]


async def test_array_keeps_the_memory_when_its_view_is_gone(world: World):
    (link,), (sees,) = star(world, 1)
    array = np.frombuffer(await pass_one(link, sees, pattern(MIB, 1)), dtype=np.uint8)

    for i in range(5):
        assert (await pass_one(link, sees, pattern(MIB, 2 + i))) == pattern(MIB, 2 + i)

    assert array.tobytes() == pattern(MIB, 1)


async def test_small_large_and_empty_bodies_mix(world: World):
    (link,), (sees,) = star(world, 1)
    sizes = [0, 1, LARGE, 10, limits.FRAME_PAYLOAD_BYTES_MAX, 0, 3 * MIB, LARGE, 7, 0]
    bodies = [pattern(size, seed) for seed, size in enumerate(sizes)]

    await wait_sent([link.send(b"%d" % i, bodies[i:]) for i in range(len(bodies))])

    messages = await sees.wait_messages(len(bodies))
    assert [message.contents for message in messages] == [bodies[i:] for i in range(len(bodies))]


async def test_body_above_the_largest_segment_goes_in_chunks(world: World):
    (link,), (sees,) = star(world, 1)
    body = pattern(MIB) * (limits.SEGMENT_BYTES_MAX // MIB) + b"x"

    assert (await pass_one(link, sees, body)) == body

    assert 0 < segments() <= 4 * limits.CHUNK_FLIGHT_BYTES_MAX // limits.CHUNK_BYTES


async def test_message_above_the_idle_segments_makes_none_of_its_own(world: World):
    """Otherwise each such message would allocate its size in new shared memory, in one turn of the loop."""
    (link,), (sees,) = star(world, 1)
    body = memoryview(bytearray(limits.SEGMENT_BYTES_MAX))
    body[-1] = 1
    count = limits.SEGMENT_IDLE_BYTES_MAX // limits.SEGMENT_BYTES_MAX + 1

    await wait_sent([link.send(b"", [body] * count)])

    (message,) = await sees.wait_messages(1)
    assert [(len(one), one[-1]) for one in message.bodies] == [(len(body), 1)] * count
    assert 0 < sum(segment_sizes()) <= 4 * limits.CHUNK_FLIGHT_BYTES_MAX


async def test_same_buffer_twice_in_a_message_arrives_as_two(world: World):
    (link,), (sees,) = star(world, 1)
    body = pattern(MIB)
    await wait_sent([link.send(b"", [body, body])])
    (message,) = await sees.wait_messages(1)

    message.bodies[0][:] = bytes(MIB)

    assert message.bodies[1] == body


# ---- slots ---------------------------------------------------------------------------------------------------------


@pytest.mark.daily
async def test_cast_copies_once_for_all_readers(world: World):
    links, sees = star(world, 5)
    group = links[0].transport.define_group([*links, links[0]])  # a group is a set

    await wait_sent([group.cast(b"", [pattern(MIB)])])

    for recorder in sees:
        assert [message.contents for message in await recorder.wait_messages(1)] == [[pattern(MIB)]]
    assert segments() == 1


async def test_thousand_messages_need_few_segments(world: World):
    (link,), (sees,) = star(world, 1)
    sees.react = lambda message: sees.messages.clear()
    body = bytes(MIB)

    for _ in range(1000):
        event = link.send(b"", [body])
        if event is not None:
            await event.wait()
    link.send(b"last")
    await sees.wait(lambda: link.statistics().messages_sent == 1001 and link.statistics().queued_bytes == 0)

    # What may be under way, and as much again for what is being given back.
    assert 1 <= segments() <= 2 * limits.SEGMENT_FLIGHT_BYTES_MAX // MIB + 2


@pytest.mark.daily
async def test_body_that_is_kept_keeps_its_segment_and_nothing_else(world: World):
    (link,), (sees,) = star(world, 1)
    kept = await pass_one(link, sees, pattern(MIB, 99))

    for seed in range(20):
        assert (await pass_one(link, sees, pattern(MIB, seed))) == pattern(MIB, seed)
        await wait_given_back()

    assert segments() == 2
    assert kept == pattern(MIB, 99)


async def test_bodies_may_be_given_back_in_any_order(world: World):
    (link,), (sees,) = star(world, 1)
    dice = random.Random(5)
    held: dict[int, memoryview] = {}
    for seed in range(60):
        held[seed] = await pass_one(link, sees, pattern(200_000, seed))
        while len(held) > 5:
            del held[dice.choice(list(held))]
            await wait_given_back()
        for old, body in held.items():
            assert body == pattern(200_000, old)
    assert segments() <= 8  # six are held, and one or two are on their way


async def test_part_of_a_body_keeps_all_of_it(world: World):
    (link,), (sees,) = star(world, 1)
    part = (await pass_one(link, sees, pattern(MIB, 1)))[1000:2000]
    await wait_given_back()

    await pass_one(link, sees, pattern(MIB, 2))

    assert part == pattern(MIB, 1)[1000:2000]


async def test_segment_that_could_not_be_given_back_for_want_of_room_is_given_back_later(world: World):
    a, b = world.transport(), world.transport()
    here, there = world.connect(a, b)
    b_sees = world.start(b)
    with trio.CancelScope() as scope:  # a reads until b holds a body, then no more
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.run, Recorder())
            body = await pass_one(here, b_sees, pattern(MIB))
            scope.cancel()
    count = 3 * limits.RING_BYTES // 1000
    for i in range(count):
        there.send(b"%d" % i, [bytes(1000)])
        there.send(b"%d" % i, lane=Lane.CONTROL)
    del body
    await wait_given_back()

    await world.start(a).wait_messages(2 * count)
    await wait_given_back()
    await pass_one(here, b_sees, pattern(MIB, 2))

    assert segments() == 1


async def test_peer_that_does_not_read_takes_a_bounded_number_of_segments(world: World):
    a, b = world.transport(), world.transport()
    here, _ = world.connect(a, b)
    world.start(a)
    await trio.testing.wait_all_tasks_blocked()

    events = [here.send(b"%d" % i, [pattern(MIB, i)]) for i in range(40)]

    assert events[-1] is not None
    assert segments() == limits.SEGMENT_FLIGHT_BYTES_MAX // MIB
    sees = world.start(b)
    await wait_sent(events)
    messages = await sees.wait_messages(40)
    assert [message.contents for message in messages] == [[pattern(MIB, i)] for i in range(40)]


# ---- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["reader aborts", "sender aborts", "both close"])
async def test_body_outlives_its_link_and_is_not_written_to(world: World, who: str):
    links, sees = star(world, 2)
    await wait_sent([links[0].send(b"", [pattern(MIB, 1)])])
    (message,) = await sees[0].wait_messages(1)
    body = take(sees[0])
    if who == "reader aborts":
        message.link.abort()
    elif who == "sender aborts":
        links[0].abort()
    else:
        links[0].close()
    await trio.testing.wait_all_tasks_blocked()

    for seed in range(5):  # the same sender, another reader
        assert (await pass_one(links[1], sees[1], pattern(MIB, seed))) == pattern(MIB, seed)

    assert body == pattern(MIB, 1)
    body[:] = bytes(MIB)
    assert segments() <= 2
    message.bodies.clear()


def test_body_outlives_its_transport():
    gc.collect()  # bodies that earlier tests have dropped
    backend = NativeBackend(local=True)

    async def main() -> memoryview:
        async with trio.open_nursery() as nursery:
            (link,), (sees,) = star(World(backend, nursery), 1)
            body = await pass_one(link, sees, pattern(MIB))
            nursery.cancel_scope.cancel()
        return body

    body = trio.run(main)
    backend.close()

    assert (segments(), mappings()) == (0, 1)
    assert body == pattern(MIB)
    body[0] = 1
    del body
    gc.collect()
    assert mappings() == 0


async def test_forked_child_keeps_what_the_parent_gives_back(world: World):
    """A child that was forked while a body was held sees it for ever, whatever comes into that segment."""
    (link,), (sees,) = star(world, 1)
    body = await pass_one(link, sees, pattern(MIB, 1))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os.read(read, 1)
        os._exit(0 if body == pattern(MIB, 1) else 1)

    del body
    await wait_given_back()
    assert (await pass_one(link, sees, pattern(MIB, 2))) == pattern(MIB, 2)
    assert segments() == 1  # it is the same one
    os.write(write, b"x")

    assert exit_code(child) == 0
    os.close(read)
    os.close(write)


def exit_code(child: int) -> int:
    """Wait for a forked child."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


SHUTDOWN = """
import ctypes, socket, sys, trio
from trimesh._transport.native.transport import NativeTransport
from trimesh.ids import ProcId

class Keep:
    def __init__(self): self.bodies = []
    def received(self, link, head, bodies):
        self.bodies.append((self, bodies))  # a cycle: only the collector ends it
        self.scope.cancel()
    def link_down(self, link, down): raise AssertionError(down)
    def link_stalled(self, link, seconds): raise AssertionError(seconds)

async def main():
    a, b = socket.socketpair()
    ends = [NativeTransport(ProcId(i + 1)) for i in range(2)]
    links = [end.open_link(sock, local=True, lease=False) for end, sock in zip(ends, (a, b))]
    async with trio.open_nursery() as nursery:
        keep.scope = nursery.cancel_scope
        nursery.start_soon(ends[0].run, Keep())
        nursery.start_soon(ends[1].run, keep)
        links[0].send(b"", [bytes(1 << 20)])
    if sys.argv[1] == "closed":
        for end in ends: end.close()
    return ends

keep = Keep()
ends = trio.run(main)
sys.modules["keeper"] = keep
libc = ctypes.CDLL(None)  # the native thread has a beat or two after the interpreter is gone
libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(int(sys.argv[2])), None)
"""


@pytest.mark.parametrize("how", ["closed", "open"])
def test_bodies_that_are_left_at_the_end_of_the_interpreter_are_no_noise(how: str):
    command = [sys.executable, "-c", SHUTDOWN, how, str(int(1.5e6 * limits.BEAT_SECONDS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


# ---- want of resources ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Let this process open no more files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def lowest_descriptors_taken() -> Iterator[None]:
    """Leave no gap between the descriptors of this process."""
    taken = [os.dup(0)]
    highest = max(map(int, os.listdir("/proc/self/fd")))
    while taken[-1] < highest:
        taken.append(os.dup(0))
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


async def test_body_goes_in_fragments_when_there_is_no_descriptor(world: World):
    (link,), (sees,) = star(world, 1)
    await pass_one(link, sees, b"up")

    with lowest_descriptors_taken(), no_descriptor_left():
        assert (await pass_one(link, sees, pattern(MIB))) == pattern(MIB)
        assert len(sees.downs) == 0


async def test_body_goes_in_fragments_when_the_system_gives_no_memory(world: World):
    """A limit on the size of files stands for a full memory: the memory of a segment is asked for before it is used."""
    (link,), (sees,) = star(world, 1)
    await pass_one(link, sees, b"up")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, before[1]))
    try:
        assert (await pass_one(link, sees, pattern(MIB))) == pattern(MIB)
        assert segments() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    for _ in range(100):  # refusals are not asked for again at every message
        await pass_one(link, sees, bytes(MIB))

    assert segments() >= 1


async def test_reader_without_a_free_descriptor_takes_a_segment_all_the_same(world: World):
    links, sees = star(world, 2)
    for link, recorder in zip(links, sees, strict=True):
        await pass_one(link, recorder, b"up")
    await pass_one(links[0], sees[0], pattern(MIB))
    await wait_given_back()

    with lowest_descriptors_taken(), no_descriptor_left():  # the second reader is still to be passed the segment
        body = await pass_one(links[1], sees[1], pattern(MIB, 2))
        assert body == pattern(MIB, 2)

    assert segments() == 1
    assert sees[1].downs == []


async def test_killed_reader_gives_its_segments_back(world: World):
    """The peer process holds a body and is killed: nothing waits for it."""
    links, sees = star(world, 2)
    held = await pass_one(links[0], sees[0], pattern(MIB))
    assert segments() == 1

    links[0].abort()  # what a sender does when the reader has died

    assert segments() == 0
    assert (await pass_one(links[1], sees[1], pattern(MIB, 2))) == pattern(MIB, 2)
    await sees[0].wait(lambda: sees[0].downs != [])
    assert [down.reason for _, down in sees[0].downs] == [DownReason.EOF]
    assert held == pattern(MIB)  # what the reader has mapped stays its own
