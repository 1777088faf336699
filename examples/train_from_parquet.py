"""Train from Parquet files that DuckDB has written, read by processes of their own, one of which is killed.

Run it: python examples/train_from_parquet.py [--rows 20000] [--epochs 2] [--query] [--device cpu]

A table of points and their lengths is computed by SQL and written to Parquet. Two loaders read it beside two trainers,
mix its rows, and lend them to the trainers, who read them from there: no row passes through this script. A loader is
killed on the way; the sum of the numbers of all rows shows that each has come once an epoch. `--query` trains from the
running query itself, which this script reads: nothing is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import duckdb
import torch
import trio
from device_option import add_device_option, use_device
from torch import nn

import trimesh
from trimesh import Restart, data, this_host

POINTS = "select i, [cos(i), sin(i * 0.5), cos(i * 0.3)]::float[3] as point from range({rows}) as rows(i)"


def write_parquet(folder: Path, rows: int) -> str:
    """Write the table as files, and return a pattern of their names."""
    connection = duckdb.connect()
    for part in range(4):
        table = f"select * from ({POINTS.format(rows=rows)}) where i % 4 = {part}"
        connection.sql(f"copy ({table}) to '{folder / str(part)}.parquet' (row_group_size 2048)")
    return str(folder / "*.parquet")


def query(rows: int) -> Any:
    """Return the table as DuckDB computes it; a stream asks once an epoch."""
    return duckdb.connect().sql(POINTS.format(rows=rows) + " order by i")


async def main(options: argparse.Namespace) -> None:
    use_device(options.device)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        await train(Path(folder), options)


async def train(folder: Path, options: argparse.Namespace) -> None:
    """Train from a table in a folder."""
    restarts = Restart("one_for_one")
    async with (
        this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as trainers,
        this_host().spawn_procs({"loaders": 2}, preload=("torch",), supervision=restarts) as loaders,
    ):
        model = trimesh.module_to_mesh(nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1)), trainers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if options.query:
            source = data.query(lambda: query(options.rows))
        else:
            source = data.parquet(await trio.to_thread.run_sync(write_parquet, folder, options.rows))
        numbers = []
        async with data.open_stream(
            source,
            trainers,
            batch=512,
            along="dp",
            seed=0,
            mixed_rows=8192,
            pad={} if options.query else {"point": data.Pad(3)},  # Parquet knows no lists of one length
            epochs=options.epochs,
            loaders=None if options.query else loaders,
        ) as stream:
            async for batch in stream:
                points = batch["point"]
                loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                numbers.append(batch["i"].sum())
                if len(numbers) % 20 == 1:
                    print(f"step {len(numbers):4}  epoch {batch.epoch}  loss {loss.item():.6f}")
                if len(numbers) == 5 and not options.query:
                    await loaders.kill([{"loaders": 0}])
                    print("killed the first loader")
            statistics = stream.statistics()
        found = sum(total.item() for total in await trimesh.fetch(numbers))
        print(f"{statistics.rows} rows in {statistics.batches} batches, loss {loss.item():.6f}")
        print(f"{statistics.bytes / statistics.rows:.0f} bytes a row copied into memory that trainers read")
        expected = options.epochs * options.rows * (options.rows - 1) // 2
        print("each row came once an epoch" if found == expected else f"rows are missing: {found} of {expected}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--query", action="store_true", help="train from the running query")
    add_device_option(parser)
    trio.run(main, parser.parse_args())
