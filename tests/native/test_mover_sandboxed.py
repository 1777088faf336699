"""Carriers where the kernel lets no process look at another process's memory, wholly or in part."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.native.mover import ALL, CMA, SHM, TCP, Other, lib
from tests.native.movers import LOOPBACK
from tests.native.sandbox import why_not

pytestmark = [pytest.mark.real, pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")]

SIZE = 200_000
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
READV, WRITEV = "process_vm_readv", "process_vm_writev"

Start = Callable[..., Other]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes that are ended after the test."""
    started: list[Other] = []

    def start(address: bytes = b"") -> Other:
        started.append(Other(2000 + len(started), address=address))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.parametrize(
    ("refused", "error", "why"),
    [
        ([READV, WRITEV], errno.EPERM, "cma: this process may not read .*sandbox"),
        ([READV, WRITEV], errno.ENOSYS, "cma: the kernel or a sandbox has no process_vm_readv"),
        ([READV], errno.EPERM, "cma: this process may not read"),
        ([WRITEV], errno.EPERM, "cma: this process may not write"),
        ([READV], errno.EIO, "cma: process_vm_readv fails"),
    ],
)
def test_reader_that_is_refused_takes_the_next_carrier(start: Start, refused: list[str], error: int, why: str):
    owner, reader = start(LOOPBACK), start()
    reader.call("enter_sandbox", *refused, error=error)
    foreign = owner.call("grant", SIZE)
    block = owner.call("grant", SIZE, block=True)

    attachment = reader.call("attach", owner.call("home"))

    carriers, gone, reason = reader.call("info", attachment)
    assert (carriers & ALL, gone) == (SHM | TCP, 0)
    assert re.search(rf"(?:^|; ){why}[^;]*errno {error}\)", reason)
    assert reader.call("fetch", attachment, foreign) == [lib.TM_OK, True]
    assert reader.call("fetch", attachment, block) == [lib.TM_OK, True]
    assert reader.call("carrier_of", attachment, foreign) == TCP
    assert reader.call("carrier_of", attachment, block) == SHM
    assert reader.call("add", attachment, foreign, 1, 3) == 0


def test_owner_that_does_not_listen_cannot_be_reached_by_who_is_refused(start: Start):
    owner, reader, other = start(), start(), start()
    reader.call("enter_sandbox", READV, WRITEV)
    foreign = owner.call("grant", SIZE)

    attachment = reader.call("attach", owner.call("home"))

    assert reader.call("fetch", attachment, foreign) == [lib.TM_ERR_UNREACHABLE, False]
    assert other.call("fetch", other.call("attach", owner.call("home")), foreign) == [lib.TM_OK, True]


def test_owner_in_a_sandbox_is_read_by_who_is_not(start: Start):
    """The filter is about who calls."""
    owner, reader = start(), start()
    owner.call("enter_sandbox", READV, WRITEV)
    foreign = owner.call("grant", SIZE)

    attachment = reader.call("attach", owner.call("home"))

    assert reader.call("fetch", attachment, foreign) == [lib.TM_OK, True]
    assert reader.call("carrier_of", attachment, foreign) == CMA


def test_sandbox_that_comes_later_is_an_error_of_the_transfer(start: Start):
    owner, reader = start(), start()
    foreign, block = owner.call("grant", SIZE), owner.call("grant", SIZE, block=True)
    attachment = reader.call("attach", owner.call("home"))
    assert reader.call("fetch", attachment, foreign) == [lib.TM_OK, True]

    reader.call("enter_sandbox", READV, WRITEV)

    assert reader.call("fetch", attachment, foreign) == [lib.TM_ERR_ERRNO - errno.EPERM, False]
    assert reader.call("fetch", attachment, block) == [lib.TM_OK, True]
    assert owner.call("revoke", foreign) == lib.TM_OK


@pytest.mark.skipif(not YAMA.exists(), reason="this kernel has no yama")
def test_yama_lets_processes_that_are_no_children_of_ours_be_read(start: Start):
    """Scope 1: the owner names its tracers. 2: administrators may. 3: nobody may, and the next carrier does it."""
    scope = int(YAMA.read_text())
    owner, reader = start(LOOPBACK), start()
    foreign = owner.call("grant", SIZE)
    attachment = reader.call("attach", owner.call("home"))

    carriers, _, reason = reader.call("info", attachment)

    assert reader.call("fetch", attachment, foreign) == [lib.TM_OK, True]
    if scope <= 1:
        assert carriers & CMA
    elif not carriers & CMA:
        assert "ptrace_scope" in reason
    else:
        assert scope == 2
