"""Environments as a host makes them, by the commands of uv, venv and pip, of which those here install nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
from tests.patience import HANG_SECONDS

from trimesh import MeshErrorGroup, SpawnError, configured, leaves, limits, open_channel, this_host
from trimesh._runtime.life import current_proc
from trimesh.jobs import packages
from trimesh.jobs.packages import Environment, Installer, Requirements, environment_name, environments_folder
from trimesh.testing import simulate
from trimesh.testing.simulated.host import open_world

TOOL = f"""#!/bin/sh
PATH=/usr/bin:/bin
echo "$0 $*" >> "$CALLS"
env > "$CALLS.env"
case "$*" in
    $HANGS) echo "$$" > "$CALLS.pid" ;;
esac
case "$1 $2" in
    "venv --python") place=$4 ;;
    "sync --frozen") place=$UV_PROJECT_ENVIRONMENT; cat uv.lock ;;
    "-m venv") for place; do :; done ;;
    *) place=; echo; cat *.txt ;;
esac
if [ -n "$place" ]; then
    mkdir -p "$place/bin" "$place/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    ln -s "{sys._base_executable}" "$place/bin/python" || exit
    {{
        echo "home = {Path(sys._base_executable).parent}"
        echo "include-system-site-packages = false"
    }} > "$place/pyvenv.cfg"
fi
case "$*" in
    $HANGS) exec sleep 1000 ;;
    $FAILS) echo; printf "no such package"; exit 3 ;;
esac
"""

TXT = Requirements({"0.txt": "-r 1.txt\n", "1.txt": "trio<1\n"}, "requirements.txt")
LOCK = Requirements({"uv.lock": "version = 1\n", "pyproject.toml": "[project]\n"}, "uv.lock")


@attrs.frozen
class Tools:
    """Where the commands are.

    Attributes:
        uv: Of uv, on the PATH.
        python: In place of this interpreter, where a test says so.
        log: What they were called with.
    """

    uv: Path
    python: Path
    log: Path

    @property
    def calls(self) -> list[str]:
        """The commands so far, with the path of each."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def variables(self) -> list[str]:
        """The environment of the last one."""
        return Path(f"{self.log}.env").read_text().splitlines()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tools:
    """A PATH with uv, and a cache of its own."""
    found = Tools(tmp_path / "bin" / "uv", tmp_path / "python", tmp_path / "calls")
    found.uv.parent.mkdir()
    for tool in (found.uv, found.python):
        tool.write_text(TOOL)
        tool.chmod(0o700)
    monkeypatch.setattr(limits, "ENVIRONMENT_LOCK_RETRY_SECONDS", 0.001)
    for name, value in {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HOME": str(tmp_path / "home"),
        "PATH": str(found.uv.parent),
        "CALLS": str(found.log),
        "FAILS": "",
        "HANGS": "",
    }.items():
        monkeypatch.setenv(name, value)
    return found


@asynccontextmanager
async def installing(count: int = 1) -> AsyncGenerator[Any, None]:
    """Have installers in simulated processes: their actors are as on hosts, and so are the commands that they run."""
    with trio.fail_after(HANG_SECONDS):
        async with (
            open_world(),
            this_host().spawn_procs({"hosts": count}) as procs,
            procs.spawn("packages", Installer) as installers,
        ):
            yield installers


async def make(installers: Any, found: Requirements) -> tuple[list[Any], list[Any]]:
    """Return what each installer says of its environment, and the lines that the commands have written."""
    async with open_channel(capacity=64) as (port, receiver):
        try:
            made = list(await installers.make.call(found.files, found.digest, found.name, port))
        finally:
            port.close()
        return made, [line async for line in receiver]


def place_of(found: Requirements) -> Path:
    return environments_folder() / environment_name(found.digest)


def packages_in(place: Path) -> list[str]:
    return [f"{place}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"]


