"""How a host joins by itself: `trimesh host join`, started by a person, a script or a scheduler."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

from trimesh.jobs.agent import be_agent
from trimesh.jobs.identity import IdentityError
from trimesh.jobs.launcher import AgentOrder

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


def join(addresses: Sequence[str], token_file: str, line: int | None = None) -> NoReturn:
    """Be an agent of this host until the program ends it, or a signal does; ends this process.

    Exit codes: 0 the program, or a signal, has said stop; 77 the host was refused, or the program is not there; 1 else.

    Args:
        addresses: Of the door, `host:port`, tried in order.
        token_file: "-" reads one line of standard input.
        line: Which line of the file, from 0 on; None takes the rank that a starter has set, else 0.
    """

    def read_order() -> AgentOrder:
        return AgentOrder(read_token(token_file, rank_of(os.environ) if line is None else line), tuple(addresses))

    be_agent(read_order, has_lifeline=False)


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
            if stat.S_ISREG(found.st_mode) and (found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0)):
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
