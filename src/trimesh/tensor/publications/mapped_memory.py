"""Tensors over memory that is only to be read, which torch has none of: they must not be written to. Copies from there.

torch copies with as many threads as it computes with. Where several processes of a host read at once, as the ranks of a
mesh do, those fight for the same cores: a copy then takes three times the processor time of one thread (measured: four
readers on two cores). So what only has to be copied is by `RowCopy`, in the thread that asks, and past the caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from trimesh import limits
from trimesh._native.lib import load
from trimesh._wire.memory.regions import memory_at
from trimesh.rdma.memory.local import address_of


def flat_over(view: memoryview, dtype: torch.dtype, offset: int, count: int) -> torch.Tensor:
    """Return some elements that lie in a view; they are only to be read, and not after the view was released.

    Args:
        view: Of bytes.
        dtype: Of the elements.
        offset: In bytes.
        count: Of elements, at least one.
    """
    assert offset + count * dtype.itemsize <= view.nbytes, "elements lie within their view"
    return torch.frombuffer(memory_at(address_of(view) + offset, count * dtype.itemsize, None), dtype=dtype)


@attrs.frozen
class RowCopy:
    """Rows of equal length that are copied from one tensor into another: one call of the native library.

    Attributes:
        into, source: Where the first row begins.
        row_bytes: Of each.
        rows: How many.
        into_step, source_step: Bytes from the beginning of a row to that of the next.
    """

    into: int
    source: int
    row_bytes: int
    rows: int
    into_step: int
    source_step: int

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.row_bytes * self.rows

    def cut(self, nbytes: int) -> list[RowCopy]:
        """Return it as pieces of at most so many bytes, or of one row."""
        rows = max(1, nbytes // self.row_bytes)
        return [
            attrs.evolve(
                self,
                into=self.into + begin * self.into_step,
                source=self.source + begin * self.source_step,
                rows=min(rows, self.rows - begin),
            )
            for begin in range(0, self.rows, rows)
        ]

    def run(self, *, is_huge: bool) -> None:
        """Copy, without the GIL.

        Args:
            is_huge: Whether the caches do not hold all that is copied, of which this may be a part.
        """
        library = load()
        ffi = library.ffi
        into, source = ffi.cast("uint8_t *", self.into), ffi.cast("uint8_t *", self.source)
        library.lib.tm_copy_rows(
            into, self.into_step, source, self.source_step, self.row_bytes, self.rows, int(is_huge)
        )


def rows_of(target: torch.Tensor, source: torch.Tensor) -> RowCopy | None:
    """Return how to copy a tensor into another one as rows; None if they do not lie so, or values would change.

    Args:
        target: Of the same size.
        source: As `flat_over` has given it, perhaps with strides.
    """
    if type(target) is not torch.Tensor or target.dtype != source.dtype or target.device.type != "cpu":
        return None
    if target.layout is not torch.strided or target.is_conj() or target.is_neg() or not target.numel():
        return None
    dims = _merged(target.shape, target.stride(), source.stride())
    width = target.element_size()
    length = 1
    if dims and dims[-1][1:] == (1, 1):
        length = dims.pop()[0]
    if len(dims) > 1 or length * width < limits.RESHARD_ROW_BYTES_MIN:
        return None
    rows, into_step, source_step = dims[0] if dims else (1, length, length)
    if into_step < length:
        return None  # an expanded tensor, which torch refuses
    address = target.data_ptr()
    return RowCopy(address, source.data_ptr(), length * width, rows, into_step * width, source_step * width)


def _merged(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return length and strides of the dimensions of two tensors, those that lie as one as one."""
    found: list[tuple[int, int, int]] = []
    for length, a, b in zip(size, one, other, strict=True):
        if length == 1:
            continue
        if found and found[-1][1:] == (length * a, length * b):
            found[-1] = (found[-1][0] * length, a, b)
        else:
            found.append((length, a, b))
    return found
