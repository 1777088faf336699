"""Trace files of tensor programs, for Perfetto. Operations are named by the line that issued them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from trimesh.tensor.controller.shapes import Line


def shown(line: Line) -> str:
    """Format a line for display: `/home/me/train.py:12 in step`."""
    code, number = line
    return f"{code.co_filename}:{number} in {code.co_qualname}"


def named(operation: str, line: Line | None) -> str:
    """Return the name of an operation in a trace: `train.py:12 mm`."""
    if line is None:
        return operation
    code, number = line
    return f"{code.co_filename.rpartition('/')[2]}:{number} {operation}"


def track(process: int, thread: int, name: str, threads: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the events that name a process of a trace, and its threads, numbered from `thread` on."""
    yield _name("process_name", process, 0, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for number, one in enumerate(threads, start=thread):
        yield _name("thread_name", process, number, one)


def span(
    process: int, thread: int, kind: str, name: str, begun: float, seconds: float, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return one event; `begun` counts in seconds from the start of the trace."""
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": round(begun * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "pid": process,
        "tid": thread,
        "args": arguments,
    }


def trace_bytes(events: Iterable[Mapping[str, Any]], other: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a file in the JSON trace event format."""
    encode = msgspec.json.Encoder().encode
    yield b'{"displayTimeUnit":"ms","otherData":' + encode(other) + b',"traceEvents":['
    for number, event in enumerate(events):
        yield (b",\n" if number else b"\n") + encode(event)
    yield b"\n]}\n"


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
