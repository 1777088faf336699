"""Training data: rows of Parquet, Arrow, Polars or DuckDB as batches on a mesh. Import `trimesh.data` explicitly.

`async with data.open_stream(data.parquet("train/*.parquet"), procs, batch=256, along="dp") as stream:` yields batches
whose columns are global tensors. It needs the extras `data` and `torch`.
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "streams of data need torch, which is not installed here: write `pip install 'trimesh-actors[data]'`",
        name="torch",
    ) from error

from trimesh.data.sources import DataError, DataSource, Pad, arrow_files, parquet, query, table
from trimesh.data.stream import DataStream, DataStreamStatistics, RowBatch, open_stream

__all__ = [
    "DataError",
    "DataSource",
    "DataStream",
    "DataStreamStatistics",
    "Pad",
    "RowBatch",
    "arrow_files",
    "open_stream",
    "parquet",
    "query",
    "table",
]
