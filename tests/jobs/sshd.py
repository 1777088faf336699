"""An ssh server of its own for tests: on a loopback port, with its own keys, reached by a configuration of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from tests.jobs.ports import free_ports
from tests.patience import HANG_SECONDS

from trimesh import MeshErrorGroup, SpawnError, jobs, leaves

_PRIVILEGES = Path("/run/sshd")
"""A folder that sshd wants to exist where root runs it."""


def missing() -> str | None:
    """Return why no ssh server can be run here, or None."""
    for command in ("ssh", "ssh-keygen", "sshd"):
        if _path_of(command) is None:
            return f"there is no {command} (openssh-client, openssh-server)"
    if os.geteuid() == 0 and not _PRIVILEGES.is_dir():
        try:
            _PRIVILEGES.mkdir(mode=0o755)
        except OSError as error:
            return f"sshd of root needs {_PRIVILEGES}: {error}"
    return None


def _import_paths() -> str:
    """Return the import path of this process, which is that of the tree under test."""
    return ":".join(str(Path(one).absolute()) for one in os.environ.get("PYTHONPATH", "").split(":") if one)


def _set_env(path: str, *, imports: bool) -> str:
    said = [f"PATH={path}"] * bool(path) + [f"PYTHONPATH={_import_paths()}"] * (imports and bool(_import_paths()))
    return f"SetEnv {' '.join(said)}\n" if said else ""


def _path_of(command: str) -> str | None:
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


class SSHServer:
    """A running sshd.

    Args:
        address: Where it listens.
        prefix: Arguments before those of sshd: of a network namespace.
        names: Of hosts that are this server.
        more: Lines of its configuration.
        path: PATH of what it runs.
        imports: Whether that imports from where this process does.

    Attributes:
        config: Of clients: `n1`, `n2`, `n3` are this server, `behind` is it by way of `n1`.
        pid: Of the server.
    """

    def __init__(
        self,
        folder: Path,
        address: str = "127.0.0.1",
        prefix: Sequence[str] = (),
        names: str = "n1 n2 n3 behind",
        more: str = "",
        path: str = "",
        imports: bool = False,
    ) -> None:
        folder.chmod(0o700)
        self.folder = folder
        self._address = address
        [self.port] = free_ports(1)
        for name in ("host", "user", "stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)], check=True
            )
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        kind, key, _ = (folder / "host.pub").read_text().split()
        (folder / "known").write_text(f"[{address}]:{self.port} {kind} {key}\n")
        (folder / "sshd.conf").write_text(
            f"{more}Port {self.port}\nListenAddress {address}\nHostKey {folder}/host\nPidFile {folder}/pid\n"
            f"AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\nLogLevel VERBOSE\n"
            + _set_env(path, imports=imports)
        )
        self.config = folder / "ssh.conf"
        self.config.write_text(
            f"Host {names}\n  HostName {address}\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known\n"
            "  GlobalKnownHostsFile /dev/null\n  StrictHostKeyChecking yes\n"
            + ("Host behind\n  ProxyJump n1\n" if "behind" in names else "")
        )
        sshd = _path_of("sshd")
        assert sshd is not None
        self._process = subprocess.Popen(
            [*prefix, sshd, "-D", "-f", str(folder / "sshd.conf"), "-E", str(folder / "log")], stdin=subprocess.DEVNULL
        )
        self.pid = self._process.pid
        self._wait_listening()

    def _wait_listening(self) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                socket.create_connection((self._address, self.port)).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"sshd did not start: {(self.folder / 'log').read_text()}") from None
                time.sleep(0.02)
            else:
                return

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments of ssh that make it use this server's configuration."""
        return ("-F", str(self.config))

    @property
    def log(self) -> str:
        """What the server has written."""
        return (self.folder / "log").read_text()

    def wait_idle(self) -> None:
        """Wait until the server has no connection: it needs a moment to learn that a client has gone."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        deadline = time.monotonic() + HANG_SECONDS
        while children.read_text().strip():
            if time.monotonic() > deadline:
                raise RuntimeError(f"connections are left: {self.log}")
            time.sleep(0.01)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


async def failure_of(job: jobs.SSHJob) -> str:
    """Enter a job that cannot start, and return its one error."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(MeshErrorGroup) as caught:
        async with job:
            pytest.fail("the job has started")
    first, *_ = leaves(caught.value)
    assert isinstance(first, SpawnError)
    return str(first)
