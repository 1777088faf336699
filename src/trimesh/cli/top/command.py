"""The command: on a terminal a screen that lives, elsewhere one table."""

from __future__ import annotations

import sys
import time
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from trimesh import limits
from trimesh.cli.top.rows import COLUMNS, cells, summary
from trimesh.observe import activity_between, find_run

_WIDTH = 240


def top(
    *,
    pid: Annotated[int | None, Parameter(name="--pid")] = None,
    every: Annotated[float, Parameter(name="--every")] = 1.0,
) -> int:
    """Show what the processes of a run do, while they do it: calls, messages, bytes, memory; sorted and filtered.

    On a terminal: arrows and enter look at one process, s sorts by the next column, / filters by name, q ends. It needs
    textual: pip install 'trimesh-actors[top]'. Where the output is no terminal, one table is printed.

    Args:
        pid: Of the controller.
        every: Seconds between two looks, at least 0.1.

    Exit codes: 0, 1 textual is missing, 3 there is no run.
    """
    every = max(every, limits.TOP_SECONDS_MIN)
    with find_run(pid) as run:
        if not sys.stdout.isatty():
            earlier = run.snapshot()
            time.sleep(every)
            later = run.snapshot()
            table = Table(*COLUMNS, title=summary(later), title_justify="left")
            for one in activity_between(later, earlier):
                table.add_row(*cells(one))
            Console(highlight=False, width=_WIDTH).print(table)
            return 0
        try:
            from trimesh.cli.top.screen import TopApp  # noqa: PLC0415 - textual is an extra
        except ImportError:
            sys.stderr.write("trimesh: top needs textual: pip install 'trimesh-actors[top]'\n")
            return 1
        TopApp(run.snapshot, every).run()
    return 0
