"""Collectives of every dtype of torch, whatever dtypes a back end has."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra")


import trimesh  # noqa: E402 - after the skip
from trimesh import this_host  # noqa: E402
from trimesh.tensor.groups.group import by_known_dtypes  # noqa: E402

pytestmark = pytest.mark.torch


DTYPES = (
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


def both(dtype: Any) -> Any:
    """Return what two ranks have: the largest unsigned numbers are negative ones with the same bits."""
    if dtype is torch.uint64:
        return torch.tensor([[1, 2**63], [2**64 - 1, 3]], dtype=dtype)
    is_whole = dtype is not torch.bool and not dtype.is_floating_point and not dtype.is_complex
    return torch.tensor([[0, torch.iinfo(dtype).max // 2 if is_whole else 3], [1, 2]]).to(dtype)


@pytest.mark.real
async def test_collectives_take_tensors_of_every_dtype() -> None:
    async with this_host().spawn_procs({"a": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        found: list[tuple[Any, Any, Any]] = []  # what it is, on rank 1, and should be there
        for dtype in DTYPES:
            given = both(dtype)
            columns = list(zip(*given.tolist(), strict=True))
            sums = [sum(one) % 2**64 for one in columns] if dtype is torch.uint64 else [sum(one) for one in columns]
            total = (
                torch.tensor(sums, dtype=dtype) if dtype is torch.uint64 else torch.tensor(sums).to(dtype)
            ).tolist()
            parts = trimesh.distribute(given, procs, ["a", None])
            mine = parts.local(["a", None])[0]
            moved = trimesh.redistribute(parts, [None, "a"]).local([None, "a"])
            found += [
                ((dtype, "to columns"), moved, given[:, 1:].tolist()),
                ((dtype, "stack"), mine.reduce("a", "stack"), given.tolist()),
                ((dtype, "exchange"), mine.reduce("a", "stack", scatter=True), given[:, 1].tolist()),
                ((dtype, "broadcast"), trimesh.tensor.broadcast(mine, "a", 0), given[0].tolist()),
                ((dtype, "sum"), mine.reduce("a"), total),
                ((dtype, "scattered sum"), mine.reduce("a", scatter=True), total[1]),
            ]
            if dtype.is_complex:
                with pytest.raises(TypeError, match="real numbers"):
                    mine.reduce("a", "product")
            else:
                found += [
                    ((dtype, name), mine.reduce("a", name), [function(one) for one in columns])
                    for name, function in (("max", max), ("min", min))
                ]
        values = await trimesh.fetch([made for _, made, _ in found])
        for (what, _, expected), value in zip(found, values, strict=True):
            assert value.item(a=1).tolist() == expected, what


class _Done:
    """What has been done when it is waited for."""

    def wait(self) -> None: ...


def test_tensors_of_other_dtypes_travel_as_bytes_and_share_their_memory() -> None:
    seen: list[Any] = []

    def gather(outputs: Any, given: Any) -> _Done:
        seen.append((outputs.dtype, outputs.shape, given.shape))
        outputs.copy_(torch.cat([given, given]))
        return _Done()

    for dtype, size in ((torch.uint16, 2), (torch.float8_e5m2, 1), (torch.complex128, 16)):
        result, given = torch.zeros(6).to(dtype), torch.tensor([1, 2, 0]).to(dtype)
        by_known_dtypes("_allgather_base", gather, result, given).wait()
        assert seen.pop() == (torch.uint8, (6, size), (3, size))
        assert result.tolist() == [*given.tolist(), *given.tolist()]
    result, given = torch.zeros(6), torch.ones(3)
    by_known_dtypes("_allgather_base", gather, result, given).wait()
    assert seen.pop() == (torch.float32, (6,), (3,))


def test_tensors_of_other_dtypes_are_reduced_as_wider_ones() -> None:
    def add_40_000(tensors: Any) -> _Done:
        assert [one.dtype for one in tensors] == [torch.int32, torch.float32]
        for one in tensors:
            one.add_(40_000)
        return _Done()

    whole, fraction = torch.tensor([1, 2], dtype=torch.int16), torch.zeros(1)
    assert by_known_dtypes("allreduce", lambda _: None, [whole]) is None
    by_known_dtypes("allreduce", add_40_000, [whole, fraction]).wait()
    assert whole.tolist() == [40_001 - 2**16, 40_002 - 2**16]
    assert fraction.item() == 40_000
