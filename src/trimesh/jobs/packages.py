"""`HostMesh.install`: Python environments on hosts, each made once for all jobs of a user.

    ~/.cache/trimesh/environments/<digest>/           as venv or uv make it
                                  <digest>/whole      its entries of `sys.path`; written last
                                  <digest>.lock       held shared by its users, exclusively to make or remove it

EP-1 An environment is used only if it is whole. One that is neither whole nor locked was left by a killed job: it is
     made anew.
EP-2 It is made at its final place, as its programs name their interpreter by its absolute path.
EP-3 Only environments unused for `limits.ENVIRONMENT_KEPT_SECONDS`, and locked by no process, are removed.

Requirements as sent to hosts: a requirements file with the files that it includes, or uv's lock file.

    requirements.txt --> 0.txt, with `-r 1.txt` in place of `-r base.txt`; 1.txt
    uv.lock          --> uv.lock and pyproject.toml, for hosts with uv; and 0.txt for hosts with pip only, which the uv
                         of this machine exports

Requirements that name files of this machine only are refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors import current_rank
from trimesh._runtime.channels import Port
from trimesh._runtime.life import HostCode, JobHosts, Proc, current_proc
from trimesh._runtime.system import LineCutter, Tail, run_process
from trimesh._runtime.watch import showing
from trimesh.actor.actor import Actor
from trimesh.actor.channel import open_channel
from trimesh.actor.endpoint import endpoint
from trimesh.actor.host_mesh import HostMesh
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError
from trimesh.jobs.code.folder import LockedByFile, cache_folder, make_own_folder

_WHOLE: Final = "whole"
_LOCK: Final = ".lock"


def environments_folder() -> Path:
    """Return the folder of this user, and make it if it is missing: `$XDG_CACHE_HOME/trimesh/environments`.

    Raises:
        OSError: See `make_own_folder`.
    """
    place = cache_folder("environments")
    make_own_folder(place)
    return place


def environment_name(digest: str) -> str:
    """Return the name of the environment for requirements, this interpreter and this kind of machine."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    host = (sys.version, base, platform.machine(), "-".join(platform.libc_ver()))
    return hashlib.sha256(msgspec.json.encode((digest, host))).hexdigest()[:40]


class Environment(LockedByFile):
    """One environment. Its methods block on file I/O; call slow ones in a thread.

    Users of the environment hold its lock shared; making and removing it takes the lock exclusively.

    Args:
        folder: Folder of all environments.
        name: See `environment_name`.

    Attributes:
        place: Path of the environment.
    """

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder / f"{name}{_LOCK}")
        self.place = folder / name

    @property
    def paths(self) -> tuple[str, ...] | None:
        """Entries of `sys.path` for its packages; None if it is not whole."""
        try:
            return msgspec.json.decode((self.place / _WHOLE).read_bytes(), type=tuple[str, ...])
        except (OSError, msgspec.DecodeError):
            return None

    def begin(self) -> None:
        """Remove its folder, to make it anew; needs the exclusive lock."""
        shutil.rmtree(self.place, ignore_errors=True)

    def finish(self, paths: tuple[str, ...]) -> None:
        """Mark the environment as whole."""
        draft = self.place / f"{_WHOLE}.draft"
        draft.write_bytes(msgspec.json.encode(paths))
        draft.rename(self.place / _WHOLE)

    def touch(self) -> None:
        """Mark the environment as used now."""
        os.utime(self.place / _WHOLE)

    def _remove_unused(self, before: float) -> None:
        if not self.lock_alone():
            return
        try:
            used = (self.place / _WHOLE).stat().st_mtime
        except OSError:
            used = 0.0
        if used < before:
            shutil.rmtree(self.place, ignore_errors=True)
            self._lock_place.unlink(missing_ok=True)


def prune(folder: Path, kept_seconds: float) -> None:
    """Remove environments unused for `kept_seconds`, and incomplete ones that killed jobs have left."""
    before = time.time() - kept_seconds
    for lock in folder.glob(f"*{_LOCK}"):
        one = Environment(folder, lock.name.removesuffix(_LOCK))
        with suppress(OSError):
            one._remove_unused(before)  # noqa: SLF001 - of this file
        one.close()


# ---- the host's side of `HostMesh.install`: the actor that makes or finds an environment, and marks it as used -------

Said = tuple[int, str]
"""Rank of a host, and an output line of uv or pip there."""

