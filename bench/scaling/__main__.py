"""See `bench.scaling`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

import trio

from bench.report import machine
from bench.scaling.costs import Costs
from bench.scaling.document import DATA, DOCUMENT, PICTURE, draw, network_of, render
from bench.scaling.measure import measure_costs, measure_shape, real_shapes
from bench.scaling.simulate import simulate
from bench.scaling.sizes import HOSTS, RANKS, measure_size
from bench.scaling.tree import Shape

SIMULATED = ((10, 0), (100, 0), (128, 0), (10, 16), (100, 16), (1000, 16), (1000, 64), (4096, 16))
"""Hosts of eight ranks, and fan-out: flat as far as one process may have links."""


async def measure() -> dict[str, Any]:
    """Measure this machine."""
    costs = await measure_costs()
    print(costs, flush=True)
    cores = len(os.sched_getaffinity(0))
    rows = [await measure_shape(shape, costs, cores) for shape in real_shapes()]
    return {"machine": machine(), "remarks": "", "costs": dataclasses.asdict(costs), "real": rows}


def simulate_all(costs: Costs, hosts_max: int) -> Iterator[dict[str, Any]]:
    """Simulate casts with costs that were measured; yield the rows of the table."""
    for hosts, fan_out in SIMULATED:
        if hosts <= hosts_max:
            found = dataclasses.asdict(simulate(Shape(hosts, 8, fan_out), network_of(costs)))
            yield found.pop("shape") | found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="how casts grow with hosts")
    parser.add_argument("command", choices=("measure", "sizes", "simulate", "render"))
    parser.add_argument("--hosts-max", type=int, default=4096, help="simulate no more; 4,096 take 5 GB and minutes")
    options = parser.parse_args()
    data = json.loads(DATA.read_text()) if DATA.is_file() else {"simulated": []}
    if options.command == "measure":
        data |= trio.run(measure)
    elif options.command == "sizes":
        data["sizes"] = [measure_size("ranks", count) for count in RANKS]
        data["sizes"] += [measure_size("hosts", count) for count in HOSTS]
    elif options.command == "simulate":
        data["simulated"] = []
        for row in simulate_all(Costs(**data["costs"]), options.hosts_max):
            data["simulated"].append(row)
            DATA.write_text(json.dumps(data, indent=1) + "\n")  # the last ones take long
            print(row, flush=True)
    else:
        DOCUMENT.write_text(render(DOCUMENT.read_text(), data))
        PICTURE.write_text(draw(data))
        return
    DATA.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
