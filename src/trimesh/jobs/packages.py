"""`HostMesh.install`: Python environments on hosts, each made once for all jobs of a user.

    ~/.cache/trimesh/environments/<digest>/           as venv or uv make it
                                  <digest>/whole      where its packages are; written last
                                  <digest>.lock       held shared by who uses it, alone by who makes or removes it

EP-1 An environment is used once it is whole. One that is not, and is locked by none, is what a killed job has left: it
     is made anew.
EP-2 It is made where it is used, as its programs name their interpreter by its whole path.
EP-3 Only environments unused for `limits.ENVIRONMENT_KEPT_SECONDS`, and locked by no process, are removed.

Requirements as sent to hosts: a requirements file with the files that it includes, or uv's lock file.

    requirements.txt --> 0.txt, with `-r 1.txt` in place of `-r base.txt`; 1.txt
    uv.lock          --> uv.lock, pyproject.toml, for the uv of a host; and 0.txt, which the uv of this machine makes of
                         them for a host that has pip

Nothing of it is on this machine only.
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
    """Return the folder of this user, made where it is not there: `$XDG_CACHE_HOME/trimesh/environments`.

    Raises:
        OSError: See `make_own_folder`.
    """
    place = cache_folder("environments")
    make_own_folder(place)
    return place


def environment_name(digest: str) -> str:
    """Return the name of the environment of requirements, of this interpreter, on this kind of machine."""
    base: str = getattr(sys, "_base_executable", sys.executable)
    host = (sys.version, base, platform.machine(), "-".join(platform.libc_ver()))
    return hashlib.sha256(msgspec.json.encode((digest, host))).hexdigest()[:40]


class Environment(LockedByFile):
    """One environment. Its methods read and write files; what takes long is run in a thread.

    It is locked shared by who uses it, alone by who makes or removes it.

    Args:
        folder: Of all of them.
        name: See `environment_name`.

    Attributes:
        place: Of it.
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
        """Note that it is whole."""
        draft = self.place / f"{_WHOLE}.draft"
        draft.write_bytes(msgspec.json.encode(paths))
        draft.rename(self.place / _WHOLE)

    def touch(self) -> None:
        """Note that it is in use."""
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
    """Remove environments that were not in use for so long, and what killed jobs have left of some."""
    before = time.time() - kept_seconds
    for lock in folder.glob(f"*{_LOCK}"):
        one = Environment(folder, lock.name.removesuffix(_LOCK))
        with suppress(OSError):
            one._remove_unused(before)  # noqa: SLF001 - of this file
        one.close()


# ---- installer -------------------------------------------------------------------------------------------------------

# The host's side of `HostMesh.install`: the actor that makes an environment, or finds it made, and keeps it in use.

Said = tuple[int, str]
"""The rank of a host, and a line of uv or pip there."""

