"""What a forked worker is, what it takes over from its caller, and what it does not."""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
import warnings
from pathlib import Path

import pytest
import trio
from tests.runtime.conftest import SERVE, Start, ask, hear, new_id, spec_of
from tests.runtime.processes import family, see

from trimesh._runtime.spawner.launcher import ProcLauncher, open_spawner

pytestmark = pytest.mark.real


@pytest.mark.daily
async def test_worker_leads_its_own_session_and_group(start: Start) -> None:
    """Z09: a terminal's Ctrl-C and job control reach only the controller."""
    child = await start()

    about = await ask(child, "about")

    assert about["pid"] == child.pid == about["group"] == about["session"]
    assert about["parent"] != os.getpid()
    assert about["stdin"]


@pytest.mark.daily
async def test_worker_has_no_descriptor_but_its_own(start: Start) -> None:
    """O4: no copy of another process's sockets or pipes, so that an end is an end."""
    await start()
    second = await start()

    about = await ask(second, "about")

    assert set(about["fds"]) - set(about["own"]) == {max(set(about["fds"]) - set(about["own"]))}  # the broker socket
    assert about["lifelines"] == 2  # controller and spawner


@pytest.mark.daily
async def test_worker_looks_like_a_fresh_program(start: Start) -> None:
    """O2: default signal handling, one thread, an empty `__main__`, a shallow stack, a name for `top`."""
    about = await ask(await start(mesh="trainers", labels=("gpus",), sizes=(4,), rank=2), "about")

    assert about["handlers"] == [2]  # SIGINT: Python's own, which Trio looks for
    assert about["blocked"] == []
    assert about["threads"] == 1
    assert not [name for name in about["main"] if not name.startswith("__")]
    assert about["recursion"] < 10
    assert about["comm"] == "trainers.2"


