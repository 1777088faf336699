"""A history as a table: clients are columns, time goes down. PURE."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from trimesh import limits
from trimesh.testing.histories.operation import Operation, call_text, client_text


def table(operations: Sequence[Operation], marked: Operation | None = None) -> Iterator[str]:
    """Yield the lines of a table of operations; a client with several at one time has several columns.

    Args:
        operations: What to show; of long ones the last `limits.HISTORY_ROWS` events.
        marked: The one whose end gets an arrow.
    """
    columns = _columns(operations)
    names = [client_text(client) for client, _ in columns]
    events = sorted(
        [(one.begin, 0, column, one) for column, (_, lane) in enumerate(columns) for one in lane]
        + [
            (one.end, 1, column, one) for column, (_, lane) in enumerate(columns) for one in lane if one.end is not None
        ],
        key=lambda event: event[:3],
    )
    rows: list[tuple[str, list[str], str]] = []
    running = [False] * len(columns)
    for moment, kind, column, operation in events:
        cells = ["|" if is_running else "" for is_running in running]
        cells[column] = _cut(operation.outcome if kind else call_text(operation.call))
        running[column] = not kind
        rows.append((f"{moment[0]:.6f}", cells, "  <--" if kind and operation is marked else ""))
    shown = rows[-limits.HISTORY_ROWS :]
    widths = (
        [max(len(name), *(len(cells[at]) for _, cells, _ in shown)) for at, name in enumerate(names)] if shown else []
    )
    yield _line("time", names, widths, "")
    if len(shown) < len(rows):
        yield f"{'...':>14}  ({len(rows) - len(shown)} events before)"
    for time, cells, mark in shown:
        yield _line(time, cells, widths, mark)


def _columns(operations: Sequence[Operation]) -> list[tuple[Hashable, list[Operation]]]:
    """Return clients in the order in which they came, each with operations of which no two overlap."""
    lanes: dict[Hashable, list[list[Operation]]] = {}
    for operation in sorted(operations, key=lambda one: one.begin):
        own = lanes.setdefault(operation.client, [])
        free = (lane for lane in own if (end := lane[-1].end) is not None and end <= operation.begin)
        lane = next(free, None)
        if lane is None:
            own.append([operation])
        else:
            lane.append(operation)
    return [(client, lane) for client, own in lanes.items() for lane in own]


def _cut(text: str) -> str:
    return text if len(text) <= limits.HISTORY_CELL_CHARS else text[: limits.HISTORY_CELL_CHARS - 3] + "..."


def _line(time: str, cells: Sequence[str], widths: Sequence[int], mark: str) -> str:
    columns = "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{time:>14}  {columns}".rstrip() + mark
