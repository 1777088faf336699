"""The table of planned faults: who can plan, who can be armed."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from trimesh import limits
from trimesh._native import lib
from trimesh._transport.native.fault_table import FaultTable, NotArmedError
from trimesh._transport.native.transport import NativeTransport
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId


@pytest.fixture
def transport() -> Iterator[NativeTransport]:
    made = NativeTransport(ProcId(1))
    yield made
    made.close()


@pytest.fixture
def table(transport: NativeTransport) -> Iterator[FaultTable]:
    made = FaultTable(transport)
    yield made
    made.close()


def test_transport_without_arms_takes_no_fault(transport: NativeTransport) -> None:
    library = transport.library
    fault = library.ffi.new("tm_fault *", {"source": 2, "target": 1, "kind": 1, "amount": 1.0})

    assert library.lib.tm_fault_add(transport.bus, fault, library.ffi.new("uint32_t *")) == lib.ERR_STATE
    assert library.lib.tm_fault_heal(transport.bus, 0) == lib.ERR_STATE


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 0},
        {"source": 0},
        {"kind": 0},
        {"kind": 10},
        {"amount": -1.0},
        {"amount": float("nan")},
        {"kind": 9},
        {"kind": 9, "source": 0, "nth": 0, "code": 28},
        {"kind": 9, "source": 0, "nth": 1, "code": 5},
    ],
)
def test_fault_that_means_nothing_is_refused(
    table: FaultTable, transport: NativeTransport, wrong: dict[str, int]
) -> None:
    library = transport.library
    fault = library.ffi.new("tm_fault *", {"source": 2, "target": 1, "kind": 1, "amount": 1.0} | wrong)

    assert library.lib.tm_fault_add(transport.bus, fault, library.ffi.new("uint32_t *")) == lib.ERR_ARGUMENT


def test_other_transport_is_armed_by_the_key_alone(table: FaultTable) -> None:
    other = NativeTransport(ProcId(2))
    try:
        with pytest.raises(NotArmedError, match="fault table of its own test"):
            msgspec.structs.replace(table.key, secret=table.key.secret ^ 1).arm(other)
        with pytest.raises(NotArmedError, match="fault table of its own test"):
            msgspec.structs.replace(table.key, fd=0).arm(other)
        with pytest.raises(NotArmedError, match="cannot open the fault table"):
            msgspec.structs.replace(table.key, fd=1_000_000).arm(other)
        table.key.arm(other)
        number = table.refuse("EMFILE", ProcId(2), nth=1, times=1)
        assert table.ago_of(number) is None
    finally:
        other.close()


def test_full_table_is_a_limit_and_healed_places_are_used_again(table: FaultTable) -> None:
    numbers = [table.disturb("delay", ProcId(2), ProcId(1), 1.0) for _ in range(limits.FAULT_RULES_MAX)]

    with pytest.raises(LimitExceeded, match="FAULT_RULES_MAX"):
        table.disturb("delay", ProcId(2), ProcId(1), 1.0)

    table.heal(numbers[7])
    assert table.disturb("hold", ProcId(2), ProcId(1)) == numbers[7]
