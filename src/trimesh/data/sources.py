"""Data sources: Parquet and Arrow files, tables in memory, queries; and conversion of their columns to tensors.

Sources are values; opening one reads.
"""

from __future__ import annotations

import glob
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import torch
import torch.utils.dlpack

from trimesh.plain_numbers import whole_number

_DTYPES: Final = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""Types that Arrow and torch share, up to spelling; torch supports few operations on wider unsigned numbers."""

_SPELLED: Final = {"halffloat": "float16", "float": "float32", "double": "float64", "bool": "uint8"}


@attrs.frozen
class Pad:
    """Padding of lists of differing lengths to rows of one length: longer ones are cut, shorter ones filled up.

    Attributes:
        length: Elements of each row, at least 1.
        value: Fills a shorter list.

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
        name: Name of the column.
        dtype: Torch's name for the dtype of its tensors.
        shape: Shape of each row.
        pad: Length and value for lists of differing lengths, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pad: tuple[int, float] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def nbytes(self, rows: int) -> int:
        """Return the size of `rows` rows in bytes."""
        count = rows
        for size in self.shape:
            count *= size
        return count * self.torch_dtype.itemsize


def columns_of(schema: ArrowSchema, pads: Mapping[str, Pad]) -> list[Column]:
    """Return the columns of a source.

    Raises:
        DataError: A column's type has no tensor equivalent, or a pad names no column, or one that needs no padding.
    """
    for name in pads:
        if name not in schema.names:
            raise DataError(f"pad= must name columns of the source, {schema.names}, got {name!r}")
    return [_column(field.name, field.type, pads.get(field.name)) for field in schema]


def _column(name: str, kind: ArrowType, pad: Pad | None) -> Column:
    types = arrow("pyarrow.types")
    if types.is_list(kind) or types.is_large_list(kind):
        if pad is None:
            raise DataError(
                f"all rows of a column must have the same shape, got {name!r} of {kind}: write "
                f"pad={{{name!r}: Pad(length)}} to cut and fill up its lists"
            )
        return Column(name, _dtype(name, kind, kind.value_type), (pad.length,), (pad.length, pad.value))
    if pad is not None:
        raise DataError(f"pad= is only for lists of differing lengths, got {name!r} of {kind}: remove it from pad=")
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
            f"a column must hold numbers ({', '.join(_DTYPES)}, bool) or lists of them, got {name!r} of {whole}: cast "
            "it, or select other columns with columns=[...]"
        )
    return "bool" if str(inner) == "bool" else text


def tensors_of(table: ArrowTable, columns: Sequence[Column]) -> dict[str, torch.Tensor]:
    """Return the columns of a table as tensors; they share its memory where that is contiguous.

    Raises:
        DataError: A value is missing.
    """
    return {column.name: _tensor(table.column(column.name), column) for column in columns}


def _tensor(column: ArrowArray, wanted: Column) -> torch.Tensor:
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if getattr(array, "num_chunks", None) is not None:  # more rows than an array of 32-bit offsets can hold
        raise DataError(
            f"a window must fit into one Arrow array, got {len(column)} rows of column {wanted.name!r}, whose lists "
            "have too many elements in all: lower mixed_rows=, or store smaller row groups"
        )
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
            f"a column must have no missing values, got {array.null_count} in {name!r}: fill them when the data is "
            "written, or in the query"
        )


# ---- pyarrow, imported when a source is opened; it is untyped, so these types only document --------------------------

ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowBatch: TypeAlias = Any
ArrowArray: TypeAlias = Any
ArrowType: TypeAlias = Any


