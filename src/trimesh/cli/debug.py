"""`trimesh debug`: pdb in a process of a run, at a breakpoint or at an error."""

from __future__ import annotations

import importlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec
from cyclopts import Parameter

from trimesh.cli.members import choose
from trimesh.cli.text import clean, one_line
from trimesh.errors import ConnectError
from trimesh.observe import DebugTerminal, HoldRow, ObservedRun, find_run
from trimesh.observe.quantities import duration

_FOUND: Final = 1
_WRONG: Final = 2
_NAMES_SHOWN: Final = 4
_CTRL_D: Final = "\x04"
_LOOK_SECONDS: Final = 0.3


def debug(
    point: str = "",
    /,
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], negative="")] = False,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    all: Annotated[str, Parameter(name="--all", allow_leading_hyphen=True)] = "",  # noqa: A002 - the option is called so
) -> int:
    """Debug threads held at a breakpoint() in a worker, or at an error if the run has TRIMESH_DEBUG=post-mortem.

    Begins with the thread held longest, then continues with the next. Commands are those of pdb. Ctrl-D, `q` or closing
    the terminal lets the thread continue.

    Exit codes: 0, 1 no thread is held or there is no such member, 2 POINT names no member or wrong usage, 3 there is
    no run, it has ended, or another terminal debugs there.

    Args:
        point: Process, or an actor in it, as `ps` shows it: `trainers[gpus=3]`; all by default.
        pid: Process id of the controller.
        follow: Wait for further held threads, until the run ends or Ctrl-C.
        json: Print one JSON document: a list of the held threads, or of the answers to --all.
        all: Give one command to all held threads, and show equal answers once: `--all 'p step'`. They stay held.
    """
    if point:
        with find_run(pid) as run:
            point = _meant(point, run)
    if all:
        return _ask_all(all, point, pid, json=json)
    if json:
        with find_run(pid) as run:
            sys.stdout.buffer.write(msgspec.json.encode(_held(run.holds(), point)) + b"\n")
        return 0
    count = 0
    with suppress(KeyboardInterrupt):
        while True:
            with find_run(pid) as run:
                pid = run.pid
                found = _held(run.holds(), point)
                if found:
                    _show(found)
                    with run.attach(found[0].id) as terminal:
                        _Talk(terminal).run()
                    count += 1
                    continue
            if not follow:
                break
            time.sleep(_LOOK_SECONDS)
    if not count and not follow:
        sys.stderr.write("trimesh: no thread of the run is held for a debugger (-f waits for one)\n")
        return _FOUND
    return 0


# ---- one command for all held threads --------------------------------------------------------------------------------

_STEPS: Final = frozenset({"s", "step", "n", "next", "r", "return", "unt", "until", "j", "jump", "interact"})


def _ask_all(command: str, point: str, pid: int | None, *, json: bool) -> int:
    """Give a command to each held thread in turn, as one terminal at a time is attached in a run."""
    word = command.split(maxsplit=1)[0] if command.strip() else ""
    if word in _STEPS or not word:
        sys.stderr.write(
            "trimesh: --all takes one command that needs no other rank, such as 'p step', 'w' or 'c', got "
            f"{one_line(repr(command))}: step a single rank by trimesh debug POINT\n"
        )
        return _WRONG
    with find_run(pid) as run:
        pid, rows = run.pid, _held(run.holds(), point)
    answers = dict[str, list[str]]()
    for row in rows:
        try:
            with find_run(pid) as run, run.attach(row.id) as terminal:
                answers.setdefault(_answer(terminal, command), []).append(row.name)
        except ConnectError as error:  # it went on meanwhile, or its process has ended
            sys.stderr.write(f"trimesh: {clean(row.name)}: {error}\n")
    if not answers:
        sys.stderr.write("trimesh: no thread of the run is held for a debugger\n")
        return _FOUND
    groups = sorted(answers.items(), key=lambda one: len(one[1]))
    if json:
        sys.stdout.buffer.write(msgspec.json.encode([{"names": names, "text": text} for text, names in groups]) + b"\n")
        return 0
    for text, names in groups:
        more = f" and {len(names) - _NAMES_SHOWN} more" * (len(names) > _NAMES_SHOWN)
        sys.stdout.write(f"{clean(', '.join(names[:_NAMES_SHOWN]))}{more}\n")
        sys.stdout.writelines(f"    {line}\n" for line in clean(text.expandtabs()).splitlines())
    return 0


