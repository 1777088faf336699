"""Many seeds inside one item: a simulated test is run under each, in a new world, and with what is new for each.

A test is *seeded* when it takes `backend` and that is simulated, or when it takes `seed`, of which its program is a
function. How many seeds it asks for, `@pytest.mark.seeds(n)` says; `--mesh-seeds` and the like override it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from trimesh.testing.running import SEEDED, SeedPlan

KEPT = frozenset(("without_collector", "poisoned"))
"""Fixtures that are the same for every seed: they have no state that one seed could leave to the next."""

SECONDS_OF_A_SEED = 5.0
"""What one seed may take, on a busy machine, before the item counts as hanging."""


GUEST_SHARE = 4
"""One seed in so many is run in guest mode, too: a program of it takes the same turns as without a host loop."""


def seeds_asked(item: pytest.Item) -> int:
    """Return how many seeds a test asks for: one, for the order of tasks is all that a seed decides of most."""
    marked = item.get_closest_marker("seeds")
    asked = 1 if marked is None else int(marked.args[0])
    call = getattr(item, "callspec", None)
    is_guest = call is not None and str(call.params.get("backend", "")).endswith("-guest")
    return -(-asked // GUEST_SHARE) if is_guest and not os.environ.get("CI_FULL") else asked


def mark_seeded(item: pytest.Function) -> None:
    """Mark a test that is to run under seeds, and give it the time for them."""
    params = set[str](item.callspec.params) if hasattr(item, "callspec") else set[str]()
    if item.get_closest_marker("one_seed") is not None:
        return
    unknown = set(item._fixtureinfo.argnames) - params - FRESH.keys() - KEPT
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid} runs under many seeds in one item; say what its fixtures {sorted(unknown)} are in each of "
            "them (FRESH or KEPT in tests/conformance/seeding.py), or mark it one_seed(reason)"
        )
    item.add_marker(SEEDED)
    option = item.config.getoption
    seconds = option("--mesh-seconds") or SECONDS_OF_A_SEED * (option("--mesh-seeds") or seeds_asked(item))
    item.add_marker(pytest.mark.timeout(float(item.config.getini("timeout")) + seconds))


# ---- what is new for each seed ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _backend(given: Any, seed: int) -> Generator[Any, None, None]:
    yield type(given)(seed)


@contextlib.contextmanager
def _tmp_path(given: Path, seed: int) -> Generator[Path, None, None]:
    folder = given / f"{seed:#x}"
    folder.mkdir()
    yield folder


@contextlib.contextmanager
def _monkeypatch(_: Any, __: int) -> Generator[pytest.MonkeyPatch, None, None]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@contextlib.contextmanager
def _caplog(given: pytest.LogCaptureFixture, _: int) -> Generator[pytest.LogCaptureFixture, None, None]:
    given.clear()
    yield given


@contextlib.contextmanager
def _capfd(given: pytest.CaptureFixture[str], _: int) -> Generator[pytest.CaptureFixture[str], None, None]:
    given.readouterr()
    yield given


@contextlib.contextmanager
def _seed(_: Any, seed: int) -> Generator[int, None, None]:
    yield seed


FRESH: dict[str, Callable[[Any, int], contextlib.AbstractContextManager[Any]]] = {
    "backend": _backend,
    "capfd": _capfd,
    "caplog": _caplog,
    "monkeypatch": _monkeypatch,
    "seed": _seed,
    "tmp_path": _tmp_path,
}
"""By the name of a fixture: what makes it anew, of what pytest has made for the item, for one seed."""


def run_seeds(item: pytest.Function, plan: SeedPlan) -> None:
    """Run a test under every seed; its first failure names the seed, and what repeats it."""
    __tracebackhide__ = True
    given = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    count = 0
    try:
        for seed in plan.seeds(seeds_asked(item)):
            count += 1
            with contextlib.ExitStack() as stack:
                fresh = {
                    name: stack.enter_context(FRESH[name](value, seed)) if name in FRESH else value
                    for name, value in given.items()
                }
                try:
                    item.obj(**fresh)
                except Exception as error:
                    line = f"replay: pytest '{item.nodeid}' --mesh-seed={seed:#x}"
                    error.add_note(line)
                    item.add_report_section("call", f"mesh seed {seed:#x}", line)
                    raise
    finally:
        item.user_properties.append((SEEDED.name, count))