async def test_environment_is_made_once_and_found_again(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """EP-1, EP-2, H25: at its place, whatever a killed job has left there; uv is that of the PATH."""
    other_uv = Path.home() / ".local" / "bin" / "uv"
    other_uv.parent.mkdir(parents=True)
    other_uv.write_text("#!/bin/sh\nexit 9\n")
    other_uv.chmod(0o700)
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    place = place_of(TXT)
    assert len(place.name) == 40
    (place / "bin").mkdir(parents=True)
    (place / "bin" / "python").write_text("left")
    async with installing() as installers:
        [(paths, variables, made)], lines = await make(installers, TXT)
        assert made
        user = Environment(place.parent, place.name)
        assert not user.lock_alone(), "its block is open"
    assert user.lock_alone()
    user.close()
    assert paths == packages_in(place)
    assert variables == {"VIRTUAL_ENV": str(place), "PATH": f"{place}/bin:{tools.uv.parent}"}
    assert lines == [(0, "-r 1.txt"), (0, "trio<1")]
    assert tools.calls == [
        f"{tools.uv} venv --python {sys.executable} {place}",
        f"{tools.uv} pip install --compile-bytecode --python {place}/bin/python -r 0.txt",
    ]
    seen = tools.variables
    assert "NO_COLOR=1" in seen
    assert not [line for line in seen if line.startswith("PIP_TARGET=")]
    os.utime(place / "whole", (1000.0, 1000.0))
    async with installing() as installers:
        assert await make(installers, TXT) == ([(paths, variables, False)], [])
    assert (place / "whole").stat().st_mtime > 1000.0
    assert len(tools.calls) == 2


async def test_lock_of_uv_is_synchronized(tools: Tools) -> None:
    """H25: by uv, also where its installer has put it."""
    uv = Path.home() / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    tools.uv.rename(uv)
    place = place_of(LOCK)
    async with installing() as installers:
        [(paths, _, made)], lines = await make(installers, LOCK)
    assert (paths, made) == (packages_in(place), True)
    assert lines == [(0, "version = 1")]
    options = "--frozen --no-dev --no-install-workspace --compile-bytecode"
    assert tools.calls == [f"{uv} sync {options} --python {sys.executable}"]


async def test_host_without_uv_uses_venv_and_pip(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """H25: the pip of its interpreter, so that the environment gets none."""
    tools.uv.unlink()
    monkeypatch.setattr(sys, "executable", str(tools.python))
    place = place_of(TXT)
    async with installing() as installers:
        [(paths, _, made)], _ = await make(installers, TXT)
    assert (paths, made) == (packages_in(place), True)
    options = "--no-input --disable-pip-version-check"
    assert tools.calls == [
        f"{tools.python} -m venv --without-pip {place}",
        f"{tools.python} -m pip --python {place}/bin/python {options} install -r 0.txt",
    ]


def without_pip(name: str, find: Any = importlib.util.find_spec) -> Any:
    return None if name == "pip" else find(name)


@pytest.mark.parametrize(
    ("fails", "has_uv", "has_pip", "found", "said"),
    [
        ("pip install*", True, True, TXT, "uv cannot install requirements.txt (exit code 3); its last words: "),
        ("-m venv*", False, True, TXT, "venv cannot install requirements.txt (exit code 3); its last words: "),
        ("-m pip*", False, True, TXT, "pip cannot install requirements.txt (exit code 3); its last words: "),
        ("", False, False, TXT, "pip cannot install requirements.txt (exit code 1); its last words: "),
        ("", False, True, LOCK, "uv.lock needs uv, and neither the program's machine nor this host has it: install"),
    ],
)
async def test_failure_names_the_command_and_leaves_nothing(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, fails: str, has_uv: bool, has_pip: bool, found: Any, said: str
) -> None:
    """H25: with its last words."""
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setattr(sys, "executable", str(tools.python))
    if not has_uv:
        tools.uv.unlink()
    if not has_pip:
        monkeypatch.setattr(importlib.util, "find_spec", without_pip)
    async with installing() as installers:
        with pytest.raises(MeshErrorGroup) as caught:
            await make(installers, found)
        assert not place_of(found).exists()
    [error] = leaves(caught.value)
    assert isinstance(error, SpawnError)
    assert str(error).startswith(said)
    if fails:
        assert str(error).endswith("no such package")
    if not has_pip:
        assert tools.calls == [f"{tools.python} -m venv {place_of(found)}"], "pip is that of the environment"
        assert "No module named pip" in str(error)


async def test_cancel_ends_the_command_and_removes_its_half(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """H25: whoever comes next makes it."""
    monkeypatch.setenv("HANGS", "venv*")
    place, number = place_of(TXT), trio.Path(f"{tools.log}.pid")
    async with installing() as installers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, installers, TXT)
            while not (place / "pyvenv.cfg").exists():  # noqa: ASYNC110 - of another process
                await trio.sleep(0.001)
            pidfd = os.pidfd_open(int(await number.read_text()))
            nursery.cancel_scope.cancel()
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        assert not place.exists()
    monkeypatch.setenv("HANGS", "")
    async with installing() as installers:
        [(_, _, made)], _ = await make(installers, TXT)
    assert made


# ---- several jobs of a user ------------------------------------------------------------------------------------------


async def test_hosts_with_one_folder_make_it_once(tools: Tools) -> None:
    """H25"""
    async with installing(2) as installers:
        made, _ = await make(installers, TXT)
    assert sorted(is_made for _, _, is_made in made) == [False, True]
    assert len(tools.calls) == 2


class Tried:
    """Tries of an installer for one kind of lock.

    Attributes:
        outcomes: Of each try.
        several: Set when two have failed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.outcomes = list[bool]()
        self.several = trio.Event()
        self._lock = getattr(Environment, name)
        monkeypatch.setattr(Environment, name, lambda environment: self._try(environment))  # noqa: PLW0108 - binds

    def _try(self, environment: Environment) -> bool:
        self.outcomes.append(self._lock(environment))
        if self.outcomes == [False, False]:
            self.several.set()
        return self.outcomes[-1]


async def test_environment_that_another_job_makes_is_waited_for(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """EP-1"""
    place = place_of(TXT)
    other = Environment(place.parent, place.name)
    assert other.lock_alone()
    tried = Tried(monkeypatch, "lock_shared")

    async def finish() -> None:
        await tried.several.wait()
        place.mkdir()
        other.finish(("/x", "/y"))
        other.close()

    async with installing() as installers, trio.open_nursery() as nursery:
        nursery.start_soon(finish)
        [(paths, _, made)], _ = await make(installers, TXT)
        assert (paths, made, tools.calls) == (["/x", "/y"], False, [])
        assert tried.outcomes[:2] == [False, False]


async def test_two_jobs_that_find_none_do_not_both_make_it(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """EP-1: each has the lock for users, and needs it alone."""
    place = place_of(TXT)
    other = Environment(place.parent, place.name)
    assert other.lock_shared()
    tried = Tried(monkeypatch, "lock_alone")

    async def give_way() -> None:
        await tried.several.wait()
        assert tools.calls == []
        other.close()

    async with installing() as installers, trio.open_nursery() as nursery:
        nursery.start_soon(give_way)
        [(_, _, made)], _ = await make(installers, TXT)
        assert made
        assert tried.outcomes[:2] == [False, False]
        assert True in tried.outcomes


async def test_environment_is_marked_as_used_while_its_block_lasts(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EP-3: from when it is whole; before, there is nothing to mark."""
    monkeypatch.setattr(limits, "CODE_TOUCH_SECONDS", 0.0)
    whole = place_of(TXT) / "whole"
    async with installing() as installers:
        await make(installers, TXT)
        os.utime(whole, (1000.0, 1000.0))
        while whole.stat().st_mtime == 1000.0:
            await trio.lowlevel.checkpoint()


async def test_end_of_a_block_removes_what_no_job_has_used_for_long(tools: Tools) -> None:
    """EP-3: also where the block has made nothing."""
    old = Environment(environments_folder(), "old")
    assert old.lock_alone()
    old.place.mkdir()
    old.finish(())
    os.utime(old.place / "whole", (1000.0, 1000.0))
    old.close()
    async with installing():
        assert old.place.exists()
    assert list(environments_folder().iterdir()) == []


# ---- the program -----------------------------------------------------------------------------------------------------


async def test_progress_shows_the_host_and_its_last_line(
    tools: Tools, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q9, H25: a failure is that of the host."""
    monkeypatch.setattr(limits, "PROGRESS_SECONDS", 0.0)
    async with installing() as installers, trio.open_nursery() as nursery:
        real: Any = SimpleNamespace(is_simulated=False, family=object(), nursery=nursery)
        with configured(progress="on"):
            [(paths, _, made)] = await packages._make(this_host(), real, installers, TXT)
    assert (paths, made) == (packages_in(place_of(TXT)), True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"installing requirements.txt, {this_host().names[0]}: trio<1: ")
    monkeypatch.setenv("FAILS", "sync*")
    async with installing() as installers:
        with pytest.raises(MeshErrorGroup, match="failed on 1 of 1"):
            await packages._make(this_host(), current_proc(), installers, LOCK)


async def test_this_host_is_refused(tmp_path: Path) -> None:
    async with open_world():
        with pytest.raises(ValueError, match="install\\(\\) needs the hosts of a job, got this host"):
            async with this_host().install(tmp_path / "requirements.txt"):
                pytest.fail("it is no job")


@simulate(seeds=1, hosts=2)
async def test_simulated_hosts_have_the_packages_of_this_process(host_mesh: Any, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("trio<1\n")
    async with host_mesh.install(file) as installed:
        assert (installed.made, installed.digest) == (0, packages.read_requirements(file).digest)