def arrow(module: str = "pyarrow") -> Any:
    """Return the module `pyarrow`, or one below it.

    Raises:
        ModuleNotFoundError: It is not installed; the message shows how to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "streams of data need pyarrow, which is not installed here: write `pip install 'trimesh-actors[data]'`",
            name="pyarrow",
        ) from error


# ---- errors ----------------------------------------------------------------------------------------------------------


class DataError(ValueError):
    """The data cannot become tensors, or the source differs from the one that a stream began with."""


# ---- sources: values that are sent to loaders, and opened where rows are read ----------------------------------------

Paths = str | Path | Sequence[str | Path]


class OpenSource(ABC):
    """An open source. Its methods may be called in any thread, one call at a time.

    Attributes:
        schema: Its columns.
        chunks: Number of rows of each chunk; None if known only at the end.
    """

    schema: ArrowSchema
    chunks: Sequence[int] | None

    @abstractmethod
    def read(self, chunks: Sequence[int]) -> ArrowTable:
        """Return some chunks, concatenated."""

    def batches(self) -> Iterator[ArrowBatch]:
        """Return all rows from the beginning. Only sources whose `chunks` is None implement it."""
        raise NotImplementedError


class DataSource(ABC):
    """Source of the rows of a stream; a value, which can be sent to loaders."""

    @abstractmethod
    def open(self) -> OpenSource:
        """Open the source and find its columns and chunks. Blocking: file I/O.

        Raises:
            DataError: The content does not match the source's description.
            OSError: The source cannot be read.
        """


@attrs.frozen
class _Parquet(DataSource):
    paths: tuple[str, ...]
    columns: tuple[str, ...] | None

    def open(self) -> OpenSource:
        return _OpenParquet(found_files(self.paths), self.columns)


class _OpenParquet(OpenSource):
    """Chunks are row groups. A file is open while its row groups are read."""

    def __init__(self, files: Sequence[str], columns: tuple[str, ...] | None) -> None:
        arrow()
        self._parquet = arrow("pyarrow.parquet")
        self._columns = None if columns is None else list(columns)
        self._groups: list[tuple[str, int]] = []
        chunks: list[int] = []
        schema: ArrowSchema | None = None
        for file in files:
            with self._parquet.ParquetFile(file) as opened:
                schema = _same_schema(schema, selected(opened.schema_arrow, columns), file)
                for group in range(opened.num_row_groups):
                    self._groups.append((file, group))
                    chunks.append(opened.metadata.row_group(group).num_rows)
        assert schema is not None, "found_files returns some"
        self.schema = schema
        self.chunks = chunks

    def read(self, chunks: Sequence[int]) -> ArrowTable:
        tables: list[ArrowTable] = []
        for number in chunks:
            file, group = self._groups[number]
            with self._parquet.ParquetFile(file) as opened:
                tables.append(opened.read_row_group(group, columns=self._columns, use_threads=False))
        return arrow().concat_tables(tables).select(self.schema.names)


@attrs.frozen
class _Arrow(DataSource):
    paths: tuple[str, ...]
    columns: tuple[str, ...] | None

    def open(self) -> OpenSource:
        return _OpenArrow(_arrow_files(self.paths), self.columns)


class _OpenArrow(OpenSource):
    """Chunks are record batches of mapped files: unread ones stay on disk, and no process copies them."""

    def __init__(self, files: Sequence[str], columns: tuple[str, ...] | None) -> None:
        pa = arrow()
        self._batches: list[ArrowBatch] = []
        schema: ArrowSchema | None = None
        for file in files:
            batches = _record_batches(pa, file)
            found = batches[0].schema if batches else _stream(pa, file).schema
            schema = _same_schema(schema, selected(found, columns), file)
            self._batches += batches
        assert schema is not None, "found_files returns some"
        self.schema = schema
        self.chunks = [batch.num_rows for batch in self._batches]

    def read(self, chunks: Sequence[int]) -> ArrowTable:
        found = arrow().Table.from_batches([self._batches[number] for number in chunks])
        return found.select(self.schema.names)


def _stream(pa: Any, file: str) -> Any:
    mapped = pa.memory_map(file)
    try:
        return pa.ipc.open_file(mapped)
    except pa.ArrowInvalid:
        mapped.seek(0)
    try:
        return pa.ipc.open_stream(mapped)
    except pa.ArrowInvalid as error:
        raise DataError(f"data.arrow_files reads Arrow IPC files and streams, got {file}: {error}") from error


def _record_batches(pa: Any, file: str) -> list[Any]:
    opened = _stream(pa, file)
    if hasattr(opened, "num_record_batches"):
        return [opened.get_batch(number) for number in range(opened.num_record_batches)]
    return list(opened)


def _arrow_files(paths: Sequence[str]) -> list[str]:
    """Return the files in order, with folders saved by Hugging Face `datasets` expanded."""
    found: list[str] = []
    for path in paths:
        state = Path(path) / "state.json"
        if not state.is_file():
            found += found_files([path])
            continue
        said = json.loads(state.read_text())
        if said.get("_indices_data_files"):
            raise DataError(
                f"a saved data set must not select rows by indices, got {path}: call dataset.flatten_indices() before "
                "save_to_disk"
            )
        found += [str(Path(path) / one["filename"]) for one in said["_data_files"]]
    return found


@attrs.frozen(eq=False)
class _Table(DataSource):
    table: Any

    def open(self) -> OpenSource:
        return _OpenTable(self.table)


class _OpenTable(OpenSource):
    """Chunks are the chunks of the table."""

    def __init__(self, table: ArrowTable) -> None:
        self._batches = table.to_batches()
        self.schema = table.schema
        self.chunks = [batch.num_rows for batch in self._batches]

    def read(self, chunks: Sequence[int]) -> ArrowTable:
        return arrow().Table.from_batches([self._batches[number] for number in chunks], self.schema)


@attrs.frozen(eq=False)
class _Query(DataSource):
    make: Callable[[], Any]

    def open(self) -> OpenSource:
        return _OpenQuery(self.make)


class _OpenQuery(OpenSource):
    """Makes the query again for each epoch, and once before that to find its columns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.schema = self._open().schema
        self.chunks = None

    def read(self, chunks: Sequence[int]) -> ArrowTable:
        raise NotImplementedError("a query has no chunks")

    def batches(self) -> Iterator[ArrowBatch]:
        yield from self._open()

    def _open(self) -> Any:
        return _reader(self._make(), "the result of the function of data.query")


