"""Buffers and publications between hosts that have RDMA adapters: `make test-verbs` runs these, with one in software.

Elsewhere they are skipped. Every process counts as a host of its own, as in `test_carriers`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conformance import test_buffer_ends as ends
from tests.conformance import test_buffers as buffers
from tests.conformance.publishing import Publisher, is_torn
from tests.conformance.vault import LARGE
from tests.native.mover import Mover
from tests.rdma import test_carriers as carriers

from trimesh import Actor, endpoint

SIZE = 3 << 20
"""Of a published tensor: a large transfer."""

PACKET_BYTES_MAX = 4096
"""What an adapter sends at a time."""


def why_not() -> str:
    """Return why there is no adapter that can be used; "" when there is."""
    if not Path("/sys/class/infiniband").is_dir():
        return "this machine has no RDMA adapter"
    mover = Mover(1)
    usable, about = mover.adapters()
    mover.close()
    return "" if usable else about


pytestmark = [pytest.mark.real, pytest.mark.timeout(240), pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture(autouse=True)
def adapters_and_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave nothing else; atomic operations go by tcp."""
    monkeypatch.setenv("TRIMESH_RDMA", "tcp,ucx")


TESTS: list[carriers.Test] = [
    partial(buffers.test_buffer_is_read_and_written, size=LARGE),
    buffers.test_forged_handles_are_refused,
    partial(ends.test_revoked_buffer_gives_no_bytes, size=LARGE),
    partial(ends.test_killed_owner_is_a_death, size=LARGE),
    ends.test_cancelled_read_ends_at_once,
]
"""A minute where the machine is emulated. All of `test_carriers` would be four; and where this process itself has lost
a peer, UCX keeps some of its descriptors (`ucx/client.zig`), which the zombie guard finds."""


@pytest.mark.parametrize("test", TESTS, ids=carriers.name_of)
async def test_between_hosts_with_adapters(test: carriers.Test) -> None:
    """N4, API 7."""
    before, backend = packets(), carriers.ManyHosts()
    async with backend.open():
        await test(backend)
        await backend.check_clean()
    assert packets() > before


class Reader(Actor):
    """Reads what others publish."""

    @endpoint
    async def read(self, published: Any) -> tuple[int, str, int]:
        """Return the version, negated if it is torn, what carries it, and how many packets came meanwhile."""
        async with published.pin() as snapshot:
            before = packets()
            tensors = await snapshot.read()
            came = packets() - before
            version = -snapshot.version if is_torn(tensors, snapshot.version) else snapshot.version
            return version, snapshot.buffer("a").backend, came


def packets() -> int:
    """Return how many packets the adapters of this machine have received."""
    counters = Path("/sys/class/infiniband").glob("*/ports/*/hw_counters/rcvd_pkts")
    return sum(int(counter.read_text()) for counter in counters)


async def test_published_tensors_are_read_by_the_adapter() -> None:
    """API 7: versions lie in memory that readers come to know by the board, not by a handle that is sent."""
    backend = carriers.ManyHosts()
    async with backend.open(), backend.procs({"gpus": 2}) as procs:
        publisher = await procs.slice(gpus=0).spawn("publisher", Publisher, 2, SIZE)
        reader = await procs.slice(gpus=1).spawn("reader", Reader)
        weights = await publisher.handle.call_one()
        for first, last in (1, 2), (3, 5):
            await publisher.publish.call_one(first, last)
            version, carried_by, came = await reader.read.call_one(weights)
            assert (version, carried_by) == (last, "ibverbs")
            assert came >= SIZE // PACKET_BYTES_MAX
