"""Packages on the hosts of a job, from an index that is a folder."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.jobs.packages.wheels import add_wheel
from tests.patience import HANG_SECONDS

from trimesh import Actor, MeshErrorGroup, SpawnError, endpoint, leaves, origin

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


class Reader(Actor):
    """Imports what was installed."""

    @endpoint
    async def read(self) -> tuple[int, str]:
        """Return a value of a package that another one has brought, and its place."""
        import installed_package

        return installed_package.VALUE, installed_package.__file__ or ""

    @endpoint
    async def is_there(self) -> bool:
        """Tell whether it can be imported."""
        try:
            import installed_package  # noqa: F401
        except ModuleNotFoundError:
            return False
        return True


@pytest.fixture(autouse=True)
def requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of requirements; the hosts keep environments beside it, and have pip alone."""
    wheels = tmp_path / "wheels"
    add_wheel(wheels, "needed_package", "1.0", "VALUE = 1\n")
    main = "from needed_package import VALUE\ndef main(): print('value', VALUE)\n"
    add_wheel(wheels, "installed_package", "1.0", main, requires="needed_package", command="say-value")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "requirements.txt"
    file.write_text(f"--no-index\n--find-links {wheels}\ninstalled_package==1.0\n")
    return file


async def reading(hosts: Any) -> list[tuple[int, str]]:
    async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
        return list(await reader.read.call())


@pytest.mark.daily
async def test_processes_import_what_was_installed(requirements: Path, tmp_path: Path) -> None:
    """H25: made once for hosts that share a folder; commands find its programs; after the block it is not there."""
    cache = str(tmp_path / "cache")
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            async with hosts.install("requirements.txt") as installed:
                assert installed.made == 1
                for value, place in await reading(hosts):
                    assert value == 1
                    assert place.startswith(cache)
                lines = list[str]()
                await hosts.run(["say-value"], output=lambda line: lines.append(line.text), check=True)
                assert lines == ["value 1"] * 2
                with pytest.raises(RuntimeError, match="name all packages in one file"):
                    async with hosts.install(requirements):
                        pytest.fail("a host has one environment")
                await trio.Path(tmp_path, "src").mkdir()
                await trio.Path(tmp_path, "src", "needed_package.py").write_text("VALUE = 2\n")
                async with hosts.sync("src"):
                    assert [value for value, _ in await reading(hosts)] == [2, 2], "code comes before packages"
                assert [value for value, _ in await reading(hosts)] == [1, 1]
            async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                assert list(await reader.is_there.call()) == [False, False]
        async with jobs.LocalJob(1) as hosts, hosts.install(requirements) as installed:
            assert installed.made == 0, "another job has made it"


async def test_what_cannot_be_installed_is_said_with_the_host(
    requirements: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H25: and with the last words of what cannot install it."""
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    await trio.Path(uv).write_text("#!/bin/sh\necho no such package\nexit 3\n")
    await trio.Path(uv).chmod(0o700)
    monkeypatch.setenv("PATH", f"{uv.parent}:/usr/bin:/bin")
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            with pytest.raises(MeshErrorGroup) as caught:
                async with hosts.install(requirements):
                    pytest.fail("there is no such package")
    (error,) = leaves(caught.value)
    assert isinstance(error, SpawnError)
    assert str(error) == "uv cannot install requirements.txt (exit code 3); its last words: no such package"
    where = origin(error)
    assert where is not None
    assert where.host == socket.gethostname()
    assert dict(where.point or {}) == {"hosts": 0}


UV = shutil.which("uv")


@pytest.mark.skipif(UV is None, reason="there is no uv")
@pytest.mark.parametrize("file", ["requirements.txt", "uv.lock"])
async def test_uv_is_used_where_it_is_found(requirements: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """H25: also for its own lock."""
    assert UV is not None
    folder = requirements.parent
    monkeypatch.setenv("PATH", f"{Path(UV).parent}:/usr/bin:/bin")
    monkeypatch.setenv("UV_CACHE_DIR", str(folder / "uv"))
    if file == "uv.lock":
        await trio.Path(folder, "pyproject.toml").write_text(
            '[project]\nname = "p"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["installed_package"]\n'
            f'[tool.uv]\nno-index = true\nfind-links = ["{folder}/wheels"]\n'
        )
        await trio.run_process([UV, "lock", "--offline"], capture_stderr=True)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts, hosts.install(folder / file) as installed:
            assert installed.made == 1
            assert [value for value, _ in await reading(hosts)] == [1]