def parquet(paths: Paths, *, columns: Sequence[str] | None = None) -> DataSource:
    """Return a source of the rows of Parquet files, read by row group.

    Args:
        paths: A file, a pattern of names (`"train/*.parquet"`, `"**"` for folders below), a folder, or several of them.
            Files of a pattern or folder are in the order of their names.
        columns: Names of the columns to read; None reads all.

    Needs the extra `data`. Nothing is read before a stream is opened. Relative paths are resolved in the process that
    reads: use absolute ones if loaders run elsewhere.
    """
    return _Parquet(_texts(paths), None if columns is None else tuple(columns))


def arrow_files(paths: Paths, *, columns: Sequence[str] | None = None) -> DataSource:
    """Return a source of the rows of Arrow IPC files (Feather, streams), or of data sets saved by `datasets`.

    Files are mapped into memory, so several loaders share their pages. A folder with a `state.json` is read as a data
    set that `dataset.save_to_disk(folder)` wrote. Arguments are those of `parquet`.
    """
    return _Arrow(_texts(paths), None if columns is None else tuple(columns))


def table(rows: Any, *, columns: Sequence[str] | None = None) -> DataSource:
    """Return a source of rows in memory: a pyarrow table, Polars frame, DuckDB relation, or mapping of lists.

    Args:
        rows: An object that exports Arrow (`__arrow_c_stream__`), which is read whole at this call, or a mapping of
            names to lists.
        columns: Names of the columns to take; None takes all.

    Raises:
        TypeError: `rows` is neither.
    """
    pa = arrow()
    found = pa.table(rows) if isinstance(rows, dict) else _reader(rows, "the rows of data.table").read_all()
    return _Table(found.select(selected(found.schema, None if columns is None else tuple(columns)).names))


def query(make: Callable[[], Any]) -> DataSource:
    """Return a source of rows that are computed as they are read, and are never all in memory.

    Args:
        make: Called for each epoch; returns an object that exports Arrow once: `lambda: con.sql("select ...")`, a scan
            of a data set. Each call must give the same rows in the same order: use `order by`. A stream shuffles only
            rows near each other (`mixed_rows=`). Resuming in the middle reads the earlier rows again.
    """
    return _Query(make)


def selected(schema: ArrowSchema, columns: tuple[str, ...] | None) -> ArrowSchema:
    """Return a schema with some of its columns.

    Raises:
        DataError: There is no such column.
    """
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise DataError(f"columns= must name columns of the source, {schema.names}, got {name!r}")
    return arrow().schema([schema.field(name) for name in columns])


def found_files(paths: Sequence[str]) -> list[str]:
    """Return the files that match paths.

    Raises:
        FileNotFoundError: A path matches no file.
    """
    found: list[str] = []
    for path in paths:
        if Path(path).is_dir():
            files = sorted(str(one) for one in Path(path).iterdir() if one.is_file() and one.name[0] not in "._")
        elif glob.has_magic(path):
            files = sorted(one for one in glob.glob(path, recursive=True) if Path(one).is_file())
        else:
            files = [path] if Path(path).is_file() else []
        if not files:
            raise FileNotFoundError(f"a path must match at least one file (or be a folder with some), got {path!r}")
        found += files
    return found


def _same_schema(first: ArrowSchema | None, found: ArrowSchema, file: str) -> ArrowSchema:
    found = found.remove_metadata()
    if first is not None and not first.equals(found):
        raise DataError(f"all files of a source must have the same columns, got {found} in {file}, {first} before it")
    return found


def _reader(rows: Any, what: str) -> Any:
    if not hasattr(rows, "__arrow_c_stream__"):
        raise TypeError(f"{what} must export Arrow (a table, a frame, a relation), got {type(rows).__qualname__}")
    return arrow().RecordBatchReader.from_stream(rows)


def _texts(paths: Paths) -> tuple[str, ...]:
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ValueError("a source needs at least one path, got none")
    return tuple(str(path) for path in given)
