"""Terminal text of the commands, in which names from programs cannot inject control sequences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import PurePath
from typing import Final

from trimesh import limits
from trimesh._wire.exceptions.tracebacks import package_of_line, shown_frames
from trimesh._wire.observed import HOST_SILENT
from trimesh.observe import (
    CallRow,
    Culprit,
    EventRow,
    KeptVersions,
    ProcRow,
    RunSnapshot,
    SharedStack,
    UnreadVersions,
    WaitGraph,
    kept_versions,
    unread_versions,
)
from trimesh.observe.post_mortem import last_words
from trimesh.observe.quantities import duration, size
from trimesh.observe.run_snapshot import program_line


def clean(text: str) -> str:
    """Return a text with every invisible character written as an escape, except newlines."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def one_line(text: str, chars: int = 200) -> str:
    """Return a text on one line, cut to `chars`."""
    flat = clean(" ".join(text.split()))
    return flat if len(flat) <= chars else flat[: chars - 1] + "…"


def state_of(proc: ProcRow) -> str:
    """Return the state of a process, and for how long its loop has not run."""
    if proc.stalled_seconds and proc.state in ("stuck", "silent", "running"):
        return f"{proc.state} for {duration(proc.stalled_seconds)}"
    return proc.state


_SILENCE: Final = {
    "R": "C code computes, and may hold the GIL",
    "S": "C code sleeps in the operating system, for example for a lock, and may hold the GIL",
    "D": "it waits in the kernel for a disk or another device",
}


def silence(proc: ProcRow) -> str:
    """Describe a silent process, and name the command that shows more."""
    if proc.kernel_state == HOST_SILENT:
        return f"its host {clean(proc.host)} does not answer either: its agent is stopped, or cannot be reached"
    words = _SILENCE.get(proc.kernel_state, "C code holds the GIL, or it waits in the operating system")
    where = f" on {clean(proc.host)}" * bool(proc.host)
    look = f"; py-spy dump --native --pid {proc.pid}{where} shows the C frames" * bool(proc.pid)
    return f"no Python code runs: {words}{look}"


def call_line(call: CallRow) -> str:
    parts = [f"{call.name}.{call.endpoint}", call.state, duration(call.age)]
    if call.left is not None:
        parts.append(f"{duration(call.left)} left" if call.left > 0 else "past its deadline")
    if call.caller:
        parts.append(f"from {call.caller}")
    if call.at:
        parts.append(f"at {call.at}")
    return one_line("  ".join(parts), 300)


def more(count: int, what: str) -> str:
    """Return a line that counts omitted entries."""
    return f"and {count} {what} more (--all shows them)"