_ELSEWHERE: Final = ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables by which pip or uv would install to another place."""

_SYNC: Final = ("--frozen", "--no-dev", "--no-install-workspace", "--compile-bytecode")
"""Of uv: packages of a lock as it is, but for those of the project itself."""

_PATHS: Final = (
    "import sys, json; b = sys.base_prefix.rstrip('/') + '/'; p = sys.prefix.rstrip('/') + '/'; "
    "print(json.dumps([x for x in sys.path if (x + '/').startswith(p) or not (x + '/').startswith(b)]))"
)
"""What an environment adds to `sys.path`, its files `*.pth` included."""


class Installer(Actor):
    """Has the environment of its host."""

    def __init__(self) -> None:
        self._environment: Environment | None = None
        self._said: Port[Said] | None = None

    @asynccontextmanager
    async def lifespan(self) -> AsyncGenerator[None, None]:
        """Note that the environment is in use; at the end remove those that nothing uses any more."""
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
        """Make the environment, or wait until another job has, and keep it.

        Args:
            files: See `Requirements`.
            digest: Of them.
            name: Of the file that was given.
            said: Gets what uv or pip say.

        Returns:
            Entries of `sys.path`, variables of the environment, and whether it was made.

        Raises:
            SpawnError: uv or pip have failed; with their last words.
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
            while not environment.lock_shared():  # noqa: ASYNC110 - it is another process
                await trio.sleep(limits.ENVIRONMENT_LOCK_RETRY_SECONDS)
            if environment.paths is not None:
                break
            if not environment.lock_alone():  # EP-1: the lock that was held shared may be gone, it is taken again
                await trio.sleep(limits.ENVIRONMENT_LOCK_RETRY_SECONDS)
                continue
            if environment.paths is None:
                await self._make(environment, files, name)
                made = True
        environment.touch()
        bin_folder = str(environment.place / "bin")
        path = os.environ.get("PATH", os.defpath)
        variables = {"VIRTUAL_ENV": str(environment.place), "PATH": f"{bin_folder}{os.pathsep}{path}"}
        return list(environment.paths or ()), variables, made

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
                f"{name} is read by uv, and neither the program's machine nor this host has it: install uv on one of "
                "them, or name a requirements.txt (`uv export --format requirements.txt`)"
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
        """Run a step, and hand on what it says.

        Raises:
            SpawnError: It has failed.
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
                    if self._said is not None and line.strip():
                        await self._said.send((current_rank(), line.decode(errors="replace").strip()))


def _uv() -> str | None:
    own = Path.home() / ".local" / "bin"  # where its installer puts it, which shells of ssh do not search
    return shutil.which("uv") or shutil.which("uv", path=str(own))


# ---- the program's side of `HostMesh.install` ------------------------------------------------------------------------

_KIND: Final = "install"
Made = list[tuple[list[str], dict[str, str], bool]]


class Installation:
    """Packages on hosts, while their block is open; see `HostMesh.install`.

    Attributes:
        digest: Of the file, and what it takes in.
        made: On how many hosts it was made; the others had it.
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
        raise ValueError("packages are installed on the hosts of a job; this host has its own: use uv or pip")
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


# ---- requirements ----------------------------------------------------------------------------------------------------

# Requirements as sent to hosts: a requirements file with the files that it includes, or uv's lock file.

FIRST: Final = "0.txt"
LOCK: Final = "uv.lock"
PROJECT: Final = "pyproject.toml"
_EXPORT: Final = ("export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--quiet", "--project")
"""Of uv: packages of a lock, but for those of the project itself."""

_TAKES_IN: Final = re.compile(r"(\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc])))(\S+)(.*)", re.DOTALL)
_IS_HERE: Final = re.compile(r"\s*(?:-e\b|--editable\b|\.{1,2}(?:/|\s|$)|(?:-f|--find-links)(?:\s+|=)?(?!/|\w+:)\S)")


class Requirements(msgspec.Struct, frozen=True):
    """Files that list the packages to install.

    Attributes:
        files: Texts by their names.
        name: Of the file that was given, for errors.
    """

    files: Mapping[str, str]
    name: str

    @property
    def digest(self) -> str:
        said = [one for one in sorted(self.files.items()) if LOCK not in self.files or one[0] != FIRST]
        return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:40]


def read_requirements(file: str | os.PathLike[str]) -> Requirements:
    """Read a file, and those that it takes in; run in a thread.

    Raises:
        OSError: One cannot be read, or uv fails.
        ValueError: The files are too large, or name something that is only on this machine.
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
    """Reads a file and those that it takes in, each once, and gives them names of ours."""

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
            raise ValueError(f"requirements are at most limits.REQUIREMENT_FILES_MAX files, and {path} is one more")
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
            f"a file of requirements has at most limits.REQUIREMENTS_BYTES_MAX ({limits.REQUIREMENTS_BYTES_MAX}) "
            f"bytes, got {path} with {size}"
        )
    return path.read_text(encoding="utf-8")


def _check_is_anywhere(text: str, path: Path) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if _IS_HERE.match(line):
            raise ValueError(
                f"hosts.install takes packages that hosts can get, and {path}:{number} names a folder beside it: "
                f"{line.strip()!r}; bring code by hosts.sync, or name a folder that all hosts have by its whole path"
            )
