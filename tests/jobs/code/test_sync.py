"""Code of the program on the hosts of a job."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.runtime.processes import parent_of

import trimesh.aio  # noqa: F401 - asyncio programs bring code once it is imported
from trimesh import Actor, HostLost, endpoint, leaves, limits, this_host
from trimesh.testing import simulate

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.code.scanning import Scanner, TreeScan

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

Found = tuple[int, str, str]


class Reader(Actor):
    """Reads the code that it has."""

    @endpoint
    async def read(self) -> Found:
        """Return a value of a module, the module's place, and the text of a file."""
        import synchronized_module

        text = await trio.Path(jobs.synced("configs/one.yaml")).read_text()
        return synchronized_module.VALUE, synchronized_module.__file__ or "", text

    @endpoint
    async def read_below(self) -> list[Found]:
        """Do so in a process that this one starts."""
        async with this_host().spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
            return list(await reader.read.call())

    @endpoint
    async def paths(self) -> list[str]:
        """Return `sys.path`."""
        return sys.path

    @endpoint
    async def agent(self) -> int:
        """Return the process id of the agent of this host."""
        return parent_of(os.getppid())


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, which is the working directory; the hosts keep what they get beside it."""
    folder = tmp_path / "project"
    for name, text in (
        ("src/synchronized_module.py", "VALUE = 1\n"),
        ("configs/one.yaml", "a: 1\n"),
        ("runs/log", "text"),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


async def reading(hosts: Any) -> list[Found]:
    async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
        return list(await reader.read.call())


async def test_processes_import_what_was_brought(project: Path, tmp_path: Path) -> None:
    """H18: also those that they start; commands find it; after the block what is spawned does not have it."""
    cache = str(tmp_path / "cache")
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            async with hosts.sync("src", "configs") as synced:
                assert (synced.version, synced.files, synced.sent_bytes) == (1, 2, 15)
                async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                    for value, place, text in await reader.read.call():
                        assert (value, text) == (1, "a: 1\n")
                        assert place.startswith(cache)
                        assert await trio.Path(place).read_text() == "VALUE = 1\n"
                    below = await reader.slice(hosts=1).read_below.call_one()
                    assert [one[0] for one in below] == [1]
                    assert (await reader.slice(hosts=0).paths.call_one())[0].startswith(cache)
                lines = list[str]()
                command = ["sh", "-c", "cat $TRIMESH_SYNCED/configs/one.yaml; ls $TRIMESH_SYNCED"]
                await hosts.slice(hosts=0).run(command, output=lambda line: lines.append(line.text), check=True)
                assert lines == ["a: 1", "configs", "src"]
            async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                for paths in await reader.paths.call():
                    assert not any(path.startswith(cache) for path in paths)
            async with hosts.sync(".", exclude=["runs"]) as synced:
                assert (synced.files, synced.sent_bytes) == (2, 0), "the hosts have these contents"
    assert jobs.synced("configs") == Path("configs"), "the program has the files themselves"
    assert (project / "src" / "synchronized_module.py").read_text() == "VALUE = 1\n"


async def test_update_brings_what_has_changed(project: Path) -> None:
    """H18: what runs keeps what it has; an update without a change is none; a removed file is gone."""
    module = project / "src" / "synchronized_module.py"
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts, hosts.sync("src", "configs", "runs") as synced:
            async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                assert not await synced.update()
                module.write_text("VALUE = 22\n")
                (project / "runs" / "log").unlink()
                assert await synced.update()
                assert (synced.version, synced.files, synced.sent_bytes) == (2, 2, len("VALUE = 22\n"))
                assert {one[0] for one in await reader.read.call()} == {1}
            assert {one[0] for one in await reading(hosts)} == {22}
            module.write_text("VALUE = 1\n")
            assert await synced.update()
            assert (synced.version, synced.sent_bytes) == (3, 0)
            assert {one[0] for one in await reading(hosts)} == {1}


async def test_changes_are_brought_as_they_are_made(project: Path) -> None:
    """H18: `watch=True`; what fails there fails in the block."""
    pytest.importorskip("watchfiles")
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            async with hosts.sync("src", "configs", watch=True) as synced:
                for version in (2, 3):
                    (project / "new").write_text(f"VALUE = {version}0\n")
                    (project / "new").replace(project / "src" / "synchronized_module.py")  # never half of it
                    while synced.version < version:  # noqa: ASYNC110 - files and a thread that looks at them
                        await trio.sleep(0.01)
                    assert [one[0] for one in await reading(hosts)] == [version * 10]
            with pytest.raises(ExceptionGroup) as caught:
                async with hosts.sync("src", watch=True):
                    (project / "src" / "synchronized_module.py").unlink()
                    (project / "src").rmdir()
                    await trio.sleep_forever()
            [failure] = leaves(caught.value)
            assert isinstance(failure, FileNotFoundError)


async def test_large_and_odd_files_arrive_as_they_are(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several messages, empty, a link, with permission to execute."""
    monkeypatch.setattr(limits, "CODE_PIECE_BYTES", 1_000)
    data = bytes(range(256)) * 40
    (project / "src" / "large").write_bytes(data)
    (project / "src" / "exact").write_bytes(data[:1_000])
    (project / "src" / "empty").touch()
    (project / "src" / "run.sh").write_text("#!/bin/sh\necho it ran\n")
    (project / "src" / "run.sh").chmod(0o755)
    (project / "src" / "link").symlink_to("run.sh")
    for number in range(30):
        (project / "src" / f"small{number}").write_bytes(b"%d" % number * 50)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts, hosts.sync("src") as synced:
            assert synced.files == 36
            lines = list[str]()
            script = 'cd "$TRIMESH_SYNCED/src"; ./link; for one in large exact empty; do cksum <$one; done; cat small7'
            await hosts.slice(hosts=1).run(["sh", "-c", script], output=lambda line: lines.append(line.text))
            script = "for one in large exact empty; do cksum <src/$one; done"
            sums = await trio.run_process(["sh", "-c", script], capture_stdout=True)
            assert lines == ["it ran", *sums.stdout.decode().split("\n")[:3], "7" * 50]


