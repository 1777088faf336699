"""New tensors that are to be filled ask for huge pages, if they are tensors of this process at all."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402 - after the skip

from trimesh import limits  # noqa: E402
from trimesh._wire import memory  # noqa: E402
from trimesh.tensor.protocol.arguments import new_tensor  # noqa: E402

HUGE = 1 << 21


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(memory._native(), "advise", lambda start, nbytes, _: found.append((start, nbytes)))
    return found


def test_large_tensor_asks_for_the_huge_pages_that_lie_in_it(asked: list[tuple[int, int]]):
    count = limits.HUGE_PAGES_BYTES_MIN // 4

    made = new_tensor((2, count), torch.float32)
    assert new_tensor((count - 1,), torch.float32).is_contiguous()  # too small

    assert (made.size(), made.dtype, made.is_contiguous()) == ((2, count), torch.float32, True)
    [(start, nbytes)] = asked
    assert start % HUGE == nbytes % HUGE == 0
    assert made.data_ptr() <= start < made.data_ptr() + HUGE
    assert made.nbytes - 2 * HUGE < nbytes <= made.data_ptr() + made.nbytes - start


def test_tensor_without_memory_asks_for_none(asked: list[tuple[int, int]]):
    with FakeTensorMode():
        made = new_tensor((limits.HUGE_PAGES_BYTES_MIN,), torch.float64)

    assert made.size() == (limits.HUGE_PAGES_BYTES_MIN,)
    assert asked == []
