"""What every test runs under: skips for what is not installed. The zombie guard is the plugin's (`pyproject.toml`)."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests import program_template, tiers
from tests.agent_copies import copied_agents
from tests.collection import pytest_collection
from tests.lifetime import processes, program
from tests.program_template import Run, running
from tests.sharing import pytest_xdist_make_scheduler
from tests.spawner_template import IS_POSSIBLE, PROGRAMS, WARM, WARM_WITH_TORCH, SpawnerTemplate

from trimesh._runtime.spawner import spawner_process
from trimesh.testing import zombie_guard

__all__ = ["pytest_collection", "pytest_xdist_make_scheduler"]  # pytest finds hooks here

# A machine with two cores and other work has no deadline for an example, nor for making one.
settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("few", settings.get_profile("loaded"), max_examples=10)  # for other versions of Python
settings.load_profile("loaded")

# ---- tiers, and what the shell has taken away ------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Load the tiers. Handle Ctrl-C in tests that a script started in the background: its shell ignores SIGINT.

    Programs that tests start inherit the default then; a handler does not survive `exec`, to be ignored does.
    """
    config.pluginmanager.register(tiers)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- what a collection looks at --------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what is here before the first test: it is a quarter of a million objects.

    A full collection takes 0.2 s with them and nothing without, and many tests ask for one.
    """
    gc.collect()
    gc.freeze()


# ---- quick starts ----------------------------------------------------------------------------------------------------

TESTS = Path(__file__).parent
QUICK = frozenset(
    (
        *("actor", "aio", "blocking", "conformance", "data", "lifetime", "observe", "rdma", "runtime"),
        *("service", "spmd", "tensor", "testing"),
    )
)
"""Folders whose tests open meshes themselves, so that their spawners, and agents, may be copies of a template. Others
run whole programs."""

OF_PROGRAMS = WARM if importlib.util.find_spec("torch") is None else WARM_WITH_TORCH
"""What programs are copies of where what they print is the subject."""

QUICK_HOSTS = frozenset(("jobs", "jobs/code", "jobs/network", "jobs/packages"))
"""Folders about what hosts do, likewise."""

EXECUTED = frozenset(("test_agent_template.py", "test_autopsy.py", "test_local_job.py"))
"""Files in those about how agents start and end, and about runs that have died."""


def warmth_of(item: pytest.Item) -> tuple[str, ...] | None:
    """Return what the spawners and agents of a test have imported if they are copies, else None."""
    if item.get_closest_marker("real") is None or item.get_closest_marker("executed") is not None:
        return None
    folder = item.path.parent.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    if item.path.name in EXECUTED or folder not in QUICK | QUICK_HOSTS:
        return None
    return WARM if item.get_closest_marker("torch") is None else WARM_WITH_TORCH


def runs_programs(item: pytest.Item) -> bool:
    """Return whether a test may run programs, by what its module has imported."""
    has_some = item.path.is_relative_to(TESTS / "programs") or hasattr(getattr(item, "module", None), "Program")
    return has_some and item.get_closest_marker("real") is not None and item.get_closest_marker("executed") is None


def opens_scripts(item: pytest.Item) -> bool:
    """Return whether a test may open scripts, by what its module has imported."""
    return hasattr(getattr(item, "module", None), "open_script")


@pytest.fixture(scope="session")
def spawner_templates(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, ...], SpawnerTemplate]]:
    """Templates of spawners, by what they have imported; made before any test is asked what it has left."""
    items = [item for item in request.session.items if item.get_closest_marker("skip") is None]
    wanted = {warmth_of(item) for item in items}
    if any(runs_programs(item) for item in items):
        wanted.add(PROGRAMS)
    if any(opens_scripts(item) for item in items):
        wanted.add(WARM)
    if any("run_program" in getattr(item, "fixturenames", ()) for item in items):
        wanted |= {WARM, OF_PROGRAMS}
    if not IS_POSSIBLE:
        wanted.clear()
    env = {**os.environ, zombie_guard.MARKER: zombie_guard.RUN_ID, processes.MARKER: "0" * program.MARK_CHARS}
    templates = {modules: SpawnerTemplate(env, modules) for modules in wanted if modules is not None}
    yield templates
    for template in templates.values():
        template.close()


@pytest.fixture(scope="session")
def run_program(spawner_templates: dict[tuple[str, ...], SpawnerTemplate]) -> Iterator[Run]:
    """Runs programs in copies of one interpreter, where that is possible; with torch, whose copies cost twice as much,
    if they name it."""
    with (
        running(spawner_templates.get(WARM)) as run_without,
        running(spawner_templates.get(OF_PROGRAMS)) as run_with_torch,
    ):

        def run(program: Path, *options: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
            chosen = run_with_torch if "torch" in (cwd / program).read_text() else run_without
            return chosen(program, *options, cwd=cwd, **more)

        yield run


@pytest.fixture(autouse=True)
def quick_starts(
    request: pytest.FixtureRequest, spawner_templates: dict[tuple[str, ...], SpawnerTemplate]
) -> Iterator[None]:
    """Let a template make the spawners of a test, if it is one of those."""
    warmth = warmth_of(request.node)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if warmth in spawner_templates:
            template = spawner_templates[warmth]
            stack.enter_context(copied_agents(template))
            patch.setattr(spawner_process, "_execute", template.execute)
        if opens_scripts(request.node):
            patch.setattr(program_template, "template", spawner_templates.get(WARM))
        if runs_programs(request.node):
            patch.setattr(program, "template", spawner_templates.get(PROGRAMS))
        yield


# ---- options ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make test` and `make scenarios`; here, because only what pytest reads first can add one."""
    tiers.add_option(parser)
    parser.addoption("--rewrite-scenarios", action="store_true", help="write tests/scenarios/scripts anew")


# ---- what is not installed -------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `torch` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        for item in itertools.filterfalse(lambda item: item.get_closest_marker("torch") is None, items):
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
