"""How things are written for a terminal: short, and so that no name of a program can steer the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trimesh._wire.exceptions.frames import shown_frames
from trimesh._wire.exceptions.stack_text import package_of_line
from trimesh._wire.observed import HOST_SILENT
from trimesh.observe import CallRow, ProcRow
from trimesh.observe.merging import program_line

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
FINE: Final = ("running", "starting", "exiting")


def clean(text: str) -> str:
    """Return a text in which every character that is not to be seen is written as an escape; newlines stay."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def one_line(text: str, chars: int = 200) -> str:
    """Return a text on one line, cut to `chars`."""
    flat = clean(" ".join(text.split()))
    return flat if len(flat) <= chars else flat[: chars - 1] + "…"


def duration(seconds: float) -> str:
    """Return seconds for people: 0.25 s, 3.2 s, 4 min 5 s, 2 h 3 min."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min"


def size(nbytes: float) -> str:
    at = 0
    while nbytes >= 1024 and at < len(_UNITS) - 1:
        nbytes /= 1024
        at += 1
    return f"{nbytes:.0f} {_UNITS[at]}" if at < 2 else f"{nbytes:.1f} {_UNITS[at]}"


def state_of(proc: ProcRow) -> str:
    """Return the state of a process, with for how long its loop has not run."""
    if proc.stalled_seconds and proc.state in ("stuck", "silent", "running"):
        return f"{proc.state} for {duration(proc.stalled_seconds)}"
    return proc.state


_SILENCE: Final = {
    "R": "C code computes there, and may hold the GIL",
    "S": "C code sleeps there in the operating system, for a lock, say, and may hold the GIL meanwhile",
    "D": "it waits in the kernel for a disk, or another device",
}


def silence(proc: ProcRow) -> str:
    """Return what is known of a silent process, and which command shows more."""
    if proc.kernel_state == HOST_SILENT:
        return f"its host {clean(proc.host)} does not answer either: its agent is stopped, or cannot be reached"
    words = _SILENCE.get(proc.kernel_state, "C code holds the GIL, or it waits in the operating system")
    where = f" on {clean(proc.host)}" * bool(proc.host)
    look = f"; py-spy dump --native --pid {proc.pid}{where} shows the lines of C" * bool(proc.pid)
    return f"no Python code runs: {words}{look}"


def call_line(call: CallRow) -> str:
    parts = [f"{call.name}.{call.endpoint}", call.state, duration(call.age)]
    if call.left is not None:
        parts.append(f"{duration(call.left)} left" if call.left > 0 else "its deadline is over")
    if call.caller:
        parts.append(f"from {call.caller}")
    if call.at:
        parts.append(f"at {call.at}")
    return one_line("  ".join(parts), 300)


def more(count: int, what: str) -> str:
    """Return a line on what is not shown."""
    return f"and {count} {what} more (--all shows them)"


def some(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def common(rows: Sequence[str]) -> str:
    """Return what all of some words are, or the words with their counts."""
    counts = dict[str, int]()
    for row in rows:
        counts[row] = counts.get(row, 0) + 1
    return ", ".join(word if count == len(rows) else f"{count} {word}" for word, count in counts.items())


def program_lines(stack: str, lines: int = 3) -> Sequence[str]:
    """Return the innermost lines of a stack, without those of this library and of what it has called, if there are any.

    A single line is that of the program.
    """
    found = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    if lines == 1 and (line := program_line(stack)):
        return [one_line(line)]
    shown = shown_frames(reversed(found), package_of_line, is_inside=True)[::-1]
    return [one_line(line) for line in (shown or found)[:lines]]
