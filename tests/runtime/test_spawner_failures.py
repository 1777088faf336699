"""Launches that fail: each says where and why, and leaves nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.runtime.conftest import SERVE, CancelAtNth, Start, ask, hear, new_id, spawner_of, spec_of
from tests.runtime.processes import family

from trimesh._runtime.spawner.boot import RefusalError
from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner
from trimesh._runtime.spawner.loop import check_forkable
from trimesh._runtime.system.child import Child
from trimesh.errors import LinkLost, ProcDied, SpawnError

pytestmark = pytest.mark.real

SPOT = {"labels": ("hosts", "gpus"), "sizes": (1, 4), "rank": 2}
NAME = r"cannot start w\[hosts=0,gpus=2\]: "


async def refusal(launcher: ProcLauncher, match: str, **fields: object) -> str:
    """Return the text of the SpawnError of a launch, after a look at what it left: nothing."""
    with pytest.raises(SpawnError, match=NAME + match) as caught:
        await launcher.launch(spec_of(**SPOT, **fields))
    assert family(launcher.root_id) == [spawner_of(launcher)]
    return str(caught.value)


async def test_bad_interpreter_is_named(launcher: ProcLauncher) -> None:
    """A path that is none, and a file that is no program."""
    await refusal(launcher, "cannot execute the interpreter '/no/such/python'", python="/no/such/python")
    await refusal(launcher, "cannot execute the interpreter '/etc/hostname'", python="/etc/hostname")


async def test_interpreter_that_cannot_run_trimesh_shows_its_last_words(launcher: ProcLauncher) -> None:
    """`true` runs, but is no Python; what a program said before it ended is in the text."""
    await refusal(launcher, r"the process ended before it was set up \(exit code 0\)", python="true")
    text = await refusal(launcher, "the process ended before it was set up", python="ls")
    assert "ls: " in text


async def test_bad_working_directory_is_named(launcher: ProcLauncher, tmp_path: Path) -> None:
    """The caller's own folder may be gone, too; then the worker stays where the spawner is."""
    await refusal(launcher, "cannot enter the working directory '/no/such/folder'", cwd="/no/such/folder")
    with contextlib.chdir(tmp_path):
        os.rmdir(tmp_path)
        child = await launcher.launch(spec_of())
    await hear(child)
    assert (await ask(child, "about"))["cwd"]


async def test_missing_entry_shows_the_traceback(launcher: ProcLauncher) -> None:
    """Wrong module, wrong name."""
    assert "ModuleNotFoundError" in await refusal(launcher, "Traceback", entry="no_such_module:main")
    assert "AttributeError" in await refusal(launcher, "Traceback", entry=f"{SERVE}_no_such_function")


async def test_preload_that_fails_in_the_worker_is_named(launcher: ProcLauncher) -> None:
    """A module that only the launch asks for."""
    text = await refusal(launcher, "cannot preload 'no_such_module'", preload=("no_such_module",))
    assert "ModuleNotFoundError" in text


async def test_output_path_that_cannot_be_opened_is_named(launcher: ProcLauncher, tmp_path: Path) -> None:
    """`output=` a path inside a folder that is not there."""
    await refusal(launcher, f"cannot open '{tmp_path}/missing/out'", output=tmp_path / "missing" / "out")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `preloaded_here` to be written."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "preloaded_here.py"
    sys.modules.pop("preloaded_here", None)


def write(module: Path, text: str) -> None:
    """Write the module."""
    module.write_text(textwrap.dedent(text))


async def fail_to_open(match: str) -> str:
    """Return the text of the SpawnError of a spawner that preloads that module."""
    root_id = new_id()
    with pytest.raises(SpawnError, match=match) as caught:
        async with open_spawner(root_id, entry=SERVE, preload=["preloaded_here"]):
            pytest.fail("it must not become ready")
    assert not family(root_id)
    return str(caught.value)


async def test_preload_that_raises_shows_its_traceback(module: Path) -> None:
    """The error is raised where the spawner is opened."""
    write(module, "def broken():\n    raise LookupError('on import')\nbroken()\n")

    text = await fail_to_open("cannot preload 'preloaded_here'")

    assert "in broken" in text
    assert "LookupError: on import" in text


