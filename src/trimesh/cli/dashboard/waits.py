"""Who waits for whom, as boxes and arrows; PURE.

WB-1 Calls to members of one mesh that have the same endpoint, state, caller and line are one box, unless they wait for
     themselves: those are a box each.
WB-2 A box stands right of all that wait for it. An arrow that would lead back is one of a circle.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from trimesh import limits
from trimesh.observe import CallRow, RunSnapshot, WaitGraph


class WaitBox(msgspec.Struct, frozen=True, kw_only=True):
    """One call, or several that differ in their member.

    Attributes:
        name: Of the first member.
        call: Id of the first call.
        endpoint, state, at: Of all of them.
        count: How many.
        age: Of the oldest, in seconds.
        left: Of the first deadline, in seconds; None for none.
        column: 0 for what no call waits for.
        waiters: How many calls wait for it, directly or not.
        is_culprit: Whether it waits for no call, while others wait for it.
        in_circle: Whether it waits for itself.
    """

    name: str
    call: str
    endpoint: str
    state: str
    at: str = ""
    count: int = 1
    age: float = 0.0
    left: float | None = None
    column: int = 0
    waiters: int = 0
    is_culprit: bool = False
    in_circle: bool = False


class WaitPicture(msgspec.Struct, frozen=True, kw_only=True):
    """Who waits for whom.

    Attributes:
        boxes: Those that wait, and those that are waited for.
        arrows: From box, to box, and how many calls wait so.
        left_out: Boxes beyond `limits.PAGE_NODES_MAX`.
    """

    boxes: tuple[WaitBox, ...] = ()
    arrows: tuple[tuple[int, int, int], ...] = ()
    left_out: int = 0


def wait_picture(seen: RunSnapshot) -> WaitPicture:
    graph = WaitGraph(seen)
    culprits = graph.culprits()
    in_circle = {call_id for one in culprits for call_id in one.cycle}
    waiters = {one.call.id: one.waiters for one in culprits}
    taking_part = set(graph.waits_for) | {other for others in graph.waits_for.values() for other in others}
    groups = dict[tuple[str, ...], list[CallRow]]()
    for call_id in [one for one in graph.calls if one in taking_part]:
        call = graph.calls[call_id]
        alone = call_id if call_id in in_circle else ""
        groups.setdefault((call.mesh, call.endpoint, call.state, call.caller, call.at, alone), []).append(call)
    ranked = sorted(groups.values(), key=lambda calls: -max(waiters.get(call.id, 0) for call in calls))
    ordered = sorted(ranked, key=lambda calls: calls[0].id not in in_circle)
    shown = ordered[: limits.PAGE_NODES_MAX]
    place = {call.id: number for number, calls in enumerate(shown) for call in calls}
    arrows = Counter(
        (place[call_id], place[other])
        for call_id, others in graph.waits_for.items()
        for other in others
        if call_id in place and other in place
    )
    columns = _columns(len(shown), arrows)
    boxes = [_box(calls, columns[number], in_circle, waiters) for number, calls in enumerate(shown)]
    return WaitPicture(
        boxes=tuple(boxes),
        arrows=tuple((start, end, count) for (start, end), count in arrows.items()),
        left_out=len(ordered) - len(shown),
    )


def _box(calls: list[CallRow], column: int, in_circle: set[str], waiters: dict[str, int]) -> WaitBox:
    first = calls[0]
    left = [call.left for call in calls if call.left is not None]
    most = max(waiters.get(call.id, 0) for call in calls)
    return WaitBox(
        name=first.name,
        call=first.id,
        endpoint=first.endpoint,
        state=first.state,
        at=first.at,
        count=len(calls),
        age=max(call.age for call in calls),
        left=min(left) if left else None,
        column=column,
        waiters=most,
        is_culprit=most > 0 and first.id not in in_circle,
        in_circle=first.id in in_circle,
    )


def _columns(count: int, arrows: Counter[tuple[int, int]]) -> list[int]:
    """Return the column of each box: right of all that wait for it; each is passed through once on a way (WB-2)."""
    after = [list[int]() for _ in range(count)]
    awaited = [0] * count
    for start, end in arrows:
        if start != end:
            after[start].append(end)
            awaited[end] += 1
    columns = [0] * count
    todo = [box for box in range(count) if not awaited[box]]
    done = set[int]()
    while len(done) < count:
        if not todo:  # only circles are left: one is opened where the most has been said already
            todo = [next(box for box in range(count) if box not in done)]
        box = todo.pop()
        if box in done:
            continue
        done.add(box)
        for other in after[box]:
            if other not in done:
                columns[other] = max(columns[other], columns[box] + 1)
                awaited[other] -= 1
                if awaited[other] <= 0:
                    todo.append(other)
    return columns
