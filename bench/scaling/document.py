"""Tables and picture of bench/scaling/README.md, from data.json."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.scaling import picture
from bench.scaling.costs import Costs
from bench.scaling.tree import Network, Shape, bulk_seconds, caller_bytes, counts, seconds

FOLDER = Path(__file__).parent
DATA, DOCUMENT, PICTURE = FOLDER / "data.json", FOLDER / "README.md", FOLDER / "scaling.svg"

PER_HOST = 8
HOSTS = (1, 10, 100, 1000, 4096)
FAN_OUTS = (16, 64)
LINKS_MAX = 1024
"""Of one process: `limits.LINKS_MAX`, which a test compares."""
RING_BYTES = 2 << 18
"""Shared memory of a link on one host: two times `limits.RING_BYTES`."""
WIRE_BYTES_PER_SECOND = 12.5e9
"""100 Gbit/s between hosts: assumed, there is no such network here."""
BULK_BYTES = 64 << 20
PUBLISHED = {1: 8.0, 10: 12.0, 100: 45.0}
"""Hosts, and the milliseconds of Monarch's cast and replies from Python beyond the 100 ms that its ranks work."""

Row = Sequence[str]


def network_of(costs: Costs, *, is_remote: bool = True) -> Network:
    """Return what casts of a float run on."""
    return Network(costs, is_remote=is_remote, value_bytes=9, reply_bytes=30)


def shape_of(row: dict[str, Any]) -> Shape:
    """Return the shape that a row of the data is about."""
    return Shape(row["hosts"], row["per_host"], row["fan_out"])


def tables(data: dict[str, Any]) -> dict[str, str]:
    """Return the tables by name."""
    costs = Costs(**data["costs"])
    return {
        "costs": _costs(data),
        "real": _markdown(
            ["hosts x ranks", "cast", "processes", "model", "measured", "off by", "computing", "measured", "load"],
            [_real(row) for row in data["real"]],
        ),
        "sizes": _markdown(
            ["", "processes", "memory", "until called", "call", "of that computed", "for each", "descriptors", "idle"],
            [_size_row(row) for row in data["sizes"]],
        ),
        "simulated": _markdown(
            ["hosts x ranks", "cast", "messages", "the caller's", "bytes", "most links", "hops", "model", "simulated"],
            [_simulated(row, costs) for row in data["simulated"]],
        ),
        "predicted": _markdown(
            ["hosts x ranks", "flat", *(f"tree of {fan_out}" for fan_out in FAN_OUTS), "Monarch, published"],
            [_predicted(hosts, costs) for hosts in HOSTS],
        ),
        "breaks": _markdown(
            ["hosts", "caller's links, flat", "rings, if on one host", *(f"most links, tree of {f}" for f in FAN_OUTS)],
            [_breaks(hosts) for hosts in HOSTS],
        ),
        "bulk": _markdown(
            ["hosts", "flat, to each rank", "flat, to each host", "tree of 2", "tree of 4", "tree of 16"],
            [_bulk(hosts, costs) for hosts in HOSTS],
        ),
    }  # fmt: skip


def _costs(data: dict[str, Any]) -> str:
    rows = [(f"`{name}`", f"{value:.4g}") for name, value in data["costs"].items()]
    machine = "{cpu}, {cores} cores, Linux {kernel}, Python {python}.".format(**data["machine"])
    return "\n\n".join(filter(None, [machine, _markdown(["cost", "us"], rows), textwrap.fill(data["remarks"], 120)]))


def _real(row: dict[str, Any]) -> Row:
    shape = shape_of(row)
    off = row["model_us"] / row["measured_us"] - 1
    return (
        _hosts(shape), _cast(shape), str(shape.processes + 1), _time(row["model_us"]), _time(row["measured_us"]),
        f"{off:+.0%}", _time(row["model_cpu_us"]), _time(row["measured_cpu_us"]), f"{row['load']:.1f}",
    )  # fmt: skip


def _size_row(row: dict[str, Any]) -> Row:
    count = row["count"]
    return (
        f"{count:,} {row['kind']}", f"{row['processes']:,}", _size(row["all_bytes"]), _time(row["start_seconds"] * 1e6),
        _time(row["call_us"]), f"{row['own_us'] / count:.2f} us each", f"{row['own_bytes'] / 1024:.1f} kB",
        f"{row['own_descriptors']:.1f}", f"{row['idle_us']:.0f} us/s",
    )  # fmt: skip


def _simulated(row: dict[str, Any], costs: Costs) -> Row:
    shape = shape_of(row)
    expected = counts(shape)
    pairs = [(getattr(expected, name), row[name]) for name in ("messages", "caller_messages")]
    pairs += [(caller_bytes(shape), row["caller_bytes"]), (expected.links_max, row["links_max"])]
    pairs += [(expected.hops, row["hops"])]
    cells = [f"{model:,}" if model == seen else f"{model:,} / {seen:,}" for model, seen in pairs]
    model = seconds(shape, network_of(costs)) * 1e6
    return _hosts(shape), _cast(shape), *cells, _time(model), _time(row["seconds"] * 1e6)