_ELSEWHERE: Final = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables by which pip or uv would install to another place."""

_SYNC: Final = ("--frozen", "--no-dev", "--no-install-workspace", "--compile-bytecode")
"""Options of uv: install the packages of the lock file without changing it, except those of the project itself."""

_PATHS: Final = (
    "import sys, json; b = sys.base_prefix.rstrip('/') + '/'; p = sys.prefix.rstrip('/') + '/'; "
    "print(json.dumps([x for x in sys.path if (x + '/').startswith(p) or not (x + '/').startswith(b)]))"
)
"""Program that prints the entries that an environment adds to `sys.path`, also by its `*.pth` files."""


class Installer(Actor):
    """Makes or finds the environment of its host, and holds it."""

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._said: Port[Said]

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Mark the environment as used while this actor lives; at the end remove environments unused for long."""
        self._folder = await trio.to_thread.run_sync(environments_folder)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._touch)
                yield
                nursery.cancel_scope.cancel(reason="the block of the packages is left")
        finally:
            if self._environment is not None:
                self._environment.close()
        await trio.to_thread.run_sync(prune, self._folder, limits.ENVIRONMENT_KEPT_SECONDS)

    async def _touch(self) -> None:
        while True:
            await trio.sleep(limits.CODE_TOUCH_SECONDS)
            if self._environment is not None and self._environment.paths is not None:
                self._environment.touch()

    @endpoint
    async def make(
        self, files: Mapping[str, str], digest: str, name: str, said: Port[Said]
    ) -> tuple[list[str], dict[str, str], bool]:
        """Make the environment, or wait until another job has made it, and hold it.

        Args:
            files: See `Requirements.files`.
            digest: See `Requirements.digest`.
            name: Name of the given file.
            said: Receives the output of uv or pip.

        Returns:
            Entries of `sys.path`, environment variables, and whether the environment was made now.

        Raises:
            SpawnError: uv or pip failed; the message includes the end of their output.
        """
        self._said = said
        try:
            return await self._get(files, digest, name)
        finally:
            said.close()

    async def _get(self, files: Mapping[str, str], digest: str, name: str) -> tuple[list[str], dict[str, str], bool]:
        environment = self._environment = Environment(self._folder, environment_name(digest))
        made = False
        while True:
            while not environment.lock_shared():  # noqa: ASYNC110 - another process sets no event here
                await trio.sleep(limits.ENVIRONMENT_LOCK_RETRY_SECONDS)
            if (paths := environment.paths) is not None:
                break
            if not environment.lock_alone():  # a failed upgrade may lose the shared lock: take it again
                await trio.sleep(limits.ENVIRONMENT_LOCK_RETRY_SECONDS)
                continue
            if environment.paths is None:
                await self._make(environment, files, name)
                made = True
        environment.touch()
        bin_folder = str(environment.place / "bin")
        path = os.environ.get("PATH", os.defpath)
        variables = {"VIRTUAL_ENV": str(environment.place), "PATH": f"{bin_folder}{os.pathsep}{path}"}
        return list(paths), variables, made

    async def _make(self, environment: Environment, files: Mapping[str, str], name: str) -> None:
        try:
            await trio.to_thread.run_sync(environment.begin)
            with tempfile.TemporaryDirectory(prefix="trimesh-requirements-") as folder:
                for one, text in files.items():
                    await trio.Path(folder, one).write_text(text, encoding="utf-8")
                await self._install(environment.place, folder, name, has_lock=LOCK in files)
            python = str(environment.place / "bin" / "python")
            found = await run_process([python, "-I", "-c", _PATHS], capture_stdout=True)
            environment.finish(msgspec.json.decode(found.stdout, type=tuple[str, ...]))
        except BaseException:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(environment.begin)
            raise

    async def _install(self, place: Path, folder: str, name: str, *, has_lock: bool) -> None:
        python, uv = str(place / "bin" / "python"), _uv()
        if uv is None and not await trio.Path(folder, FIRST).exists():
            raise SpawnError(
                f"{name} needs uv, and neither the program's machine nor this host has it: install uv on one of them, "
                "or pass a requirements.txt (`uv export --format requirements.txt`)"
            )
        if uv is not None:
            if has_lock:
                sync = [uv, "sync", *_SYNC, "--python", sys.executable]
                await self._run(sync, folder, name, UV_PROJECT_ENVIRONMENT=str(place))
                return
            await self._run([uv, "venv", "--python", sys.executable, str(place)], folder, name)
            install = [uv, "pip", "install", "--compile-bytecode", "--python", python]
        else:
            has_pip = importlib.util.find_spec("pip") is not None
            alone = ["--without-pip"] if has_pip else []
            await self._run([sys.executable, "-m", "venv", *alone, str(place)], folder, name)
            pip = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
            install = [*pip, "--no-input", "--disable-pip-version-check", "install"]
        await self._run([*install, "-r", FIRST], folder, name)

    async def _run(self, command: Sequence[str], folder: str, name: str, **variables: str) -> None:
        """Run a step, and pass on its output.

        Raises:
            SpawnError: It failed.
        """
        env = {key: value for key, value in os.environ.items() if key not in _ELSEWHERE}
        words, codes = Tail(), list[int]()
        async with trio.open_nursery() as nursery:

            async def keep(task_status: trio.TaskStatus[trio.Process]) -> None:
                done = await run_process(
                    list(command),
                    check=False,
                    task_status=task_status,
                    cwd=folder,
                    env={**env, "NO_COLOR": "1", **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
                codes.append(done.returncode)

            process = cast("trio.Process", await nursery.start(keep))
            assert process.stdout is not None
            await self._hand_on(process.stdout, words)
        if codes != [0]:
            tool = "uv" if Path(command[0]).name == "uv" else "pip" if "pip" in command else "venv"
            last = words.read().decode(errors="replace").strip()
            raise SpawnError(f"{tool} cannot install {name} (exit code {codes[0]}); its last words: {last}")

    async def _hand_on(self, pipe: Any, words: Tail) -> None:
        cutter = LineCutter()
        async with pipe:
            while data := await pipe.receive_some(limits.OUTPUT_BATCH_BYTES_MAX):
                words.feed(data)
                for line in cutter.feed(data, trio.current_time()):
                    if line.strip():
                        await self._said.send((current_rank(), line.decode(errors="replace").strip()))


def _uv() -> str | None:
    own = Path.home() / ".local" / "bin"  # where uv's installer puts it, which is not on the PATH of ssh commands
    return shutil.which("uv") or shutil.which("uv", path=str(own))


# ---- the program's side of `HostMesh.install` ------------------------------------------------------------------------

_KIND: Final = "install"
Made = list[tuple[list[str], dict[str, str], bool]]


class Installation:
    """Packages on hosts, while their block is open; see `HostMesh.install`.

    Attributes:
        digest: Digest of the file and those that it includes.
        made: Number of hosts that made the environment; the others had it.
    """

    def __init__(self, digest: str, made: int) -> None:
        self.digest = digest
        self.made = made

    def __repr__(self) -> str:
        return f"<installed packages {self.digest[:12]}>"


@asynccontextmanager
async def install(
    hosts: HostMesh, job: JobHosts | None, file: str | os.PathLike[str]
) -> AsyncGenerator[Installation, None]:
    """Install packages on hosts; see `HostMesh.install`."""
    if job is None:
        raise ValueError(
            "install() needs the hosts of a job, got this host: write `async with job as hosts:`, or use uv or pip here"
        )
    proc = current_proc()
    if proc.is_simulated:  # its hosts are this process
        yield Installation(read_requirements(file).digest, 0)
        return
    found = await trio.to_thread.run_sync(read_requirements, file)
    job.check_no_code(_KIND)
    async with hosts.spawn_procs({}, name="packages") as procs, procs.spawn("packages", Installer) as installers:
        made = await _make(hosts, proc, installers, found)
        codes = [HostCode((), env, tuple(map(os.fsencode, paths))) for paths, env, _ in made]
        job.set_code(_KIND, codes)
        try:
            yield Installation(found.digest, sum(is_made for _, _, is_made in made))
        finally:
            job.set_code(_KIND, [None] * len(hosts))


async def _make(hosts: HostMesh, proc: Proc, installers: Installer, found: Requirements) -> Made:
    outcomes = list[Made | Exception]()
    item: Any = Said
    channel = open_channel(item, capacity=limits.COMMAND_BATCHES)
    with showing(proc, f"installing {found.name} on the hosts") as progress:
        async with channel as (port, receiver), trio.open_nursery() as nursery:

            async def call() -> None:
                try:
                    outcomes.append(list(await installers.make.call(found.files, found.digest, found.name, port)))
                except Exception as error:  # noqa: BLE001 - raised below: the nursery would wrap it
                    outcomes.append(error)
                finally:
                    port.close()

            nursery.start_soon(call)
            async for rank, text in receiver:
                progress.title = f"installing {found.name}, {hosts.names[rank]}: {text[: limits.INSTALL_WORDS_MAX]}"
    [outcome] = outcomes
    if isinstance(outcome, Exception):
        try:
            raise outcome
        finally:
            del outcome, outcomes
    return outcome


# ---- requirements as sent to hosts -----------------------------------------------------------------------------------

FIRST: Final = "0.txt"
LOCK: Final = "uv.lock"
PROJECT: Final = "pyproject.toml"
_EXPORT: Final = ("export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--quiet", "--project")
"""Options of uv: list the packages of the lock file, except those of the project itself."""

_TAKES_IN: Final = re.compile(r"(\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc])))(\S+)(.*)", re.DOTALL)
_IS_HERE: Final = re.compile(r"\s*(?:-e\b|--editable\b|\.{1,2}(?:/|\s|$)|(?:-f|--find-links)(?:\s+|=)?(?!/|\w+:)\S)")


class Requirements(msgspec.Struct, frozen=True):
    """Files that list the packages to install.

    Attributes:
        files: Texts of the files by the names that they get on hosts.
        name: Name of the given file, for errors.
    """

    files: Mapping[str, str]
    name: str

    @property
    def digest(self) -> str:
        said = [one for one in sorted(self.files.items()) if LOCK not in self.files or one[0] != FIRST]
        return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:40]


def read_requirements(file: str | os.PathLike[str]) -> Requirements:
    """Read a file and those that it includes. Blocking: reads files and may run uv; call it in a thread.

    Raises:
        OSError: A file cannot be read, or uv fails.
        ValueError: The files are too many or too large, or name a path that exists only on this machine.
    """
    path = Path(file)
    if path.name != LOCK:
        return Requirements(_Reader().read(path), path.name)
    project = path.with_name(PROJECT)
    texts = {LOCK: _text_of(path), PROJECT: _text_of(project)}
    uv = shutil.which("uv")
    if uv is None:
        return Requirements(texts, path.name)
    command = [uv, *_EXPORT, os.fspath(path.parent.resolve())]
    done = subprocess.run(  # noqa: S603 - uv of this machine, with a path that the program names
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=limits.UV_EXPORT_SECONDS
    )
    if done.returncode != 0:
        raise OSError(f"uv cannot read {path}: {done.stderr.strip()}")
    _check_is_anywhere(done.stdout, path)
    return Requirements({**texts, FIRST: done.stdout}, path.name)


class _Reader:
    """Reads a file and those that it includes, each once, and numbers them: `0.txt`, `1.txt`."""

    def __init__(self) -> None:
        self._names = dict[Path, str]()
        self._texts = dict[str, str]()

    def read(self, path: Path) -> Mapping[str, str]:
        self._add(path.absolute())
        return self._texts

    def _add(self, path: Path) -> str:
        path = Path(os.path.normpath(path))
        if path in self._names:
            return self._names[path]
        if len(self._names) >= limits.REQUIREMENT_FILES_MAX:
            most = f"limits.REQUIREMENT_FILES_MAX ({limits.REQUIREMENT_FILES_MAX})"
            raise ValueError(f"requirements must be at most {most} files, and {path} is one more")
        name = self._names[path] = f"{len(self._names)}.txt"
        text = _text_of(path)
        _check_is_anywhere(text, path)
        self._texts[name] = "".join(self._line(line, path.parent) for line in text.splitlines(keepends=True))
        return name

    def _line(self, line: str, folder: Path) -> str:
        found = _TAKES_IN.fullmatch(line)
        if found is None or re.match(r"\w+://", found[2]):
            return line
        return f"{found[1]}{self._add(folder / found[2])}{found[3]}"


def _text_of(path: Path) -> str:
    size = path.stat().st_size
    if size > limits.REQUIREMENTS_BYTES_MAX:
        raise ValueError(
            f"a file of requirements must have at most limits.REQUIREMENTS_BYTES_MAX ({limits.REQUIREMENTS_BYTES_MAX}) "
            f"bytes, got {path} with {size}"
        )
    return path.read_text(encoding="utf-8")


def _check_is_anywhere(text: str, path: Path) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if _IS_HERE.match(line):
            raise ValueError(
                f"hosts.install takes packages that hosts can get, and {path}:{number} names a folder of this machine: "
                f"{line.strip()!r}; send code by hosts.sync, or name a folder that all hosts have by its absolute path"
            )
