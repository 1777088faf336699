"""What is read of files, tables and queries, as tensors; what is refused, and in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")
pa = pytest.importorskip("pyarrow", reason="comes with the extra `data`")

from trimesh import data  # noqa: E402 - needs torch
from trimesh.data.reading import ReadingPlan, RowPiece, SourceReading  # noqa: E402 - needs torch

pytestmark = pytest.mark.torch


def column(source: data.DataSource, name: str, piece: RowPiece, **pads: tuple[int, float]) -> Any:
    """Return some rows of a column."""
    reading = SourceReading(source, ReadingPlan(None, 64, pads))
    [wanted] = [one for one in reading.summary.columns if one.name == name]
    found = reading.find(0, piece)
    rows = torch.empty(found.count, *wanted.shape, dtype=wanted.torch_dtype)
    found.fill(name, rows)
    return rows


def test_columns_have_the_types_and_shapes_of_their_rows(parquet_files):
    source = data.parquet(parquet_files, columns=["x", "even", "tokens"])

    assert column(source, "x", RowPiece(1, 2, 2), tokens=(3, -1)).tolist() == [[32.0] * 3, [33.0] * 3]
    assert column(source, "even", RowPiece(1, 0, 3), tokens=(3, -1)).tolist() == [True, False, True]
    assert column(source, "tokens", RowPiece(1, 3, 2), tokens=(3, -1)).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert column(source, "tokens", RowPiece(1, 0, 3), tokens=(3, -1)).tolist() == [[-1] * 3, [0, -1, -1], [0, 1, -1]]


@pytest.mark.parametrize("kind", ["file", "stream", "saved data set"])
def test_arrow_files_are_read_in_both_formats(tmp_path: Path, kind: str):
    table = pa.table({"i": pa.array(range(10), pa.int32())})
    file = tmp_path / "data-00000-of-00001.arrow"
    opened = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with opened(str(file), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    if kind == "saved data set":
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file.name}]}))

    source = data.arrow_files(tmp_path if kind == "saved data set" else file)

    assert SourceReading(source, ReadingPlan(None, 64, {})).summary.chunks == (4, 4, 2)
    assert column(source, "i", RowPiece(1, 1, 9)).tolist() == [5, 6, 7]


def test_a_selection_by_indices_is_refused(tmp_path: Path):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [], "_indices_data_files": [{"filename": "x"}]}))

    with pytest.raises(data.DataError, match="flatten_indices"):
        SourceReading(data.arrow_files(tmp_path), ReadingPlan(None, 64, {}))


def test_a_file_of_another_format_is_refused(tmp_path: Path):
    (tmp_path / "a.arrow").write_bytes(b"not arrow at all, but long enough to be looked at")

    with pytest.raises(data.DataError, match=r"reads Arrow IPC files and streams, got .*a\.arrow"):
        SourceReading(data.arrow_files(tmp_path / "a.arrow"), ReadingPlan(None, 64, {}))


def test_a_query_comes_in_windows_and_is_made_again_for_each_epoch(parquet_files):
    duckdb = pytest.importorskip("duckdb", reason="comes with the extra `test`")
    made = []

    def make() -> Any:
        made.append(1)
        connection = duckdb.connect()
        return connection.sql(f"select i + 1 as j from '{parquet_files}' order by i")

    reading = SourceReading(data.query(make), ReadingPlan(None, 64, {}))
    assert reading.summary.chunks is None
    assert reading.find(0, RowPiece(4, 0, 64)).count == 300 - 4 * 64
    assert reading.find(0, RowPiece(5, 0, 64)).count == 0
    assert reading.find(1, RowPiece(0, 0, 64)).count == 64
    assert len(made) == 3  # for the columns, for the first epoch, for the second


def test_tables_are_whatever_gives_rows_as_arrow():
    class Frame:
        """As a frame of Polars, or a relation of DuckDB, gives its rows."""

        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pa.table({"i": [1, 2, 3], "j": [4, 5, 6]}).__arrow_c_stream__(requested_schema)

    assert column(data.table(Frame(), columns=["j"]), "j", RowPiece(0, 0, 9)).tolist() == [4, 5, 6]
    assert column(data.table({"i": [1.5, 2.5]}), "i", RowPiece(0, 1, 1)).tolist() == [2.5]
    with pytest.raises(TypeError, match=r"the rows of data\.table must export Arrow"):
        data.table([1, 2])


REFUSED = {
    "texts": (pa.array(["a"]), "a column must hold numbers"),
    "times": (pa.array([0], pa.timestamp("s")), "cast it, or select other columns"),
    "wide unsigned": (pa.array([1], pa.uint64()), "a column must hold numbers"),
    "lists": (pa.array([[1, 2]], pa.list_(pa.int64())), r"write pad=\{'c': Pad\(length\)\}"),
    "missing": (pa.array([1, None]), "a column must have no missing values, got 1 in 'c'"),
    "missing inside": (pa.array([[1, None]], pa.list_(pa.int64(), 2)), "no missing values"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_has_no_tensor_is_refused_in_words(case: str):
    array, words = REFUSED[case]

    with pytest.raises(data.DataError, match=words):
        column(data.table({"c": array}), "c", RowPiece(0, 0, 1))


def test_columns_and_pads_that_are_not_there_are_refused(parquet_files):
    with pytest.raises(data.DataError, match=r"columns= must name columns of the source, .*, got 'y'"):
        SourceReading(data.parquet(parquet_files, columns=["y"]), ReadingPlan(None, 64, {}))
    with pytest.raises(data.DataError, match=r"pad= must name columns of the source, .*, got 'y'"):
        SourceReading(data.parquet(parquet_files, columns=["i"]), ReadingPlan(None, 64, {"y": (1, 0)}))
    with pytest.raises(data.DataError, match="pad= is only for lists of differing lengths"):
        SourceReading(data.parquet(parquet_files, columns=["i"]), ReadingPlan(None, 64, {"i": (1, 0)}))
    with pytest.raises(ValueError, match=re.escape("Pad needs length >= 1")):
        data.Pad(0)


def test_files_of_other_columns_and_no_files_are_refused(tmp_path: Path, parquet_files):
    from pyarrow import parquet

    parquet.write_table(pa.table({"z": [1]}), tmp_path / "9.parquet")
    with pytest.raises(data.DataError, match="all files of a source must have the same columns"):
        SourceReading(data.parquet(parquet_files), ReadingPlan(None, 64, {"tokens": (1, 0)}))
    with pytest.raises(FileNotFoundError, match="must match at least one file"):
        SourceReading(data.parquet(tmp_path / "none-*.parquet"), ReadingPlan(None, 64, {}))
