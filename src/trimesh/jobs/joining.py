"""How a host joins by itself: `trimesh host join`, started by a person, a script or a scheduler."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from trimesh import limits
from trimesh.jobs.agent import AgentState, be_agent
from trimesh.jobs.identity import IdentityError
from trimesh.jobs.launcher import AgentOrder
from trimesh.jobs.pki import OwnPKI

RANK_VARIABLES: Final = (
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "RANK",
    "SKYPILOT_NODE_RANK",
)
"""What starters number their processes by: Open MPI, PMIx, MPICH and Intel MPI, srun, torchrun, SkyPilot."""

_LINE_BYTES_MAX: Final = 4096
_LOOK_SECONDS: Final = 0.1
"""Between two looks whether a token has come: no event tells of a folder that a kubelet writes through a symbolic link,
and who waits here does nothing else."""


def join(
    addresses: Sequence[str],
    token_file: str,
    line: int | None = None,
    *,
    wait: float | None = None,
    state_file: str | None = None,
    pki: OwnPKI | None = None,
) -> NoReturn:
    """Be an agent of this host until the program ends it, or a signal does; ends this process.

    Exit codes: 0 the program, or a signal, has said stop; 77 the host was refused, or the program is not there; 1 else.

    Args:
        addresses: Of the door, `host:port`, tried in order.
        token_file: "-" reads one line of standard input.
        line: Which line of the file, from 0 on; None takes the rank that a starter has set, else 0.
        wait: Wait for the file, until nothing has changed in its folder for so many seconds; None does not.
        state_file: Where to say "waiting", then "joined", and by its time that the agent runs; None says nothing.
        pki: Certificates of the user's; None gets one of the mesh.
    """
    state = None if state_file is None else AgentState(Path(state_file))

    def read_order() -> AgentOrder:
        if wait is not None:
            wait_for_token(Path(token_file), wait, state)
        token = read_token(token_file, rank_of(os.environ) if line is None else line)
        return AgentOrder(token, tuple(addresses), pki=pki)

    be_agent(read_order, has_lifeline=False, state=state)


def wait_for_token(path: Path, seconds: float, state: AgentState | None) -> None:
    """Wait until a file has come, or a signal.

    Raises:
        IdentityError: Nothing has changed in its folder for so many seconds: the program that is to write it is gone.
        KeyboardInterrupt: SIGTERM or SIGINT came.
    """

    def end(_signum: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    before = signal.signal(signal.SIGTERM, end)  # the first process of a container would not hear it
    try:
        until, changed = time.monotonic() + seconds, _changed(path.parent)
        told = -limits.AGENT_STATE_SECONDS
        while not _has_text(path):
            now = time.monotonic()
            if changed != (changed := _changed(path.parent)):
                until = now + seconds
            if now > until:
                raise IdentityError(
                    f"a token has to come to {path} while the program lives, and nothing has changed in its folder for "
                    f"{seconds:g} s"
                )
            if state is not None and now - told >= limits.AGENT_STATE_SECONDS:
                state.tell("waiting")
                told = now
            time.sleep(_LOOK_SECONDS)
    finally:
        signal.signal(signal.SIGTERM, before)


def _changed(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _has_text(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except OSError:
        return False


def rank_of(environ: Mapping[str, str]) -> int:
    """Return the number of this process among those that a starter has started; 0 where there is none."""
    for name in RANK_VARIABLES:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    return 0


def read_token(path: str, line: int) -> str:
    """Return a line of a file of tokens.

    Raises:
        IdentityError: It cannot be read, others can read it, or it has no such line.
    """
    if path == "-":
        return sys.stdin.readline(_LINE_BYTES_MAX)
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and not _is_private(found):
                raise IdentityError(
                    f"a file of join tokens needs to be readable by its owner, this user, only; got {path} of user "
                    f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; write: chmod 600 {path}"
                )
            lines = file.read().splitlines()
    except OSError as error:
        raise IdentityError(f"the tokens need to be in a readable file, got {path}: {error.strerror}") from error
    if not 0 <= line < len(lines):
        raise IdentityError(
            f"each host takes a line of its own: {path} has {len(lines)}, and this one, by its rank, would take line "
            f"{line}, counted from 0; write more by door.write_tokens(path, hosts), or say --line"
        )
    return lines[line]


def _is_private(found: os.stat_result) -> bool:
    """Tell whether this user only can read a file, or a group of this process to which root has given it.

    The files of a Secret belong to root, and to the group of the pod, if it has one.
    """
    if found.st_mode & 0o037 or found.st_uid not in (os.geteuid(), 0):
        return False
    return not found.st_mode & 0o040 or (found.st_uid == 0 and found.st_gid in (os.getegid(), *os.getgroups()))
