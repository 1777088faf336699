"""Fixtures of the mesh suite: `backend` runs a test over simulated and over real processes."""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.meshes import BACKENDS, Backend, params
from tests.conformance.seeding import mark_seeded, run_seeds

from trimesh.testing.plugin import plan_of
from trimesh.testing.running import SEEDED


@pytest.fixture(params=params(*BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    """The processes of the test; `@pytest.mark.parametrize("backend", ["sim"], indirect=True)` restricts it."""
    return BACKENDS[request.param]()


@pytest.fixture
def seed() -> int:
    """The seed of a test whose program is drawn from it: each of them in turn."""
    return 0


def run_on_backend(test: partial[Awaitable[None]], **options: Any) -> None:
    """Run a test inside the world of its back end; then nothing may be left."""
    backend: Backend = test.keywords["backend"]

    async def main() -> None:
        async with backend.open():
            await test()
            await backend.check_clean()

    backend.run(main, instruments=options["instruments"])


SEEDED_BACKENDS = ("sim", "sim-typed")
"""Where other seeds show anything new: real processes have none, and a guest takes the same turns."""

TYPED = frozenset(
    f"test_{name}"
    for name in (
        "actor_restarts", "buffer_batches", "buffer_ends", "buffers",
        "cancellation", "channel_bounds", "channel_deaths", "channel_ends",
        "channel_refusals", "channel_sweeps", "channels", "checkpoints", "choosing", "context", "deadlines", "deadlock",
        "deadlock_graphs", "deadlock_streams", "deaths", "elastic", "elastic_handles",
        "entering", "error_types", "errors", "events", "failures", "functions",
        "isolation", "mailbox", "map", "map_ends", "membership", "metrics", "options", "ownership",
        "references", "restart_arguments", "restart_limits", "restart_table", "spawn_failures", "spawning", "stalls",
        "statistics", "stopping", "stream_failures", "stream_steps", "streams", "supervised_streams",
        "shared_procs", "supervision", "values", "without_pickle", "typed_channels", "publications", "multicast",
        "started", "replied", "replies", "reduced", "typed_services",
    )
)  # fmt: skip
"""Modules that run in simulation without pickle, too. A test whose values need it is marked `by_value`."""

TYPED_REAL = frozenset(
    f"test_{name}"
    for name in (
        "error_types",
        "errors",
        "functions",
        "ownership",
        "references",
        "replied",
        "spawning",
        "typed_channels",
        "typed_services",
        "values",
        "without_pickle",
    )
)
"""Those that do so over real processes. How values travel has nothing to do with when processes die and clocks run
out, so the others do it in simulation only, unless CI_FULL is set."""


GUEST = re.compile(r"\b[CEDZ]\d\d\b")
"""What a test cites that runs in guest mode, too (K04)."""

GUEST_REAL = frozenset(f"test_{name}" for name in ("cancellation", "deadlines", "deaths", "errors", "spawn_failures"))
"""Modules that do so over real processes; the others in simulation only, unless CI_FULL is set."""


def _is_left_out(item: pytest.Item) -> bool:
    """Return whether a test is not to run on its back end: its values need pickle, or it would show nothing new."""
    call = getattr(item, "callspec", None)
    name = "" if call is None else str(call.params.get("backend", ""))
    if name.endswith("-guest"):
        function: Any = getattr(item, "function", None)
        is_core = name.startswith("sim") or item.path.stem in GUEST_REAL or os.environ.get("CI_FULL")
        return not (is_core and GUEST.search(function.__doc__ or ""))
    if not name.endswith("-typed"):
        return False
    modules = TYPED if name == "sim-typed" or os.environ.get("CI_FULL") else TYPED_REAL
    return item.path.stem not in modules or item.get_closest_marker("by_value") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test that takes `backend` its runner, mark those that run under seeds; leave out what cannot run."""
    here = Path(__file__).parent
    left_out: set[int] = set()
    for item in items:
        if item.path.parent != here or not isinstance(item, pytest.Function):
            continue
        params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        if "backend" in item.fixturenames:
            item.add_marker(pytest.mark.trio(run=run_on_backend), append=False)  # before the one of pytest-trio itself
            if _is_left_out(item):
                left_out.add(id(item))
        if params.get("backend") in SEEDED_BACKENDS or "seed" in set(item.fixturenames) - params.keys():
            mark_seeded(item)
    items[:] = [item for item in items if id(item) not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a seeded test under its seeds."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker(SEEDED.name) is None:
        return None
    run_seeds(pyfuncitem, plan_of(pyfuncitem))
    return True
