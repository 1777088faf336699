"""A door for hosts that are started by others: they join by a token each, and become a mesh when one is asked for."""

from __future__ import annotations

import os
import shlex
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from trimesh.actor.host_mesh import HostMesh
from trimesh.actor.spawning import Spawning
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import HostRefused
from trimesh.jobs.addresses import checked_address, with_port
from trimesh.jobs.job import Pickle, checked_hosts, checked_pki
from trimesh.jobs.pki import OwnPKI, checked_insecure
from trimesh.plain_numbers import whole_number

if TYPE_CHECKING:
    from trimesh.jobs.door_run import DoorRun


class OpenDoor:
    """Where hosts join that are started by others. Made by `open_door`; used while its block is open."""

    def __init__(self, run: DoorRun) -> None:
        self._run = run

    @property
    def addresses(self) -> tuple[str, ...]:
        """What hosts dial, `host:port`, in order."""
        return self._run.addresses

    @property
    def command(self) -> str:
        """What starts an agent on a host; it reads a token from its standard input."""
        pki = () if self._run.pki is None else self._run.pki.arguments
        return shlex.join(("trimesh", "host", "join", *self.addresses, "--token-file", "-", *pki))

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of the hosts that have joined and that no block has taken, in the order in which they have come."""
        return tuple(one.name for one in self._run.waiting)

    @property
    def refusals(self) -> tuple[HostRefused, ...]:
        """Why hosts were not let in: the last `limits.DOOR_REFUSALS_KEPT`. The hosts themselves hear less."""
        return tuple(self._run.refusals)

    def token(self) -> str:
        """Return a new token, one line: a secret that lets in one host, within `limits.JOIN_TOKEN_SECONDS`.

        It goes to the standard input of `trimesh host join`, into a file of mode 0600, or into a Secret; never into
        arguments or the environment.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` are out.
        """
        return self._run.new_token()

    def write_tokens(self, path: str | os.PathLike[str], count: int) -> None:
        """Write tokens for some hosts into a new file of mode 0600, one a line.

        `trimesh host join ... --token-file PATH` takes the line of its rank, as mpirun, srun or torchrun number it.

        Args:
            path: It must not exist.
            count: How many hosts.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` are out.
            OSError: The file exists, or cannot be written.
        """
        lines = "".join(f"{self.token()}\n" for _ in range(count))
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(lines)

    def expect(self, hosts: int | Mapping[str, int]) -> Spawning[HostMesh]:
        """Wait for hosts: `async with door.expect(2) as hosts:`.

        The block takes those that have joined first, and owns them: leaving it ends their agents. Blocks that wait at
        the same time are served in turn. There is no bound of time: write `with trio.fail_after(...)` around it.

        Args:
            hosts: How many, or a mapping of mesh names to numbers, see `LocalJob`.

        Raises:
            TypeError, ValueError: `hosts` is neither.
            MeshErrorGroup: On entering, when a host came and was refused: with a `HostRefused`.
        """
        checked = checked_hosts(hosts)

        @asynccontextmanager
        async def open_() -> AsyncGenerator[HostMesh, None]:
            async with self._run.taken(checked) as mesh:
                yield mesh

        return Spawning(f"expect({hosts!r})", open_, _adopt)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to travel.

        Raises:
            TypeError: Always.
        """
        del protocol
        raise TypeError("a door is used by the program that has opened it, and does not travel: send `door.addresses`")

    def __repr__(self) -> str:
        return f"<door at {', '.join(self.addresses)}, {len(self._run.waiting)} hosts wait>"


def open_door(
    interface: str | None = None,
    *,
    port: int = 0,
    advertise: str | Sequence[str] = (),
    pickle: Pickle | None = None,
    pki: OwnPKI | None = None,
    insecure: str = "",
) -> Spawning[OpenDoor]:
    """Let hosts join that others start: `async with jobs.open_door() as door:`.

    Entering starts nothing but a port that listens while the block is open. `door.command` and `door.token()` are for
    whoever starts the hosts, `door.expect(2)` gives them as a mesh.

    Args:
        interface: Where it listens: an address of this machine, its name, or the name of an interface; None takes the
            address of the default route.
        port: 0 lets the system choose.
        advertise: What hosts dial, `host` or `host:port`, where they reach this machine by another address.
        pickle: "off" lets no byte be unpickled in the family, see `spawn_procs`; None takes the setting.
        pki: Certificates of your own authority, by files; None lets the door make its own. Hosts name their files by
            options of `trimesh host join`, as `door.command` shows.
        insecure: "I understand" does without TLS, see `LocalJob`; tokens of such a door say so to its hosts.

    Raises:
        MeshErrorGroup: On entering, when it cannot listen there, or cannot read a file of `pki`.
    """
    checked_pki(None, None, pki)
    checked_insecure(insecure, pki)
    if pickle not in (None, "on", "off"):
        raise ValueError(f'pickle must be "on" or "off", or left out, got {pickle!r}')
    number = whole_number(port)
    if number is None or not 0 <= number < 1 << 16:
        raise ValueError(f"port must be a number from 0 (the system chooses) to 65535, got {port!r}")
    advertised = (advertise,) if isinstance(advertise, str) else tuple(advertise)
    for one in advertised:
        checked_address(with_port(one, port or 1))

    @asynccontextmanager
    async def open_() -> AsyncGenerator[OpenDoor, None]:
        from trimesh.jobs.door_run import open_door_run  # noqa: PLC0415 - the native library is loaded by it

        pickled = None if pickle is None else pickle == "on"
        async with open_door_run(interface, port, advertised, pickled=pickled, pki=pki, insecure=insecure) as run:
            yield OpenDoor(run)

    return Spawning("open_door()", open_, _adopt_door)


async def _adopt() -> HostMesh:
    raise RuntimeError("hosts that are expected need a block: write `async with door.expect(2) as hosts:`")


async def _adopt_door() -> OpenDoor:
    raise RuntimeError("a door needs a block: write `async with open_door() as door:`")
