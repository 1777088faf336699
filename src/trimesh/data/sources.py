"""Where rows come from: files of Parquet and Arrow, tables in memory, queries. Sources are values; opening reads."""

from __future__ import annotations

import glob
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from trimesh.data.columns import ArrowBatch, ArrowSchema, ArrowTable, DataError, arrow

Paths = str | Path | Sequence[str | Path]


class OpenSource(ABC):
    """A source that can be read; every method may be called in any thread, by one at a time.

    Attributes:
        schema: Its columns.
        chunks: Rows of each of its chunks; None if that is known only at its end.
    """

    schema: ArrowSchema
    chunks: Sequence[int] | None

    @abstractmethod
    def read(self, chunks: Sequence[int]) -> ArrowTable:
        """Return some chunks, one after the other."""

    def batches(self) -> Iterator[ArrowBatch]:
        """Return all rows from the beginning, where `chunks` is None."""
        raise NotImplementedError


class DataSource(ABC):
    """Rows that a stream can give; a value, which travels to loaders."""

    @abstractmethod
    def open(self) -> OpenSource:
        """Look what there is. Blocking: file I/O.

        Raises:
            DataError: It is not what it is said to be.
            OSError: It cannot be read.
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
    """Chunks are record batches of mapped files: what is not read stays on disk, and no process has a copy of it."""

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
    """Return the files of data sets that Hugging Face's library has saved, in their order, and all others."""
    found: list[str] = []
    for path in paths:
        state = Path(path) / "state.json"
        if not state.is_file():
            found += found_files([path])
            continue
        said = json.loads(state.read_text())
        if said.get("_indices_data_files"):
            raise DataError(
                f"the data set in {path} is a selection by indices: write dataset.flatten_indices() before it is saved"
            )
        found += [str(Path(path) / one["filename"]) for one in said["_data_files"]]
    return found


@attrs.frozen(eq=False)
class _Table(DataSource):
    table: Any

    def open(self) -> OpenSource:
        return _OpenTable(self.table)


class _OpenTable(OpenSource):
    """Chunks are those of the table."""

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
    """Made anew for each epoch, and for each look at its columns."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.schema = self._open().schema
        self.chunks = None

    def read(self, chunks: Sequence[int]) -> ArrowTable:
        raise NotImplementedError("a query has no chunks")

    def batches(self) -> Iterator[ArrowBatch]:
        yield from self._open()

    def _open(self) -> Any:
        return _reader(self._make(), "what the function of data.query returns")


def parquet(paths: Paths, *, columns: Sequence[str] | None = None) -> DataSource:
    """Rows of Parquet files; a row group is read at a time.

    Args:
        paths: A file, a pattern of names (`"train/*.parquet"`, `"**"` for folders below), a folder, or several of them.
            Files that a pattern or a folder gives are in the order of their names.
        columns: Those to read; None: all.

    Needs the extra `data`. Nothing is read before a stream is opened. Relative paths are those of the process that
    reads: say absolute ones where loaders run elsewhere.
    """
    return _Parquet(_texts(paths), None if columns is None else tuple(columns))


def arrow_files(paths: Paths, *, columns: Sequence[str] | None = None) -> DataSource:
    """Rows of files in the formats of Arrow IPC (Feather, streams), or of data sets that `datasets` has saved.

    Files are mapped into memory, so that several loaders share what is read. A folder with a `state.json` is a data set
    as `dataset.save_to_disk(folder)` leaves it. Other arguments are those of `parquet`.
    """
    return _Arrow(_texts(paths), None if columns is None else tuple(columns))


def table(rows: Any, *, columns: Sequence[str] | None = None) -> DataSource:
    """Rows that are in memory: a table of pyarrow, a frame of Polars, a relation of DuckDB, a mapping of lists.

    Args:
        rows: Whatever gives its rows as Arrow (`__arrow_c_stream__`), all of which are taken at once, or a mapping of
            names to lists.
        columns: Those to take; None: all.

    Raises:
        TypeError: It is something else.
    """
    pa = arrow()
    found = pa.table(rows) if isinstance(rows, dict) else _reader(rows, "data.table takes").read_all()
    return _Table(found.select(selected(found.schema, None if columns is None else tuple(columns)).names))


def query(make: Callable[[], Any]) -> DataSource:
    """Rows that come as they are computed, and are never all in memory.

    Args:
        make: Called for each epoch; returns what gives Arrow once: `lambda: con.sql("select ...")`, a scan of a data
            set. Each time it must give the same rows in the same order: say `order by`. To mix them, a stream mixes
            those that follow each other (`mixed_rows=`). Going on in the middle reads what was there before again.
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
            raise DataError(f"columns= names columns of the source, got {name!r}: it has {schema.names}")
    return arrow().schema([schema.field(name) for name in columns])


def found_files(paths: Sequence[str]) -> list[str]:
    """Return the files that some paths name.

    Raises:
        FileNotFoundError: One names none.
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
            raise FileNotFoundError(f"paths of data name files, a folder or a pattern, got {path!r}: no file is there")
        found += files
    return found


def _same_schema(first: ArrowSchema | None, found: ArrowSchema, file: str) -> ArrowSchema:
    found = found.remove_metadata()
    if first is not None and not first.equals(found):
        raise DataError(f"files of one source have the same columns, got {found} in {file}, and {first} before")
    return found


def _reader(rows: Any, what: str) -> Any:
    if not hasattr(rows, "__arrow_c_stream__"):
        raise TypeError(f"{what} must be rows of Arrow (a table, a frame, a relation), got {type(rows).__qualname__}")
    return arrow().RecordBatchReader.from_stream(rows)


def _texts(paths: Paths) -> tuple[str, ...]:
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    if not given:
        raise ValueError("paths of data name at least one file, got none")
    return tuple(str(path) for path in given)
