"""Columns of Arrow as tensors: which types have one, and what the rows of a window look like."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import torch
import torch.utils.dlpack

from trimesh.plain_numbers import whole_number

_DTYPES: Final = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Names that Arrow and torch share, up to spelling; torch computes little with wider unsigned numbers."""

_SPELLED: Final = {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "uint8"}


@attrs.frozen
class Pad:
    """Lists of differing lengths become rows of one length: longer ones are cut, shorter ones filled up.

    Attributes:
        length: Elements of each row, at least 1.
        value: What stands behind the end of a shorter list.

    Raises:
        ValueError: `length` is below 1.
    """

    length: int
    value: float = 0

    def __attrs_post_init__(self) -> None:
        found = whole_number(self.length)
        if found is None or found < 1:
            raise ValueError(f"Pad needs length >= 1, the elements of each row, got {self.length!r}")


class Column(msgspec.Struct, frozen=True):
    """A column of a stream.

    Attributes:
        name: Of it.
        dtype: Of its tensors, by the name that torch has for it.
        shape: Of each row.
        pad: Length and value of lists of differing lengths, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pad: tuple[int, float] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type, as torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def nbytes(self, rows: int) -> int:
        """Return how many bytes some of its rows have."""
        count = rows
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


def columns_of(schema: ArrowSchema, pads: Mapping[str, Pad]) -> list[Column]:
    """Return the columns of a source.

    Raises:
        DataError: A column has a type of which there are no tensors, or a pad names none, or one that needs none.
    """
    for name in pads:
        if name not in schema.names:
            raise DataError(f"pad= names columns of the source, got {name!r}: it has {schema.names}")
    return [_column(field.name, field.type, pads.get(field.name)) for field in schema]


def _column(name: str, kind: ArrowType, pad: Pad | None) -> Column:
    types = arrow("pyarrow.types")
    if types.is_list(kind) or types.is_large_list(kind):
        if pad is None:
            raise DataError(
                f"each row of a column needs the same shape, got {name!r} of {kind}: say "
                f"pad={{{name!r}: Pad(length)}} how long its lists become"
            )
        return Column(name, _dtype(name, kind, kind.value_type), (pad.length,), (pad.length, pad.value))
    if pad is not None:
        raise DataError(f"pad= is for lists of differing lengths, got {name!r} of {kind}: leave it out")
    shape: list[int] = []
    inner = kind
    while types.is_fixed_size_list(inner):
        shape.append(inner.list_size)
        inner = inner.value_type
    return Column(name, _dtype(name, kind, inner), tuple(shape))


def _dtype(name: str, whole: ArrowType, inner: ArrowType) -> str:
    text = _SPELLED.get(str(inner), str(inner))
    if text not in _DTYPES:
        raise DataError(
            f"columns hold numbers that torch computes with ({', '.join(_DTYPES)}, bool) or lists of them, got "
            f"{name!r} of {whole}: cast it, or leave it out by columns=[...]"
        )
    return "bool" if str(inner) == "bool" else text


def tensors_of(table: ArrowTable, columns: Sequence[Column]) -> dict[str, torch.Tensor]:
    """Return the rows of a table by column; they share its memory where that lies in one piece.

    Raises:
        DataError: A value is missing.
    """
    return {column.name: _tensor(table.column(column.name), column) for column in columns}


def _tensor(column: ArrowArray, wanted: Column) -> torch.Tensor:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if getattr(array, "num_chunks", None) is not None:  # more than an array of 32-bit offsets can have
        raise DataError(f"a window of column {wanted.name!r} is too large for one array: say fewer mixed_rows=")
    if wanted.pad is not None:
        return _padded(array, wanted)
    flat: Any = array
    for _ in wanted.shape:
        _check_nulls(flat, wanted.name)
        flat = flat.flatten()
    return _flat(flat, wanted).view(len(array), *wanted.shape)


def _flat(array: ArrowArray, wanted: Column) -> torch.Tensor:
    _check_nulls(array, wanted.name)
    if wanted.dtype == "bool":  # bits there, bytes here
        return _numbers(array.cast("uint8")).view(torch.bool)
    return _numbers(array)


def _numbers(array: ArrowArray) -> torch.Tensor:
    if not len(array):
        return torch.empty(0, dtype=getattr(torch, _SPELLED.get(str(array.type), str(array.type))))
    return torch.utils.dlpack.from_dlpack(array)


def _padded(array: ArrowArray, wanted: Column) -> torch.Tensor:
    assert wanted.pad is not None
    length, value = wanted.pad
    _check_nulls(array, wanted.name)
    offsets = _numbers(array.offsets).to(torch.int64)
    values = _flat(array.values, wanted)
    starts, sizes = offsets[:-1], offsets[1:] - offsets[:-1]
    if bool((sizes == length).all()):
        return values[int(offsets[0]) : int(offsets[-1])].view(len(array), length)
    place = torch.arange(length)
    there = place < sizes[:, None]
    found = torch.full((len(array), length), value, dtype=wanted.torch_dtype)
    found[there] = values[(starts[:, None] + place)[there]]
    return found


def _check_nulls(array: ArrowArray, name: str) -> None:
    if array.null_count:
        raise DataError(
            f"tensors have no missing values, got {array.null_count} of them in column {name!r}: fill them where the "
            "data are written, or in the query"
        )


# ---- pyarrow, imported when rows are read; it has no types of its own, so these are names for people -----------------

ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowBatch: TypeAlias = Any
ArrowArray: TypeAlias = Any
ArrowType: TypeAlias = Any


def arrow(module: str = "pyarrow") -> Any:
    """Return the module `pyarrow`, or one below it.

    Raises:
        ModuleNotFoundError: It is not installed; the text says how.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "streams of data need pyarrow, which is not installed here: write `pip install 'trimesh-actors[data]'`",
            name="pyarrow",
        ) from error


# ---- `DataError`: data that cannot be what a stream gives ------------------------------------------------------------


class DataError(ValueError):
    """A source has something of which there are no tensors, or is not the one that a stream has begun with."""