async def test_file_that_changes_while_it_is_sent(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SY-2: what it was when it was listed never gets the new content's place; one that never stays is an error."""
    module = project / "src" / "synchronized_module.py"
    real, count = Scanner.scan, 0

    def scan(scanner: Scanner) -> TreeScan:
        nonlocal count
        found = real(scanner)
        count += 1
        if count <= changes:
            module.write_text(f"VALUE = 10{count}\n")
        return found

    monkeypatch.setattr(Scanner, "scan", scan)
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(1) as hosts:
            changes = 2
            async with hosts.sync("src", "configs") as synced:
                assert count == 3
                assert [one[0] for one in await reading(hosts)] == [102]
                assert synced.version == 1
                changes = 100
                module.write_text("VALUE = 5\n")
                with pytest.raises(ValueError, match="CODE_SCANS_MAX"):
                    await synced.update()
                assert [one[0] for one in await reading(hosts)] == [102]
                changes = 0
                assert await synced.update()
                module.unlink()
                assert await synced.update()
                assert synced.files == 1


async def test_hosts_that_differ_get_what_each_lacks(project: Path, tmp_path: Path) -> None:
    """Two folders of contents, of which one has some: both have the tree in the end."""
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2) as hosts:
            async with hosts.slice(hosts=0).sync("src", "configs"):
                pass
            for place in (tmp_path / "cache" / "trimesh" / "code" / "contents").glob("*/*"):
                place.chmod(0o600)
                place.write_text("changed by hand")
            async with hosts.sync("src", "configs") as synced:
                assert synced.sent_bytes == 15
                assert [one[::2] for one in await reading(hosts)] == [(1, "a: 1\n")] * 2


async def test_wrong_uses_are_refused() -> None:
    with trio.fail_after(HANG_SECONDS):
        with pytest.raises(ValueError, match="hosts of a job"):
            async with this_host().sync("src"):
                pass
        async with jobs.LocalJob(2) as hosts:
            with pytest.raises(TypeError, match="list of patterns"):
                async with hosts.sync("src", exclude="*.pt"):
                    pass
            async with hosts.slice(hosts=0).sync("src"):
                with pytest.raises(RuntimeError, match="the code of one block"):
                    async with hosts.sync("configs"):
                        pass
                async with hosts.slice(hosts=1).sync("configs"):
                    pass
            with pytest.raises(RuntimeError, match="must be entered, not awaited"):
                await hosts.sync("src")


async def test_lost_host_and_cancel() -> None:
    """H18: a lost host is a `HostLost` of the block; a cancel of an update leaves the version before."""
    with trio.fail_after(HANG_SECONDS), pytest.raises(ExceptionGroup) as caught:
        async with jobs.LocalJob(2) as hosts, hosts.sync("src", "configs") as synced:
            with trio.CancelScope() as scope:
                scope.cancel()
                await synced.update()
            assert scope.cancelled_caught
            assert [one[0] for one in await reading(hosts)] == [1, 1]
            async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                os.kill(await reader.slice(hosts=1).agent.call_one(), signal.SIGKILL)
                await trio.sleep_forever()
    assert {type(one) for one in leaves(caught.value)} == {HostLost}


async def test_pickle_may_be_off() -> None:
    with trio.fail_after(HANG_SECONDS):
        async with jobs.LocalJob(2, pickle="off") as hosts, hosts.sync("src", "configs") as synced:
            assert synced.files == 2
            assert [one[::2] for one in await reading(hosts)] == [(1, "a: 1\n")] * 2


def test_asyncio_program_brings_code(project: Path) -> None:
    async def main() -> None:
        async with jobs.LocalJob(1) as hosts, hosts.sync("src", "configs") as synced:
            assert not await synced.update()
            async with hosts.spawn_procs({}) as procs, procs.spawn("reader", Reader) as reader:
                assert (await reader.read.call_one())[0] == 1

    asyncio.run(main())


@pytest.mark.daily("sim")
@simulate(seeds=3, hosts=2)
async def test_simulated_hosts_have_the_code_of_the_program(host_mesh: Any) -> None:
    """H18: they are this process; so nothing is sent, and what is spawned reads the files themselves."""
    async with host_mesh.sync("src", "configs") as synced:
        assert (synced.version, synced.files, synced.sent_bytes) == (1, 2, 0)
