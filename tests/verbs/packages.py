"""Debian packages, unpacked below a folder instead of installed."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import attrs

PACKAGES = (
    "qemu-system-x86",  # runs the machine
    "busybox-static",  # is all of its userspace until it has this machine's root
    "iproute2",  # `ip` and `rdma`
    "ibverbs-providers",  # the adapter's half of libibverbs
    "ibverbs-utils",
    "libucx0",
)

KERNEL = "linux-image-amd64"
"""Depends on the present kernel. Those for clouds have no rdma_rxe."""

STAMP = "unpacked.txt"
"""Written last, with what is there: a run that was cut off begins anew."""

APT_SECONDS_MAX = 300
"""100 MB at 3 Mbit/s."""


class UnavailableError(Exception):
    """What the machine needs cannot be had here; the text says what, and why."""


@attrs.frozen
class PackageTree:
    """The packages below one folder.

    Attributes:
        cache: Where everything lies.
    """

    cache: Path

    @property
    def root(self) -> Path:
        """Folder that looks like `/`, with what the packages bring."""
        return self.cache / "root"

    @property
    def libraries(self) -> Path:
        """Folder of their shared libraries."""
        return self.root / "usr" / "lib" / "x86_64-linux-gnu"

    def program(self, name: str) -> Path:
        """Return the path of a program: the one of the tree, else the installed one."""
        for folder in ("usr/bin", "usr/sbin"):
            path = self.root / folder / name
            if path.exists():
                return path
        installed = shutil.which(name)
        if installed is None:
            raise UnavailableError(f"neither the packages nor this machine have a program {name!r}")
        return Path(installed)

    def kernel(self) -> tuple[Path, Path]:
        """Return the paths of the kernel's image and of the folder of its modules."""
        (image,) = (self.root / "boot").glob("vmlinuz-*")
        return image, self.root / "usr" / "lib" / "modules" / image.name.removeprefix("vmlinuz-")

    def fetch(self) -> None:
        """Download and unpack what is not there yet.

        Raises:
            UnavailableError: It cannot be had.
        """
        wanted = "\n".join((*PACKAGES, KERNEL, ""))
        stamp = self.cache / STAMP
        if stamp.exists() and stamp.read_text() == wanted:
            return
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            raise UnavailableError(
                f"it is set up for Linux on x86_64, this is {platform.system()} {platform.machine()}"
            )
        for tool in ("apt-get", "apt-cache", "dpkg-deb", "tar"):
            if shutil.which(tool) is None:
                raise UnavailableError(f"it is made of Debian packages, and there is no {tool!r}")
        shutil.rmtree(self.cache, ignore_errors=True)
        self.root.mkdir(parents=True)
        print(f"fetching packages into {os.path.relpath(self.cache)} (about 100 MB, once)", flush=True)
        self._unpack(self._download())
        stamp.write_text(wanted)

    def _download(self) -> list[Path]:
        folder = self.cache / "archives"
        folder.mkdir()
        try:
            self._apt_get_download(folder, [])
        except UnavailableError:  # no lists here, or lists of what has been replaced since: take new ones, of our own
            lists = self.cache / "lists"
            own = ["-o", f"Dir::State::Lists={lists}"]
            (lists / "partial").mkdir(parents=True)
            self._run(["apt-get", *own, "update"], folder)
            self._apt_get_download(folder, own)
        return sorted(folder.glob("*.deb"))

    def _apt_get_download(self, folder: Path, options: list[str]) -> None:
        dependencies = self._run(["apt-cache", *options, "depends", KERNEL], folder)
        kernel = re.search(r"Depends: (linux-image-\S+)", dependencies)
        if kernel is None:
            raise UnavailableError(f"apt knows no package {KERNEL!r}")
        plan = self._run(["apt-get", *options, "-s", "--no-install-recommends", "install", *PACKAGES], folder)
        missing = re.findall(r"^Inst (\S+)", plan, re.MULTILINE)
        self._run(["apt-get", *options, "download", *missing, kernel[1]], folder)

    def _run(self, command: list[str], folder: Path) -> str:
        # Nothing of the system is written to, so none of its locks are needed.
        program, *rest = command
        ours = ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=root", "-o", f"Dir::Cache={self.cache / 'apt'}"]
        (self.cache / "apt" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"LC_ALL": "C"}
        try:
            done = subprocess.run(
                [program, *ours, *rest],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=APT_SECONDS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UnavailableError(f"{program} took more than {APT_SECONDS_MAX} s") from error
        failures = re.findall(r"^(?:E|W): .*", done.stderr, re.MULTILINE)
        if done.returncode or any("Failed to fetch" in line for line in failures):
            reason = failures[0] if failures else done.stderr.strip()
            raise UnavailableError(f"{program} failed: {reason}")
        return done.stdout

    def _unpack(self, archives: list[Path]) -> None:
        for name in ("bin", "sbin", "lib", "lib64"):  # as on a machine of today, whose root this will be laid over
            (self.root / "usr" / name).mkdir(parents=True, exist_ok=True)
            (self.root / name).symlink_to(f"usr/{name}")
        for archive in archives:
            with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as reading:
                subprocess.run(
                    ["tar", "--extract", "--keep-directory-symlink", "--no-same-owner", "--directory", self.root],
                    stdin=reading.stdout,
                    check=True,
                )
            if reading.returncode:
                raise UnavailableError(f"dpkg-deb could not unpack {archive.name}")
            archive.unlink()