def _answer(terminal: DebugTerminal, command: str) -> str:
    """Return the answer of a held thread to a command, and leave it held.

    Raises:
        ConnectError: The thread has gone on, or the run has ended.
    """
    said, is_asked = "", False
    while (heard := terminal.hear()) is not None:
        kind, text = heard
        if kind == "ended":
            if not is_asked:
                raise ConnectError(f"it is not held any more: {text}" if text else "it is not held any more")
            return said or (f"[{text}]" if text else "[it goes on]")
        if kind == "prompt" and not is_asked:
            terminal.say(command)
            said, is_asked = "", True
        elif kind == "prompt":
            terminal.leave()
        else:
            said += text
    raise ConnectError("its run has ended")


def _meant(point: str, run: ObservedRun) -> str:
    """Return the name that holds of a member, or of one of its endpoints, have."""
    if any(point in (hold.proc_name, hold.name) for hold in run.holds()):
        return point
    seen = run.snapshot()
    chosen = choose(point, [*seen.procs, *seen.actors], endpoints=True)
    return f"{chosen.name}.{chosen.endpoint}" if chosen.endpoint else chosen.name


def _held(holds: Sequence[HoldRow], point: str) -> list[HoldRow]:
    def is_meant(row: HoldRow) -> bool:
        return point in ("", row.proc_name, row.name, row.name.rpartition(".")[0])

    return [row for row in holds if is_meant(row)]


def _show(found: Sequence[HoldRow]) -> None:
    row = found[0]
    what = "at a breakpoint" if row.kind == "breakpoint" else f"by an error: {one_line(row.text)}"
    rest = f"; {len(found) - 1} more are held" * (len(found) > 1)
    sys.stdout.write(
        f"{clean(row.name)} (process {row.pid} on {clean(row.host)}) is held {what}, for {duration(row.age)}{rest}\n"
        f"{one_line(row.at)}\n"
    )
    sys.stdout.flush()


class _Talk:
    """Dialogue between a held thread and this terminal."""

    def __init__(self, terminal: DebugTerminal) -> None:
        self._terminal = terminal
        self._said = queue.SimpleQueue[tuple[str, str] | None]()
        self._has_ended = False
        self._is_asking = False
        self._asker = threading.get_ident()

    def run(self) -> None:
        """Serve as the thread's terminal until it continues.

        Raises:
            KeyboardInterrupt: Ctrl-C came while the thread ran; the terminal detaches.
        """
        if sys.stdin.isatty():
            with suppress(ImportError):
                importlib.import_module("readline")  # `input` then edits lines, and remembers them
        threading.Thread(target=self._listen, name="trimesh debug", daemon=True).start()
        while (heard := self._said.get()) is not None:
            kind, text = heard
            if kind == "prompt":
                self._ask(clean(text))
            elif kind == "ended":
                sys.stdout.write(f"[{clean(text) or 'it goes on'}]\n")
            else:
                sys.stdout.write(clean(text.expandtabs()))
            sys.stdout.flush()

    def _ask(self, prompt: str) -> None:
        while not self._has_ended:
            try:
                self._is_asking = True
                try:
                    line = input(prompt)
                finally:
                    self._is_asking = False
            except EOFError:
                sys.stdout.write("\n")
                line = _CTRL_D
            except KeyboardInterrupt:  # Ctrl-C while a line is typed, or sent by `_listen`
                sys.stdout.write("\n")
                continue
            with suppress(ConnectError):  # `_listen` reports the end
                self._terminal.say(line)
            return

    def _listen(self) -> None:
        while (heard := self._terminal.hear()) is not None and heard[0] != "ended":
            self._said.put(heard)
        self._has_ended = True
        self._said.put(heard or ("ended", "its run has ended"))
        self._said.put(None)
        if self._is_asking:  # `input` waits for a line that nothing will read
            signal.pthread_kill(self._asker, signal.SIGINT)
