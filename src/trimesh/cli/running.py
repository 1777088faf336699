"""`trimesh run`: a script with a job of the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from trimesh.errors import TrimeshError


def run_script(
    script: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    job: Annotated[str | None, Parameter(name="--job")] = None,
) -> int:
    """Run a Python script whose `trimesh.jobs.default()` is a job of trimesh.toml.

    Args:
        script: Its file.
        arguments: Its own, options with them; after `--` also one that is called --job.
        job: The name of the job; else what the file or TRIMESH_JOB says.

    Exit codes: of the script; 2 there is no such job or script.
    """
    if not Path(script).is_file():
        sys.stderr.write(f"trimesh run needs the file of a script, got {script!r}\n")
        return 2
    if job is not None:
        os.environ["TRIMESH_JOB"] = job
    try:
        from trimesh.jobs import default  # noqa: PLC0415 - packages may be missing

        default()
    except TrimeshError as error:
        sys.stderr.write(f"trimesh: {error}\n")
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, script, *arguments])  # noqa: S606 - the user's own script
    raise AssertionError("execv does not return")