def _predicted(hosts: int, costs: Costs) -> Row:
    network, shape = network_of(costs), Shape(hosts, PER_HOST)
    flat = _time(seconds(shape, network) * 1e6)
    trees = [_time(seconds(Shape(hosts, PER_HOST, fan_out), network) * 1e6) for fan_out in FAN_OUTS]
    published = f"{PUBLISHED[hosts]:g} ms" if hosts in PUBLISHED else "-"
    return _hosts(shape), flat + (", refused" if shape.ranks > LINKS_MAX else ""), *trees, published


def _breaks(hosts: int) -> Row:
    links = hosts * PER_HOST
    trees = [f"{counts(Shape(hosts, PER_HOST, fan_out)).links_max:,}" for fan_out in FAN_OUTS]
    return (
        f"{hosts:,}",
        f"{links:,}" + (f" > {LINKS_MAX:,}" if links > LINKS_MAX else ""),
        _size(links * RING_BYTES),
        *trees,
    )


def _bulk(hosts: int, costs: Costs) -> Row:
    def spread(per_host: int, fan_out: int) -> str:
        return _time(bulk_seconds(Shape(hosts, per_host, fan_out), costs, BULK_BYTES, WIRE_BYTES_PER_SECOND) * 1e6)

    return f"{hosts:,}", spread(PER_HOST, 0), spread(1, 0), *(spread(PER_HOST, fan_out) for fan_out in (2, 4, 16))


def _hosts(shape: Shape) -> str:
    return f"{shape.hosts:,} x {shape.per_host}"


def _cast(shape: Shape) -> str:
    return f"tree of {shape.fan_out}" if shape.fan_out else "flat"


def _time(microseconds: float) -> str:
    for amount, unit in ((microseconds / 1e6, "s"), (microseconds / 1e3, "ms")):
        if amount >= 1:
            return f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:,.0f} {unit}"
    return f"{microseconds:.3g} us"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB" if nbytes >= 1 << 30 else f"{nbytes >> 20:,} MiB"


def _markdown(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def render(document: str, data: dict[str, Any]) -> str:
    """Return the document with its tables made anew."""
    found = tables(data)

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{found.pop(match[2])}\n{match[3]}"

    rendered = re.sub(r"(<!-- table (\w+) -->)\n.*?(<!-- end -->)", table, document, flags=re.DOTALL)
    if found:
        raise ValueError(f"every table needs its place in the document, there is none for {sorted(found)}")
    return rendered


def draw(data: dict[str, Any]) -> str:
    """Return the picture: time by ranks."""
    costs = Costs(**data["costs"])
    network = network_of(costs)
    many = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]

    def line(hosts: Sequence[int], fan_out: int) -> picture.Points:
        shapes = [Shape(count, PER_HOST, fan_out) for count in hosts]
        return [(float(shape.ranks), seconds(shape, network) * 1e3) for shape in shapes]

    def dots(kind: str, key: str, scale: float, *, is_tree: bool) -> picture.Points:
        rows = [(shape_of(row), row[key] * scale) for row in data[kind] if bool(row["fan_out"]) == is_tree]
        return [(float(shape.ranks), value) for shape, value in rows]

    possible = [hosts for hosts in many if hosts * PER_HOST <= LINKS_MAX]
    curves = [
        picture.Curve("flat, a core for each", line(possible, 0), "#1f5fa8", "line"),
        picture.Curve("flat, beyond LINKS_MAX", line(many[len(possible) - 1 :], 0), "#1f5fa8", "dashes"),
        picture.Curve("flat, simulated", dots("simulated", "seconds", 1e3, is_tree=False), "#1f5fa8", "dots"),
        picture.Curve("tree of 16, a core for each", line(many, 16), "#b8541a", "line"),
        picture.Curve("tree of 16, simulated", dots("simulated", "seconds", 1e3, is_tree=True), "#b8541a", "dots"),
        picture.Curve("flat, shared cores: model", dots("real", "model_us", 1e-3, is_tree=False), "#5a5a5a", "line"),
        picture.Curve("flat, measured here", dots("real", "measured_us", 1e-3, is_tree=False), "#5a5a5a", "rings"),
        picture.Curve("Monarch, published", [(h * 8.0, ms) for h, ms in PUBLISHED.items()], "#7b2d8b", "rings"),
    ]
    across = picture.Axis("ranks (8 a host)", 8, 32768, [(float(8 << (2 * i)), f"{8 << (2 * i):,}") for i in range(7)])
    up = picture.Axis("ms", 0.2, 1000, [(v, f"{v:g}") for v in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)])
    return picture.draw("Cast and replies", across, up, curves)