def some(names: Sequence[str]) -> str:
    """Return the first name, and the number of further ones."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def common(rows: Sequence[str]) -> str:
    """Return the word if all are equal, otherwise each word with its count."""
    counts = dict[str, int]()
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return ", ".join(word if count == len(rows) else f"{count} {word}" for word, count in counts.items())


def program_lines(stack: str, lines: int = 3) -> Sequence[str]:
    """Return the innermost lines of a stack, if possible without those of this library and of code that it calls.

    With `lines=1`, prefer the innermost line of the user's program.
    """
    found = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if lines == 1 and (line := program_line(stack)):
        return [one_line(line)]
    shown = shown_frames(reversed(found), package_of_line, is_inside=True)[::-1]
    return [one_line(line) for line in (shown or found)[:lines]]


# ---- columns ---------------------------------------------------------------------------------------------------------

_CELL_CHARS: Final = 48
"""Widest column but the last one: a longer cell moves the rest of its own row."""


def aligned(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = (), *, keeps_all: bool = False
) -> Iterator[str]:
    """Yield the heads and each row as a line, columns as wide as their cells.

    Args:
        heads: Name of each column.
        rows: A text for each column; one with a single text is a line of its own.
        right: Names of the columns that are aligned at the right.
        keeps_all: Keep columns without any text.
    """
    whole = [row for row in rows if len(row) == len(heads)]
    used = [column for column in range(len(heads)) if keeps_all or any(row[column] for row in whole)]
    widths = [
        max(len(heads[column]), *(min(_CELL_CHARS, len(row[column])) for row in whole)) if whole else 0
        for column in used
    ]
    for row in [heads, *rows]:
        if len(row) != len(heads):
            yield row[0]
            continue
        cells = [
            row[column].rjust(width) if heads[column] in right else row[column].ljust(width)
            for column, width in zip(used, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


_PLACE: Final = re.compile(r'(?:File ")?(?P<path>[^"]+?)(?:", line |:)(?P<line>\d+),? in (?P<name>.+)')


def short_place(at: str) -> str:
    """Return a source line without the folder of its file: `train.py:12 in step`."""
    found = _PLACE.fullmatch(at)
    return one_line(f"{PurePath(found['path']).name}:{found['line']} in {found['name']}" if found else at)


# ---- calls and stacks as text: calls under way, wait graph, running code ---------------------------------------------

_SHOWN: Final = 50
_ID_CHARS: Final = 4
_ID_CHARS_MAX: Final = 16
"""Shown characters of each process in the id of a call: as few as tell the calls apart, up to all."""

_SHAPE_ROUNDS: Final = 16
"""Calls are told apart by what they wait for over so many steps: longer chains that begin alike are shown as one."""

_SAME_EVENTS: Final = 4
"""Newest lines among which an event with the same text is looked for: those of one death come together."""
_HEADS: Final = ("call", "like it", "state", "age", "left", "from", "at", "id")
_RIGHT: Final = ("age", "left")


def is_stuck(call: CallRow, snapshot: RunSnapshot) -> bool:
    """Return whether a call older than `limits.STALL_SECONDS` waits, or is in a process that does not run."""
    states = {proc.id: proc.state for proc in snapshot.procs}
    is_still = call.state in ("queued", "waiting", "sending", "abandoned", "cancelling")
    return call.age >= limits.STALL_SECONDS and (is_still or states.get(call.proc) not in ("running", None))


def call_lines(calls: Sequence[CallRow], *, shows_all: bool) -> Iterator[str]:
    """Yield the calls as a table, oldest first; calls that differ only in their member share a row.

    The last column is the id, as short as it is the only one of its kind; see `call_with_id`.
    """
    ids = short_ids(calls)
    rows = [group for one in call_groups(calls) for group in ([[call] for call in one] if shows_all else [one])]
    shown = rows if shows_all else rows[:_SHOWN]
    if shown:
        cells = [(*_call_cells(group[0], len(group)), ids[group[0].id]) for group in shown]
        yield from aligned(_HEADS, cells, _RIGHT)
    if len(shown) < len(rows):
        yield more(len(rows) - len(shown), "groups of calls")


def _call_cells(call: CallRow, count: int = 1, before: str = "") -> tuple[str, ...]:
    left = "" if call.left is None else duration(call.left) if call.left > 0 else "past"
    return (
        f"{before}{one_line(call.name)}.{one_line(call.endpoint)}",
        f"and {count - 1}" if count > 1 else "",
        call.state,
        duration(call.age),
        left,
        one_line(call.caller),
        short_place(call.at),
    )


def call_groups(calls: Sequence[CallRow]) -> Sequence[Sequence[CallRow]]:
    """Return groups of calls that differ only in their member, in the order of their first calls."""
    groups = dict[tuple[str, ...], list[CallRow]]()
    for call in calls:
        groups.setdefault((call.mesh, call.endpoint, call.state, call.caller, call.at), []).append(call)
    return list(groups.values())


def short_ids(calls: Sequence[CallRow]) -> dict[str, str]:
    """Return, by id, the shortest id that names each call: `7e9d.2@4527` for `7e9dd0d6ad8f9566.2@45275b75a74cf881`."""
    found = {call.id: one_line(call.id) for call in calls}
    open_ids = {call.id: match for call in calls if (match := _ID.fullmatch(call.id)) is not None}
    for chars in range(_ID_CHARS, _ID_CHARS_MAX):
        short = {
            call_id: f"{match['caller'][:chars]}.{match['number']}@{match['proc'][:chars]}"
            for call_id, match in open_ids.items()
        }
        counts = Counter(short.values())
        found.update((call_id, text) for call_id, text in short.items() if counts[text] == 1)
        open_ids = {call_id: match for call_id, match in open_ids.items() if counts[short[call_id]] > 1}
    return found


_ID: Final = re.compile(r"(?P<caller>\w+)\.(?P<number>\d+)@(?P<proc>\w+)")


def is_id(text: str, call_id: str) -> bool:
    """Return whether a text is the id of a call, whole or short."""
    short, whole = _ID.fullmatch(text), _ID.fullmatch(call_id)
    if short is None or whole is None:
        return text == call_id
    is_begun = whole["caller"].startswith(short["caller"]) and whole["proc"].startswith(short["proc"])
    return is_begun and whole["number"] == short["number"]


def wait_lines(snapshot: RunSnapshot) -> Iterator[str]:
    """Yield the wait graph as a tree, then its root causes; calls that wait alike share a line."""
    graph = WaitGraph(snapshot)
    rows = list(_wait_rows(graph))
    if rows:
        yield from aligned(_HEADS[:-1], rows, _RIGHT)
    states = {proc.id: proc.state for proc in snapshot.procs}
    groups = dict[tuple[object, ...], list[Culprit]]()
    for one in graph.culprits():
        call = one.call
        key = (one.cycle or (call.mesh, call.endpoint, call.state, call.at, states.get(call.proc)), one.waiters)
        groups.setdefault(key, []).append(one)
    for count, alike in enumerate(groups.values()):
        if count == _SHOWN:
            yield more(len(groups) - count, "root causes")
            return
        yield _root_cause(graph, alike, states)


def _root_cause(graph: WaitGraph, alike: Sequence[Culprit], states: Mapping[str, str]) -> str:
    one, call = alike[0], alike[0].call
    if one.cycle:
        way = " -> ".join(f"{graph.calls[call_id].name}.{graph.calls[call_id].endpoint}" for call_id in one.cycle)
        return f"these wait for each other: {clean(way)} -> {clean(call.name)}.{clean(call.endpoint)}"
    where = f", {one_line(call.at)}" if call.at else ""
    state = states.get(call.proc, "running")
    is_said = state == "running" or "its process is" in call.at  # `at` names the state if the line is unknown
    process = "" if is_said else f", its process is {state}"
    others = f", and {len(alike) - 1} like it" * (len(alike) > 1)
    waiters = {0: "no call waits", 1: "1 call waits"}.get(one.waiters, f"{one.waiters} calls wait")
    return (
        f"{clean(call.name)}.{clean(call.endpoint)} waits for no call: {call.state} for {duration(call.age)}"
        f"{process}{where}{others}; {waiters} for it"
    )


def _wait_rows(graph: WaitGraph) -> Iterator[tuple[str, ...]]:
    """Yield a row for each call that waits, with those that it waits for below it; those that wait alike are one."""
    shapes = _shapes(graph)
    tops = {call.id for call in graph.roots()}
    groups = dict[tuple[bool, int], list[str]]()
    for call_id in graph.waits_for:
        groups.setdefault((call_id not in tops, shapes[call_id]), []).append(call_id)
    shown, told = set[str](), set[int]()
    for (is_inner, shape), group in sorted(groups.items(), key=lambda one: one[0][0]):
        if is_inner and shape in told:  # an inner one starts only a cycle that no other call waits for
            continue
        start, number = group[0], 1 if is_inner else len(group)
        todo = [(0, start, number)]
        while todo:
            depth, call_id, count = todo.pop()
            before = "" if not depth else f"{'   ' * (depth - 1)}└─ waits for "
            row = _call_cells(graph.calls[call_id], count, before)
            yield (*row[:-1], f"{row[-1]}  (see above)".strip()) if call_id in shown else row
            if call_id not in shown:
                shown.add(call_id)
                told.add(shapes[call_id])
                below = dict[int, list[str]]()
                for other in graph.waits_for.get(call_id, ()):
                    below.setdefault(shapes[other], []).append(other)
                todo += [(depth + 1, group[0], len(group)) for group in reversed(below.values())]


def _shapes(graph: WaitGraph) -> dict[str, int]:
    """Return a number for each call, the same for calls that differ only in their members and wait for the like.

    Calls begin with what they are, and are told apart by what they wait for until that tells no more apart.
    """
    shapes, known = dict[str, int](), dict[object, int]()
    for call_id, call in graph.calls.items():
        caller = call.caller.partition("[")[0]
        key: object = (call.mesh, call.endpoint, call.state, caller, call.at)
        shapes[call_id] = known.setdefault(key, len(known))
    for _ in range(_SHAPE_ROUNDS):
        before, known = len(set(shapes.values())), dict[object, int]()
        after = dict[str, int]()
        for call_id, shape in shapes.items():
            others = frozenset(shapes[other] for other in graph.waits_for.get(call_id, ()))
            after[call_id] = known.setdefault((shape, others), len(known))
        shapes = after
        if len(known) == before:
            break
    return shapes


def stack_lines(stacks: Sequence[SharedStack]) -> Iterator[str]:
    """Yield stacks, each with the members that have it; equal stacks once."""
    for stack in stacks:
        few = ", ".join(clean(name) for name in stack.members[:4])
        rest = f" and {len(stack.members) - 4} more" * (len(stack.members) > 4)
        yield f"{clean(stack.what)} x{len(stack.members)}: {few}{rest}"
        shown = shown_frames(reversed(stack.lines), package_of_line, is_inside=True)[::-1]
        yield from (f"    {one_line(line)}" for line in shown or stack.lines)


def clock(at: float) -> str:
    """Return a Unix time as the time of day here."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def event_text(text: str) -> str:
    """Return the text of an event, of a crash with the line of the program instead of the stack."""
    how, output, at = last_words(text)
    return f"{how}, at {at}" if at else how + f"; last output: {output}" * bool(output)