@pytest.mark.parametrize("ending", ["raise SystemExit(0)", "raise KeyboardInterrupt"])
async def test_preload_that_ends_the_interpreter_is_an_error(module: Path, ending: str) -> None:
    """Nothing that a module raises makes the spawner look ready."""
    write(module, ending)

    await fail_to_open("cannot preload 'preloaded_here'")


async def test_preload_that_exits_hard_is_an_error(module: Path) -> None:
    """`os._exit` in a module: the end of the connection is all that comes."""
    write(module, "import os\nos._exit(0)\n")

    await fail_to_open("the spawner has ended")


async def test_preload_that_starts_a_thread_is_refused(module: Path) -> None:
    """O2: a process with threads cannot be forked; the text says which module and what to write instead."""
    write(module, "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n")

    text = await fail_to_open("preloaded_here")

    assert "1 thread" in text
    assert "python=sys.executable" in text


async def test_process_that_runs_trio_is_not_forked() -> None:
    """O2: looked at from here, where Trio runs."""
    with pytest.raises(RefusalError, match="it runs Trio"):
        check_forkable("anything")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
async def test_preload_that_initialises_cuda_is_refused(module: Path) -> None:
    """O2: CUDA does not survive a fork. The flag is torch's own; no device is needed to set it."""
    write(module, "import torch\ntorch.cuda.is_initialized = lambda: True\n")

    assert "CUDA" in await fail_to_open("preloaded_here")


async def test_spawner_without_descriptors_says_so_and_goes_on(launcher: ProcLauncher) -> None:
    """EMFILE in the spawner, at each of the calls that need a descriptor, and success as soon as there is room."""
    pid = spawner_of(launcher)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_before = sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
    failures = 0
    for limit in range(int(open_before[-1]) + 20):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        child, text = await attempt(launcher)
        if child is not None:
            break
        failures += 1
        assert "w[hosts=0,gpus=2]" in text
        assert "Too many open files" in text
        assert family(launcher.root_id) == [pid]
        assert sorted(os.listdir(f"/proc/{pid}/fd"), key=int) == open_before
    assert failures > 9
    await hear(child)
    assert (await ask(child, "about"))["pid"] == child.pid


async def attempt(launcher: ProcLauncher) -> tuple[Child | None, str]:
    """Launch; return the child, or the text of the error."""
    try:
        return await launcher.launch(spec_of(**SPOT)), ""
    except SpawnError as error:
        return None, str(error)


