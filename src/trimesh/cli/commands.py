"""The commands: what each takes, asks, and prints.

Exit codes: 0 all is well, 1 the command has found what is not well, 2 it was called wrongly, 3 there is no run to ask,
or it does not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from trimesh.cli.processes import process_tree
from trimesh.cli.text import FINE
from trimesh.errors import ConnectError
from trimesh.observe import ObservedRun, find_run, runs

FOUND: Final = 1
WRONG: Final = 2
NO_RUN: Final = 3

Json = Annotated[bool, Parameter(name="--json", negative="")]
All = Annotated[bool, Parameter(name="--all", negative="")]
Pid = Annotated[int | None, Parameter(name="--pid")]

app = App(
    name="trimesh", help="Look at running meshes of this user, ask them, and stop them.", result_action="return_value"
)


def run(arguments: Sequence[str]) -> int:
    """Run a command; return its exit code."""
    try:
        code = app(arguments, exit_on_error=False, print_error=True)
    except CycloptsError:
        return WRONG
    except ConnectError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return NO_RUN
    except BrokenPipeError:  # of `| head`
        sys.stderr.close()
        return 0
    return int(code or 0)


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _chosen(pid: int | None) -> list[ObservedRun]:
    return runs() if pid is None else [find_run(pid)]


def ps(*, pid: Pid = None, all: All = False, json: Json = False) -> int:  # noqa: A002 - the option is called so
    """Show runs, their processes and actors as trees: state, pid, memory, last event of each.

    Args:
        pid: Of the controller of one run; else all runs are shown.
        all: Show every process, also of a large mesh.
        json: Print one JSON document: a list of snapshots.

    Exit codes: 0 all processes run, 1 one does not, 3 there is no run.
    """
    found = _chosen(pid)
    snapshots = []
    for one in found:
        with one:
            snapshots.append(one.snapshot())
    if json:
        _print_json(snapshots)
    for snapshot in [] if json else snapshots:
        _console().print(process_tree(snapshot, shows_all=all))
    if not snapshots:
        sys.stderr.write("trimesh: no run of this user has an open block on this machine\n")
        return NO_RUN
    return FOUND if any(proc.state not in FINE for one in snapshots for proc in one.procs) else 0


app.command(ps)