def event_lines(events: Sequence[EventRow], when: Callable[[float], str]) -> Iterator[str]:
    """Yield a line for each event; those of a process and its actors with one text share a line."""
    groups = list[list[EventRow]]()
    for event in events:
        alike = (
            group for group in groups[-_SAME_EVENTS:] if (group[0].kind, group[0].text) == (event.kind, event.text)
        )
        if event.text and (found := next(alike, None)) is not None and event.name not in {one.name for one in found}:
            found.append(event)
        else:
            groups.append([event])
    for group in groups:
        names = clean(", ".join(event.name for event in group[:4])) + f" and {len(group) - 4} more" * (len(group) > 4)
        yield f"{when(group[0].at)}  {group[0].kind}  {names}  {one_line(event_text(group[0].text))}"


# ---- problems of publications ----------------------------------------------------------------------------------------

_LINE_CHARS = 600


def kept_title(one: KeptVersions) -> str:
    """Return a title: the holders, the pinned versions, and for how long they block `publish`."""
    has = "has" if len(one.holders) == 1 else "have"
    numbers = ", ".join(map(str, one.versions))
    plural = "s" * (len(one.versions) > 1)
    kept = f"version{plural} {numbers} of {some(one.publishers)}"
    return f"{some(one.holders)} {has} {kept} pinned, which has blocked publish for {duration(one.seconds)}"


