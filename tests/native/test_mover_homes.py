"""Attachments of homes that are not what they say, of processes of others, and of forked children."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.native.mover import ADD, ALL, CMA, READ, SHM, TCP, Mover, Other, ffi, lib, pattern
from tests.native.movers import HOST_ROADS, open_pair
from tests.native.test_fork import in_child

pytestmark = pytest.mark.real

EPOCH, HOST_ID, STARTED, PID, LEDGER, PORT = range(6)


def changed(home: list[Any], index: int, value: Any) -> list[Any]:
    """Return a home that says something else."""
    copy = list(home)
    copy[index] = value
    return copy


def test_home_that_is_not_what_it_says_is_not_attached_to():
    owner = Other(7)
    reader = Mover(8)
    home = owner.call("home")
    read_end, write_end = os.pipe()
    cases: list[tuple[int, Any, int, str]] = [
        (HOST_ID, 5, 0, "on another host"),
        (EPOCH, 9, 0, "its ledger is not what it should be"),
        (STARTED, home[STARTED] + 1, 1, "the process has ended"),
        (STARTED, 0, 1, "the process has ended"),
        (PID, os.getpid(), 1, "the process has ended"),
        (PID, 0, 0, "no pid that can be"),
        (PID, (1 << 32) - 1, 0, "no pid that can be"),
        (PID, (1 << 22) - 1, 1, "the process has ended"),
        (LEDGER, 0, 0, "ledger"),
        (LEDGER, 999, 0, "the process has closed its ledger"),
        (LEDGER, (1 << 32) - 1, 0, "the process has closed its ledger"),
    ]
    for index, value, gone, why in cases:
        attachment = reader.attach(changed(home, index, value))
        carriers, is_gone, why_not = reader.info(attachment)
        assert (carriers, is_gone) == (0, gone), (index, value)
        assert why in why_not, (index, value, why_not)
        grant = {"place": 0, "generation": 1, "secret": "00" * 16}
        done = reader.move(attachment, READ, grant, bytearray(8))
        assert done.status == (lib.TM_ERR_GONE if gone else lib.TM_ERR_UNREACHABLE)
        assert reader.view(attachment, grant)[0] == done.status
        reader.detach(attachment)
    os.close(read_end)
    os.close(write_end)
    reader.close()
    owner.close()


def test_any_home_can_be_attached_to():
    """Whatever a handle says that came from elsewhere."""
    reader = Mover(8)
    numbers = random.Random(1)
    fds = [os.open("/dev/zero", os.O_RDWR), os.memfd_create("test"), *os.pipe(), os.eventfd(0)]
    for _ in range(300):
        pid = numbers.choice([os.getpid(), 1, 2, os.getppid(), numbers.getrandbits(32)])
        started = reader.home()[STARTED] if pid == os.getpid() else numbers.getrandbits(64)
        ledger = numbers.choice([*fds, *range(20), numbers.getrandbits(32)])
        home = [numbers.getrandbits(64) | 1, 77, started, pid, ledger, 0, 0, "00" * 16]
        attachment = reader.attach(home)
        assert reader.info(attachment)[0] & (SHM | CMA) == 0
        reader.detach(attachment)
    for fd in fds:
        os.close(fd)
    reader.close()


def test_process_that_ended_before_the_attaching_is_gone():
    owner = Other(7)
    home = owner.call("home")
    owner.close()
    reader = Mover(8)

    carriers, gone, why_not = reader.info(reader.attach(home))

    assert (carriers, gone) == (0, 1)
    assert "the process has ended" in why_not
    reader.close()


def test_carriers_that_a_mover_may_not_use_are_not_used():
    owner = Other(7)
    home = owner.call("home")
    for allowed, words in ((SHM, ["cma: not allowed here"]), (CMA, ["shm: not allowed here"]), (0, ["not allowed"])):
        reader = Mover(8, allowed)
        carriers, gone, why_not = reader.info(reader.attach(home))
        assert (carriers, gone) == (allowed, 0)
        assert all(word in why_not for word in words)
        own = reader.info(reader.attach(reader.home()))
        assert own == (0, 0, "local: not allowed here; tcp: not allowed here")
        reader.close()
    owner.close()


def as_nobody(work: Callable[[], None]) -> int:
    """Run `work` in a child that is another user."""

    def main() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        work()

    return in_child(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_process_of_another_user_is_not_reached():
    owner = Mover(7)
    grant = owner.grant(64, block=True)

    def work() -> None:
        reader = Mover(8)
        attachment = reader.attach(owner_home)
        carriers, gone, why_not = reader.info(attachment)
        assert carriers & ~TCP == gone == 0
        assert "the process belongs to another user" in why_not
        done = reader.move(attachment, READ, grant, bytearray(8), carriers=SHM | CMA)
        assert done.status == lib.TM_ERR_UNREACHABLE
        reader.close()

    owner_home = owner.home()
    assert as_nobody(work) == 0
    owner.close()


def test_process_without_descriptors_says_so():
    owner = Other(7)
    home = owner.call("home")
    reader = Mover(8)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_free = os.dup(0)
    os.close(next_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, before[1]))
    try:
        attachment = reader.attach(home)
        status = lib.tm_block_take(reader.handle, 64, ffi.new("tm_block *"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)

    assert status == lib.TM_ERR_ERRNO - errno.EMFILE
    carriers, gone, why_not = reader.info(attachment)
    assert (carriers & (SHM | CMA), gone) == (0, 0)
    assert "(errno 24)" in why_not
    assert reader.info(reader.attach(home))[0] & SHM
    reader.close()
    owner.close()


# ---- forked children -------------------------------------------------------------------------------------------------


def test_forked_child_has_a_dead_mover_and_no_descriptor_of_it():
    gc.collect()  # memory and descriptors that earlier tests have dropped
    before = set(os.listdir("/proc/self/fd"))
    pair = open_pair(HOST_ROADS[0])
    reader, attachment = pair.reader, pair.attachment
    grant, own = pair.grant(64), reader.grant(64)
    assert reader.move(attachment, READ, grant, bytearray(8)).status == lib.TM_OK
    assert reader.move(attachment, READ, pair.grant(1 << 20), bytearray(1 << 20)).status == lib.TM_OK  # T2 runs
    pipes = {str(pipe.fileno()) for pipe in (pair.other().process.stdin, pair.other().process.stdout) if pipe}

    def work() -> None:
        check_descriptors(before | pipes)
        maps = Path("/proc/self/maps").read_text()
        assert "trimesh-ledger" not in maps
        assert "trimesh-block" not in maps
        forked = lib.TM_ERR_FORKED
        assert reader.begin(attachment, READ, grant, bytearray(8))[0] == forked
        assert reader.revoke(own) == reader.drop(own) == reader.give_back(1) == forked
        assert reader.detach(attachment) == reader.give_up(1) == reader.close_view(1) == forked
        assert reader.view(attachment, grant)[0] == forked
        out = ffi.new("tm_home *")
        assert lib.tm_mover_home(reader.handle, out) == lib.tm_mover_bell(reader.handle) == forked
        assert lib.tm_mover_destroy(reader.handle) == forked
        another = Mover(55)
        assert another.info(another.attach(another.home()))[0] & ALL
        another.close()

    assert in_child(work) == 0
    assert reader.move(attachment, READ, grant, bytearray(8)).status == lib.TM_OK
    pair.close()


def test_child_forked_by_another_thread_has_no_descriptor_of_a_mover():
    """Whatever the mover is doing at that moment."""
    owner = Other(7)
    home = owner.call("home")
    grant = owner.call("grant", 1 << 20, block=True)
    before = set(os.listdir("/proc/self/fd"))
    mover = Mover(8)
    statuses: list[int] = []

    def fork_often() -> None:
        statuses.extend(in_child(lambda: check_descriptors(before)) for _ in range(20))

    thread = threading.Thread(target=fork_often)
    thread.start()
    local = bytearray(1 << 20)
    while thread.is_alive():
        attachment = mover.attach(home)
        number, _, _ = mover.take_block(1 << 16)
        assert mover.move(attachment, READ, grant, local).status == lib.TM_OK
        mover.give_back(number)
        own = mover.grant(64)
        mover.revoke(own)
        mover.drop(own)
        mover.detach(attachment)
    thread.join()
    mover.close()
    owner.close()
    assert statuses == [0] * 20


def check_descriptors(expected: set[str]) -> None:
    """Fail unless this process has no others than these; one is that of the look itself.

    Movers have no pipes. libuv, where a test before has run it, makes one anew in a forked child, of numbers that are
    free.
    """
    names = {}
    for number in set(os.listdir("/proc/self/fd")) - expected:
        with contextlib.suppress(FileNotFoundError):
            names[number] = os.readlink(f"/proc/self/fd/{number}")
    left = {number: target for number, target in names.items() if not target.startswith("pipe:")}
    assert not left, left


def test_block_is_shared_with_a_forked_child_and_not_used_again():
    gc.collect()  # blocks that earlier tests have dropped
    mover = Mover(5)
    grant = mover.grant(4096, block=True, seed=1)
    number = mover.number_of(grant)

    def work() -> None:
        assert mover.peek(grant["address"], 4096) == pattern(4096, 1).hex()
        mover.poke(grant["address"], b"child".hex())

    assert in_child(work) == 0
    assert bytes.fromhex(mover.peek(grant["address"], 5)) == b"child"
    assert mover.revoke(grant) == mover.drop(grant) == mover.give_back(number) == lib.TM_OK
    inode = Path("/proc/self/maps").read_text()
    assert "trimesh-block" not in inode
    mover.close()


def test_fork_while_transfers_run_leaves_no_lock_behind():
    pair = open_pair(HOST_ROADS[0])
    grant = pair.grant(8 << 20)
    local = bytearray(8 << 20)
    for _ in range(30):
        _, done = pair.reader.begin(pair.attachment, READ, grant, local)
        assert in_child(lambda: None) == 0
        assert pair.reader.wait(done.id).status == lib.TM_OK
        assert pair.reader.move(pair.attachment, ADD, grant, None).status == lib.TM_OK
    pair.close()
