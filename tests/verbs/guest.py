"""The emulated machine."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
from tests.verbs import initrd
from tests.verbs.packages import PackageTree

SCRIPTS = Path(__file__).parent

MEMORY_MIB = 4096
"""Interpreters, and what tests write in place of the disk."""

PASSED = re.compile("PYTHON.*|TRIMESH_.*|UCX_.*|CI|PYTEST_ADDOPTS")
"""Names of the variables that the command there gets from here."""

PR_SET_PDEATHSIG = 1


@attrs.frozen
class Guest:
    """A machine that boots this one's root.

    Attributes:
        tree: Where its kernel, its emulator and its RDMA libraries come from.
        folder: Where its command runs.
    """

    tree: PackageTree
    folder: Path

    def run(self, command: str, seconds: float) -> int:
        """Boot it, run a command of bash there, and end it.

        Output goes to standard output.

        Returns:
            The command's exit status; 124 if it took longer than `seconds`, 125 if the machine did not come so far.
        """
        image, modules = self.tree.kernel()
        texts = {"init": (SCRIPTS / "init.sh").read_text(), "job": self._job(command)}
        with tempfile.TemporaryDirectory(prefix="trimesh-verbs-") as name:
            archive, console = Path(name) / "initrd", Path(name) / "console"
            archive.write_bytes(initrd.build(self.tree.program("busybox"), modules, texts))
            emulator = subprocess.Popen(
                self._command_line(image, archive, console),
                env=os.environ | {"LD_LIBRARY_PATH": str(self.tree.libraries)},
                stdin=subprocess.DEVNULL,
                preexec_fn=end_with_parent,  # noqa: PLW1509 - there is one thread
            )
            try:
                emulator.wait(seconds)
            except subprocess.TimeoutExpired:
                said = console.read_text(errors="replace")
                print(f"the machine was ended after {seconds:g} s; its console:\n{said}", file=sys.stderr)
                return 124
            finally:
                emulator.kill()
                emulator.wait()
                log = console.read_text(errors="replace") if console.exists() else ""
        ended = re.search(r"^the command ended with (\d+)", log, re.MULTILINE)
        if ended is None:
            print(f"the machine never ran the command; its console:\n{log}", file=sys.stderr)
            return 125
        return int(ended[1])

    def _job(self, command: str) -> str:
        variables = {name: value for name, value in os.environ.items() if PASSED.fullmatch(name)}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        return "\n".join(
            [(SCRIPTS / "inside.sh").read_text(), *lines, f"cd {shlex.quote(str(self.folder))}", command, ""]
        )

    def _command_line(self, image: Path, archive: Path, console: Path) -> list[str]:
        shares = {"host": Path("/"), "tree": self.tree.root}
        firmware = ("qemu", "seabios")  # where the packages put it
        return [
            str(self.tree.program("qemu-system-x86_64")),
            *("-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MIB)),
            *("-nodefaults", "-no-reboot", "-display", "none", "-no-user-config"),
            *(part for name in firmware for part in ("-L", str(self.tree.root / "usr" / "share" / name))),
            *("-serial", f"file:{console}", "-serial", "stdio"),
            *("-kernel", str(image), "-initrd", str(archive)),
            *("-append", "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable"),
            *(part for tag, path in shares.items() for part in share(tag, path)),
        ]


def share(tag: str, path: Path) -> tuple[str, ...]:
    """Return the arguments that let the machine read a folder of this one."""
    name = str(path).replace(",", ",,")
    return (
        *("-fsdev", f"local,id={tag},path={name},security_model=none,readonly=on,multidevs=remap"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    )


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