def kept_text(one: KeptVersions) -> str:
    """Describe pinned versions: the consequence, the activity of the holder, and the remedy."""
    effect = f"{one.kept} of {one.slots} slots cannot be written to, the latest version is {one.latest}"
    if one.is_waiting:
        effect = f"publish waits until one is released: {effect}"
    doing = ""
    if one.call is not None:
        doing = f"; the oldest call there is {one.call.name}.{one.call.endpoint}, for {duration(one.call.age)}"
    return f"{effect}{doing}; leave the block of pin() once the tensors are copied, or publish with more slots"


def unread_title(one: UnreadVersions) -> str:
    """Return a title: the publisher, the number of versions that no process has read, and for how long."""
    versions = f"{one.count} versions in {duration(one.seconds)}"
    return f"{some(one.publishers)} has published {versions} that no process has read"


def unread_text(one: UnreadVersions) -> str:
    """Describe unread versions: earlier readers, the cost, and the remedy."""
    who = f"{some(one.readers)} has read earlier ones" if one.readers else "it has no reader"
    cost = f"; each is copied, into {size(one.nbytes)} of memory" * bool(one.nbytes)
    return f"{who}{cost}; check whether the task that follows it has ended, or was never started"


def publication_lines(seen: RunSnapshot) -> Iterator[str]:
    """Yield a line for each publication with pinned or unread versions."""
    for kept in kept_versions(seen):
        yield one_line(f"pinned: {kept_title(kept)}; {kept_text(kept)}", _LINE_CHARS)
    for unread in unread_versions(seen):
        yield one_line(f"unread: {unread_title(unread)}; {unread_text(unread)}", _LINE_CHARS)
