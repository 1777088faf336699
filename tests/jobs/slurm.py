"""A Slurm of its own for tests: a controller and two nodes on this machine, on loopback ports, with their own munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.jobs.ports import free_ports
from tests.patience import HANG_SECONDS

_COMMANDS = ("salloc", "srun", "scancel", "scontrol", "sinfo", "squeue", "slurmctld", "slurmd", "munged")


def missing() -> str | None:
    """Return why no Slurm can be run here, or None."""
    for command in _COMMANDS:
        if _path_of(command) is None:
            return f"there is no {command} (slurm-wlm, munge)"
    return None if os.geteuid() == 0 else "slurmd of another user than root starts no jobs"


def _path_of(command: str) -> str | None:
    return shutil.which(command) or shutil.which(command, path="/usr/sbin:/sbin")


class SlurmCluster:
    """A running Slurm of two nodes.

    Attributes:
        env: Environment variables by which the commands of Slurm find it.
    """

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.folder = folder
        self.env: Mapping[str, str] = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "spool", "log"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        munge = folder / "munge.sock"
        self._run(
            *("munged", "-F", "--force", f"--key-file={folder}/munge.key", f"--socket={munge}"),
            *(f"--pid-file={folder}/munge.pid", f"--log-file={folder}/log/munge", f"--seed-file={folder}/seed"),
        )
        self._wait(munge.exists)
        ports = free_ports(3)
        (folder / "slurm.conf").write_text(
            f"ClusterName=tm\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/munge\n"
            f"AuthInfo=socket={munge}\nCredType=cred/munge\nSlurmctldPort={ports[0]}\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\n"
            f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/slurmd-%n.pid\n"
            "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n"
            "SelectTypeParameters=CR_Core\nSchedulerType=sched/backfill\n"
            "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1\nMpiDefault=none\nReturnToService=2\n"
            "SlurmdTimeout=10\nKillWait=2\nAccountingStorageType=accounting_storage/none\n"
            "JobAcctGatherType=jobacct_gather/none\n"
            f"NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000\n"
            f"NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000\n"
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
        )
        self.start("slurmctld")
        for node in ("n1", "n2"):
            self.start(f"slurmd {node}")
        self._wait(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")

    def start(self, name: str) -> None:
        """Start a daemon: "slurmctld", "slurmd n1", "slurmd n2"; also again, after `kill`."""
        command, *node = name.split()
        self._run(command, "-D", *(argument for one in node for argument in ("-N", one)), "-f", self.env["SLURM_CONF"])

    def kill(self, name: str) -> None:
        """End a daemon by SIGKILL."""
        daemon = self._daemons[name]
        daemon.kill()
        daemon.wait()

    def _run(self, *command: str) -> None:
        path = _path_of(command[0])
        assert path is not None
        name = " ".join([command[0], *(one for one in command if one in ("n1", "n2"))])
        with (self.folder / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *command[1:]],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait(self, is_so: object) -> None:
        assert callable(is_so)
        deadline = time.monotonic() + HANG_SECONDS
        while not is_so():
            if time.monotonic() > deadline or any(one.poll() is not None for one in self._daemons.values()):
                logs = [f"{path.name}: {path.read_text()[-500:]}" for path in (self.folder / "log").iterdir()]
                raise RuntimeError("Slurm did not start: " + "\n".join(logs))
            time.sleep(0.05)

    def ask(self, *command: str) -> str:
        """Run a command of Slurm, and return what it writes."""
        done = subprocess.run(
            command, env={**os.environ, **self.env}, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
        )
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the jobs that are queued, run, or are being ended."""
        return self.ask("squeue", "-h", "-o", "%i %j %T").splitlines()

    def wait_for(self, state: str, *, is_so: bool = True) -> None:
        """Wait until a job is in a state, or none is."""
        self._wait(lambda: any(line.endswith(state) for line in self.jobs()) == is_so)

    def wait_idle(self) -> None:
        """Wait until no job is left."""
        self._wait(lambda: not self.jobs() and self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2")

    def close(self) -> None:
        """End its daemons, those of nodes first, munge last."""
        for daemon in reversed(list(self._daemons.values())):
            daemon.terminate()
            daemon.wait()