@pytest.mark.daily
async def test_worker_takes_over_the_caller_as_it_is_now(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: environment, cwd, sys.path, argv, warning filters, umask and limits of the caller at the launch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("/nowhere/at/all")
    monkeypatch.setattr(sys, "argv", ["program", "--flag", "\udcff"])
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.delenv("HOME", raising=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    mask = os.umask(0o027)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "some message", FutureWarning)
            child = await start(env={"OVER": "laid", "SET_LATER": "over"})
    finally:
        os.umask(mask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    about = await ask(child, "about")

    assert about["cwd"] == str(tmp_path)
    assert about["path"] == sys.path
    assert about["argv"] == ["program", "--flag", "\udcff"]
    assert about["env"]["OVER"] == "laid"
    assert about["env"]["SET_LATER"] == "over"
    assert "HOME" not in about["env"]
    assert about["umask"] == 0o027
    assert about["nofile"] == [soft - 1, hard]
    assert about["filters"][0] == ["ignore", "some message", "FutureWarning"]


async def test_environment_of_a_mebibyte_arrives(start: Start) -> None:
    """A record larger than a packet travels in a memfd."""
    big = {f"BIG_{index}": "x" * 65_000 for index in range(17)}

    child = await start(env=big)

    assert (
        await ask(child, "eval", "sum(len(os.environ[name]) for name in os.environ if name[:4] == 'BIG_')")
        == 17 * 65_000
    )


async def test_several_processes_get_one_computing_thread_each(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """O2: as torchrun does, unless the user has said otherwise."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    several = {"labels": ("gpus",), "sizes": (2,)}

    assert (await ask(await start(**several), "about"))["env"]["OMP_NUM_THREADS"] == "1"
    assert (await ask(await start(**several, env={"OMP_NUM_THREADS": "3"}), "about"))["env"]["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in (await ask(await start(), "about"))["env"]


async def test_generators_are_seeded_by_mesh_rank_and_incarnation(start: Start) -> None:
    """O2: the same three numbers give the same sequence, any other do not."""

    async def draw(seed: int, rank: int, incarnation: int) -> float:
        child = await start(labels=("r",), sizes=(9,), seed=seed, rank=rank, incarnation=incarnation)
        return float((await ask(child, "about"))["random"])

    first = await draw(1, 2, 3)

    assert await draw(1, 2, 3) == first
    assert first not in [await draw(2, 2, 3), await draw(1, 3, 3), await draw(1, 2, 4)]


def openblas_threads() -> str:
    """Return an expression for the thread count of the OpenBLAS that a process has mapped."""
    maps = "import_module('pathlib').Path('/proc/self/maps').read_text().splitlines()"
    path = f"next(line.split()[-1] for line in {maps} if 'openblas' in line)"
    return f"ctypes.CDLL({path}).scipy_openblas_get_num_threads64_()"


needs_numpy = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")


@needs_numpy
async def test_preloaded_numpy_gets_its_threads_and_seed_after_the_fork() -> None:
    """O2: the spawner holds it at one thread, so that it can be forked; the worker sets what the caller wants."""
    async with open_spawner(new_id(), entry=SERVE, preload=["numpy", "numpy.random"]) as launcher:
        several = {"labels": ("r",), "sizes": (2,)}
        specs = [
            spec_of(env={"OMP_NUM_THREADS": "2"}),
            spec_of(seed=1, rank=0, **several),
            spec_of(seed=1, rank=1, **several),
        ]
        children = [await launcher.launch(spec) for spec in specs]
        for child in children:
            await hear(child)

        assert await ask(children[0], "eval", openblas_threads()) == 2
        assert await ask(children[1], "eval", openblas_threads()) == 1
        drawn = [await ask(child, "eval", "float(sys.modules['numpy.random'].random())") for child in children]
        assert len(set(drawn)) == 3


@pytest.mark.torch
async def test_preloaded_torch_gets_its_threads_and_seed_after_the_fork() -> None:
    """O2, for torch: loaded once, forked twice."""
    async with open_spawner(new_id(), entry=SERVE, preload=["torch"]) as launcher:
        one = await launcher.launch(spec_of(env={"OMP_NUM_THREADS": "2"}))
        two = await launcher.launch(spec_of(labels=("r",), sizes=(2,), rank=1))
        for child in (one, two):
            await hear(child)

        counts = [await ask(child, "eval", "sys.modules['torch'].get_num_threads()") for child in (one, two)]
        seeds = [await ask(child, "eval", "sys.modules['torch'].initial_seed()") for child in (one, two)]

        assert counts == [2, 1]
        assert len(set(seeds)) == 2


@pytest.mark.daily
async def test_modules_are_loaded_once_for_all_and_torch_never_unasked() -> None:
    """O1: what `preload` names is there at once; nothing else is."""
    async with open_spawner(new_id(), entry=SERVE, preload=["wave"]) as launcher:
        child = await launcher.launch(spec_of(preload=("csv",)))
        await hear(child)

        about = await ask(child, "about")

        assert {"wave", "csv"} <= set(about["modules"])
        assert "torch" not in about["modules"]


async def test_eight_processes_start_concurrently(launcher: ProcLauncher) -> None:
    """Requests are pipelined: all eight are under way before the first has answered."""
    children = []

    async def launch(rank: int) -> None:
        children.append(await launcher.launch(spec_of(labels=("gpus",), sizes=(8,), rank=rank)))

    async with trio.open_nursery() as nursery:
        for rank in range(8):
            nursery.start_soon(launch, rank)

    assert sorted(child.name for child in children) == [f"w[gpus={rank}]" for rank in range(8)]
    assert len({child.pid for child in children}) == 8
    assert len(family(launcher.root_id)) == 9  # the spawner carries the marker, too


async def test_members_carry_a_marker_that_the_kernel_shows(launcher: ProcLauncher, start: Start) -> None:
    """A forked process is told from its siblings in /proc although it was never executed."""
    child = await start()

    seen = see(child.pid)

    assert seen is not None
    assert seen.marker == f"{launcher.root_id:016x}.{child.proc_id:016x}"
    assert (await ask(child, "about"))["env"]["TRIMESH_PROC"] == seen.marker


async def test_python_starts_by_exec(launcher: ProcLauncher, tmp_path: Path) -> None:
    """`python=`: the same worker, in an interpreter of its own that imports for itself."""
    child = await launcher.launch(spec_of(python=sys.executable, preload=("wave",), cwd=str(tmp_path), seed=5))
    await hear(child)

    about = await ask(child, "about")

    assert about["command"][0] == sys.executable
    assert "-c" in about["command"]  # behind the flags of this interpreter
    assert about["pid"] == child.pid == about["session"]
    assert about["cwd"] == str(tmp_path)
    assert about["path"] == sys.path
    assert about["argv"] == sys.argv
    assert "wave" in about["modules"]
    assert about["lifelines"] == 2
    assert len(set(about["fds"]) - set(about["own"])) == 1
    forked = await launcher.launch(spec_of(seed=5))
    await hear(forked)
    assert (await ask(forked, "about"))["random"] == about["random"]
