"""What `trimesh.spmd` raises for a rank whose program has failed."""

from __future__ import annotations

import signal as signals

from trimesh.errors import MeshError


class ScriptFailed(MeshError):
    """The program of a rank has failed.

    Attributes:
        program: What was run.
        exit_code: Its exit code, or None when a signal ended it.
        signal: Number of the signal that ended it, or None.
        stderr_tail: Last lines of its standard error, at most `limits.SPMD_STDERR_TAIL_BYTES`; the traceback, that is,
            or what `torch.distributed.elastic.multiprocessing.errors.record` has written of it.
    """

    def __init__(self, program: str, returncode: int, stderr_tail: str = "") -> None:
        super().__init__(program, returncode, stderr_tail)
        self.program = program
        self.exit_code = returncode if returncode >= 0 else None
        self.signal = -returncode if returncode < 0 else None
        self.stderr_tail = stderr_tail

    def __str__(self) -> str:
        how = f"exited with {self.exit_code}" if self.signal is None else f"was ended by {_name(self.signal)}"
        tail = self.stderr_tail.rstrip()
        return f"{self.program} {how}" + (f"; the end of its standard error:\n{tail}" if tail else "")


def _name(signum: int) -> str:
    try:
        return signals.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
