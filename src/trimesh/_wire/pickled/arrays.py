"""Reducers of numpy arrays and memoryviews: their bytes travel beside the pickle and arrive writable (rule V1).

numpy's own reducer sends contiguous arrays out of band, but two views of one array as two copies. Here an array reports
its memory range, and the layout of the message (`_wire.memory`) keeps overlapping ranges in one piece. Only an arriving
array imports numpy.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from trimesh._wire.memory import EntryMemory, Sink, memory_at, register_reducer, view_of, writable

Array = Any
"""A `numpy.ndarray`. numpy is not a dependency, so type checkers do not know it."""

SPARSE = 2
"""A view that covers more than this many times its own bytes is sent compacted when nothing else shares its memory."""


def register() -> None:
    register_reducer("numpy.ndarray", reduce_array)  # subclasses pickle themselves
    register_reducer(memoryview, reduce_memoryview)
    for name in ("Table", "RecordBatch", "ChunkedArray", "Array"):
        register_reducer(f"pyarrow.lib.{name}", _reduce_rows, subclasses=name == "Array")


def _reduce_rows(rows: Any, _: Sink) -> Any:
    return reduce_rows(rows)


def strided_extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return the first byte a strided array touches, relative to its first element, and the end, in bytes."""
    low = sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True) if stride < 0)
    high = sum(stride * (size - 1) for size, stride in zip(shape, strides, strict=True) if stride > 0)
    return low, high + itemsize


def reduce_array(array: Array, sink: Sink) -> Any:
    """Reduce an array: its memory goes to the sink, its shape into the pickle."""
    dtype = array.dtype
    nbytes = array.nbytes
    if nbytes == 0 or dtype.hasobject:
        return NotImplemented
    # The short text describes numpy's own dtypes completely, at a tenth of the cost; records and others are pickled.
    kind = dtype.str if dtype.isbuiltin == 1 and dtype.kind != "V" else dtype
    flags = array.flags
    if flags.c_contiguous:
        low, high, strides = 0, nbytes, None
    else:
        strides = array.strides
        low, high = strided_extent(array.shape, strides, dtype.itemsize)
        if high - low < nbytes:  # elements share bytes (a broadcast, a sliding window): writable only as a copy
            array = array.copy()
            low, high, strides = 0, nbytes, None
    compact: Callable[[], memoryview] | None = None
    if high - low > SPARSE * nbytes:
        compact = partial(_copied_bytes, array)
    address = array.__array_interface__["data"][0] + low

    token = sink.memory(address, high - low, partial(memory_at, keep=array), compact=compact)
    return rebuild_array, (token, kind, array.shape, strides, -low, high - low)


def _copied_bytes(array: Array) -> memoryview:
    array = array.copy()  # in C order
    return memory_at(array.__array_interface__["data"][0], array.nbytes, array)


def rebuild_array(
    data: EntryMemory | memoryview,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    offset: int,
    span: int,
) -> Array:
    """Rebuild an array reduced by `reduce_array` over the memory that arrived."""
    view = view_of(data)
    if view.nbytes != span:  # it was sent compacted
        strides, offset = None, 0
    return importlib.import_module("numpy").ndarray(shape, dtype, writable(view), offset, strides)


def reduce_memoryview(view: memoryview[Any], sink: Sink) -> Any:
    """Reduce a memoryview: a copy arrives, read-only."""
    if view.format not in _CASTS:
        raise TypeError(
            f"a memoryview can be sent with a native format of one item, got format {view.format!r}; "
            "send the object that it views, or view.cast('B')"
        )
    plain = view if view.c_contiguous else view.tobytes()
    return rebuild_memoryview, (pickle.PickleBuffer(plain), view.format, view.shape)


_CASTS = frozenset("bBhHiIlLqQnNfd?c")  # formats of memoryview.cast except P: an address is invalid elsewhere


def rebuild_memoryview(data: EntryMemory | memoryview, fmt: Any, shape: tuple[int, ...]) -> Any:
    """Rebuild a memoryview reduced by `reduce_memoryview`."""
    view: Any = view_of(data).cast("B")
    if 0 in shape:
        return view.cast(fmt).toreadonly()  # memoryview cannot cast to a shape with a zero; only dimensions are lost
    return view.cast(fmt, shape).toreadonly()


# ---- arrow values ----------------------------------------------------------------------------------------------------

# Arrow tables, batches and arrays that use a small part of their memory: only that part is sent.
#
# A slice of an Arrow table is a view, and pyarrow pickles the whole buffers below it. Here a slice is sent as a stream
# of Arrow, which contains only its rows. A value that uses most of its memory is left to pyarrow, which copies nothing.
# pyarrow is imported only where a slice arrives.

_FIXED_BYTES: Final = 4_096
"""Allowance for padding of the buffers of a small value; the schema of a stream is as large."""


def reduce_rows(rows: Any) -> Any:
    """Reduce a view of Arrow rows; `NotImplemented` if pyarrow's own reducer is as good."""
    if rows.get_total_buffer_size() <= SPARSE * rows.nbytes + _FIXED_BYTES:
        return NotImplemented
    arrow = sys.modules["pyarrow"]
    kind, table = _as_table(arrow, rows)
    if any(_is_extended(arrow, field.type) for field in table.schema):
        return NotImplemented  # the receiver may not know the type by its name
    stream = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return rebuild_rows, (kind, pickle.PickleBuffer(stream.getvalue()))


def rebuild_rows(kind: str, data: EntryMemory | memoryview) -> Any:
    """Rebuild a value reduced by `reduce_rows`."""
    arrow = importlib.import_module("pyarrow")
    table = importlib.import_module("pyarrow.ipc").open_stream(arrow.py_buffer(view_of(data))).read_all()
    if kind == "table":
        return table
    if kind == "chunked":
        return table.column(0)
    batches: Sequence[Any] = table.to_batches()
    batch = batches[0] if batches else arrow.RecordBatch.from_pylist([], schema=table.schema)
    return batch if kind == "batch" else batch.column(0)


def _as_table(arrow: Any, rows: Any) -> tuple[str, Any]:
    if isinstance(rows, arrow.Table):
        return "table", rows
    if isinstance(rows, arrow.RecordBatch):
        return "batch", arrow.Table.from_batches([rows])
    kind = "chunked" if isinstance(rows, arrow.ChunkedArray) else "array"
    schema = arrow.schema([arrow.field("", rows.type)])
    return kind, arrow.Table.from_arrays([rows], schema=schema)


def _is_extended(arrow: Any, kind: Any) -> bool:
    """Return whether a type, or a type inside of it, is an extension type of a program."""
    if isinstance(kind, arrow.BaseExtensionType):
        return True
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(_is_extended(arrow, one) for one in inner)
