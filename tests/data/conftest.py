"""Files of rows, and torch's threads before any test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.tensor.conftest import _torch_threads  # noqa: F401 - a fixture

ROWS = 300
"""Rows of the files of `parquet_files`, in row groups of 30, 30, 30 and 10."""


@pytest.fixture(scope="session", autouse=True)
def _arrow_threads(tmp_path_factory: pytest.TempPathFactory):
    """Let Arrow start its own threads before any test."""
    if importlib.util.find_spec("pyarrow") is None:
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    file = str(tmp_path_factory.mktemp("arrow") / "one.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"i": [1]}), file)
    with pyarrow.parquet.ParquetFile(file, pre_buffer=True) as opened:
        opened.read_row_group(0)


@pytest.fixture
def parquet_files(tmp_path: Path) -> str:
    """Return a pattern of three files: numbers, vectors, lists of 0 to 4, truths."""
    pa = pytest.importorskip("pyarrow", reason="comes with the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet", reason="comes with the extra `data`")
    for number in range(3):
        first = 100 * number
        table = pa.table(
            {
                "i": pa.array(range(first, first + 100)),
                "x": pa.array([[float(row)] * 3 for row in range(first, first + 100)], pa.list_(pa.float32(), 3)),
                "tokens": pa.array([list(range(row % 5)) for row in range(first, first + 100)], pa.list_(pa.int32())),
                "even": pa.array([row % 2 == 0 for row in range(first, first + 100)]),
                "name": pa.array([str(row) for row in range(first, first + 100)]),
            }
        )
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=30)
    return str(tmp_path / "*.parquet")
