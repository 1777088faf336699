"""The host's side of `HostMesh.install`: the actor that makes an environment, or finds it made, and keeps it in use."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import trio

from trimesh import limits
from trimesh._runtime.actors import current_rank
from trimesh._runtime.channels import Port
from trimesh._runtime.system import LineCutter, Tail, run_process
from trimesh.actor.actor import Actor
from trimesh.actor.endpoint import endpoint
from trimesh.errors import SpawnError
from trimesh.jobs.packages.environment import Environment, environment_name, environments_folder, prune
from trimesh.jobs.packages.requirements import FIRST, LOCK

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