async def test_controller_without_descriptors_says_so_and_leaves_nothing(launcher: ProcLauncher) -> None:
    """EMFILE in this process: the descriptors of a new worker cannot arrive, so the worker is taken back."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    free = [fd for fd in range(used[-1] + 2) if fd not in used]
    fillers = [os.dup(0) for _ in free]  # no gap below the limit
    try:
        for room, text in ((0, "Too many open files"), (1, "no descriptor left")):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(*fillers, *used) + 1 + room, limits[1]))
            with pytest.raises(SpawnError, match=text):
                await launcher.launch(spec_of(**SPOT))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in fillers:
            os.close(fd)
    assert family(launcher.root_id) == [spawner_of(launcher)]
    await hear(await launcher.launch(spec_of()))


@pytest.fixture
def pids_group() -> Iterator[Path]:
    """A cgroup that limits the number of processes (v1, or v2 where its controller is on)."""
    for parent in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        group = parent / f"trimesh-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "pids.max").exists():
                yield group
                return
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
    pytest.skip("no cgroup with a pids controller can be made here")


async def test_error_inside_the_spawner_is_told_and_takes_everything_along(module: Path) -> None:
    """A bug of ours: its traceback becomes the error of whoever asks next; nothing is left."""
    write(module, """
        from trimesh._runtime.spawner import loop as spawner_loop
        connect = spawner_loop.Spawner._connect
        def broken(self, sender, record):
            raise RuntimeError("a planted bug")
        spawner_loop.Spawner._connect = broken
    """)  # fmt: skip
    root_id = new_id()
    async with open_spawner(root_id, entry=SERVE, preload=["preloaded_here"]) as launcher:
        child = await launcher.launch(spec_of())
        await hear(child)

        with pytest.raises(LinkLost, match="a planted bug"):
            await launcher.connect(child.proc_id)
        await child.wait_exited()
        with pytest.raises(SpawnError, match="a planted bug"):
            await launcher.launch(spec_of())
    assert not family(root_id)


async def test_worker_that_cuts_its_own_connection_before_it_enters_is_given_up(
    launcher: ProcLauncher, module: Path
) -> None:
    """The launch fails, it does not wait for ever."""
    write(module, """
        import os, stat, time
        for fd in range(3, 100):
            try: os.close(fd)
            except OSError: pass
        time.sleep(600)
    """)  # fmt: skip

    await refusal(launcher, "it closed its connection to the spawner", preload=("preloaded_here",))


async def test_fork_that_fails_says_so_and_goes_on(launcher: ProcLauncher, pids_group: Path) -> None:
    """EAGAIN from fork."""
    pid = spawner_of(launcher)
    (pids_group / "pids.max").write_text("1")
    (pids_group / "cgroup.procs").write_text(str(pid))

    await refusal(launcher, "the spawner cannot fork: .*Resource temporarily unavailable")

    (pids_group / "pids.max").write_text("max")
    child = await launcher.launch(spec_of())
    await hear(child)
    outside = pids_group.parent / "cgroup.procs"
    for moved in (child.pid, pid):
        outside.write_text(str(moved))


async def test_worker_that_talks_rubbish_is_cut_off_alone(launcher: ProcLauncher, start: Start) -> None:
    """Bytes that are no record, and requests that are not a worker's to make, end that worker's connection only."""
    other = await start()
    for entry in ("garble", "impostor"):
        child = await launcher.launch(spec_of(entry=f"tests.runtime.worker_entries:{entry}"))
        await hear(child)

        with pytest.raises((ProcDied, LinkLost)):
            await launcher.connect(child.proc_id)
        assert (await ask(child, "about"))["pid"] == child.pid
    assert (await ask(other, "about"))["pid"] == other.pid
    await start()


async def test_launch_too_large_for_a_record_is_refused_here(launcher: ProcLauncher) -> None:
    """A bound of ours, not the kernel's."""
    with pytest.raises(SpawnError, match="BROKER_RECORD_BYTES_MAX"):
        await launcher.launch(spec_of(extra=bytes(70 << 20)))
    await hear(await launcher.launch(spec_of()))


async def test_wrong_output_is_refused_here(launcher: ProcLauncher) -> None:
    """The text lists what there is."""
    with pytest.raises(ValueError, match='output must be "forward", "inherit", "discard" or a path'):
        await launcher.launch(spec_of(output="forwards"))


async def test_launch_after_the_end_is_refused() -> None:
    """A launcher kept beyond its block answers, it does not hang."""
    async with open_spawner(new_id(), entry=SERVE) as launcher:
        pass

    with pytest.raises(SpawnError, match="is stopping"):
        await launcher.launch(spec_of())
    with pytest.raises(LinkLost):
        await launcher.connect(new_id())
    assert not (await launcher.exit_of(new_id())).is_known
    await launcher.flush_output()


async def test_cancel_at_any_checkpoint_of_a_launch_leaves_nothing(launcher: ProcLauncher) -> None:
    """C07, LA-1: cancel at the nth checkpoint, for all n until one succeeds."""
    pid = spawner_of(launcher)
    for nth in range(1, 50):
        child = None
        with trio.CancelScope() as scope:
            instrument = CancelAtNth(scope, nth)
            trio.lowlevel.add_instrument(instrument)
            try:
                child = await launcher.launch(spec_of())
            finally:
                trio.lowlevel.remove_instrument(instrument)
        if child is not None:
            assert nth > 1
            await hear(child)
            break
        assert family(launcher.root_id) == [pid]
    else:
        pytest.fail("no launch succeeded")
