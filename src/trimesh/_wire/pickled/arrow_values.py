"""Arrow tables, batches and arrays that show a small part of their memory: that part is sent, and not all of it.

A slice of an Arrow table is a view, and pyarrow pickles the buffers below it whole. Such a one goes as a stream of
Arrow, which has its rows alone. What shows most of its memory is left to pyarrow, which copies nothing. pyarrow is
imported only where a slice arrives.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from typing import Any, Final

from trimesh._wire.memory.regions import EntryMemory, view_of
from trimesh._wire.pickled.arrays import SPARSE

_FIXED_BYTES: Final = 4_096
"""Of the buffers of a small value, which may be padded; what a stream says of its columns is as large."""


def reduce_rows(rows: Any) -> Any:
    """Reduce what shows rows of Arrow; `NotImplemented` where pyarrow does it as well."""
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
    """Make what `reduce_rows` described."""
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
    """Return whether a type, or one inside of it, is one that a program has added."""
    if isinstance(kind, arrow.BaseExtensionType):
        return True
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return any(_is_extended(arrow, one) for one in inner)
