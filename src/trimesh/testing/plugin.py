"""The pytest plugin: `@simulate`, the marker `mesh_backend`, the fixtures of a mesh test, and the zombie guard.

pytest finds it by its entry point; in a checkout, `-p trimesh.testing.plugin` loads it. It works beside pytest-trio:
mesh tests run here, in any mode of pytest-trio.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from typing import Any, cast

import pytest

from trimesh.actor.actor import Actor
from trimesh.errors import MeshErrorGroup, first_failure, has_origin, leaves
from trimesh.testing.plans.plan import expand
from trimesh.testing.real.host_network import why_no_networks
from trimesh.testing.running import (
    BACKENDS,
    FRESH,
    OPTIONS,
    SEEDED,
    ItemRun,
    RunSettings,
    SeedPlan,
    Simulated,
    read_seed,
    runs_told,
)
from trimesh.testing.verdicts import VERDICT, differing
from trimesh.testing.zombie_guard import guard

_BODY: pytest.StashKey[Any] = pytest.StashKey()
_PLAN: pytest.StashKey[SeedPlan] = pytest.StashKey()
_BACKENDS_DEFAULT = ("sim", "proc")
_GUARDED = ("all", "mesh", "off")


def _left_out(text: str) -> frozenset[str]:
    try:
        return expand(text)
    except ValueError as error:
        raise pytest.UsageError(f"--mesh-leave-out: {error}") from None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--mesh-*`."""
    group = parser.getgroup("trimesh", "simulated meshes")
    group.addoption("--mesh-seed", type=read_seed, metavar="SEED", help="run this seed only")
    group.addoption("--mesh-seeds", type=int, metavar="N", help="number of seeds of every simulated test")
    group.addoption(
        "--mesh-first-seed", type=read_seed, default=0, metavar="SEED", help='first seed, or "fresh" to draw one'
    )
    group.addoption("--mesh-seconds", type=float, metavar="S", help="time shared by all tests, each for many seeds")
    group.addoption(
        "--mesh-fresh-seconds", type=float, metavar="S", help="time shared likewise for fresh seeds, after the others"
    )
    group.addoption("--mesh-fresh-seed", type=read_seed, metavar="SEED", help="first fresh seed; drawn unless given")
    group.addoption("--mesh-trace", metavar="FILE", help="write the trace of the last run, or of the failed one")
    group.addoption("--mesh-leave-out", default="", metavar="KEYS", help="run without these faults and steps")
    parser.addini("mesh_zombie_guard", "guarded tests: all, mesh (default), off", default="mesh")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", 'mesh_backend(*names): run on "sim", "proc", "net"; by default on the first two')
    config.addinivalue_line("markers", "real: starts real processes")
    config.addinivalue_line("markers", f"{SEEDED.name}: runs in simulation, under seeds; set automatically")
    if config.option.mesh_fresh_seconds and config.option.mesh_fresh_seed is None:
        config.option.mesh_fresh_seed = read_seed(FRESH)  # drawn here once, and passed to workers of xdist
    if config.getini("mesh_zombie_guard") not in _GUARDED:
        value = config.getini("mesh_zombie_guard")
        raise pytest.UsageError(f"mesh_zombie_guard must be one of {', '.join(_GUARDED)}, got {value!r}")


def simulated_of(item: pytest.Function) -> Simulated | None:
    """Return the arguments of `simulate` for a test, if it has any."""
    found: Simulated | None = getattr(item.obj, OPTIONS, None)
    return found


def _backends_of(marked: pytest.Mark) -> tuple[str, ...]:
    names = tuple(marked.args) or _BACKENDS_DEFAULT
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise pytest.UsageError(f"mesh_backend takes {', '.join(BACKENDS)}, got {', '.join(map(repr, unknown))}")
    return names


def _marks_of(backend: str) -> list[pytest.MarkDecorator]:
    marks = [] if backend == "sim" else [pytest.mark.real]
    reason = why_no_networks() if backend == "net" else None
    return marks if reason is None else [*marks, pytest.mark.skip(reason=reason)]


def _backend_of(item: pytest.Function) -> str:
    """Return the back end of a mesh test from its parameters: pytest drops a fixture that no argument names."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    return str(params.get("mesh_backend_name", "sim"))


def _test_of(item: pytest.Function) -> tuple[str, str, str]:
    """Return file and name of a test without its back end, and the back end."""
    backend = _backend_of(item)
    file, _, name = item.nodeid.partition("::")
    test, _, parameters = name.partition("[")
    others = [one for one in parameters.removesuffix("]").split("-") if one != backend]
    return file, f"{test}[{'-'.join(others)}]" if others else test, backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one item for each back end of a marked test."""
    marked = metafunc.definition.get_closest_marker("mesh_backend")
    if marked is None:
        return
    names = _backends_of(marked)
    metafunc.fixturenames.append("mesh_backend_name")
    values = [pytest.param(name, marks=_marks_of(name)) for name in names]
    metafunc.parametrize("mesh_backend_name", values, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the bodies of mesh tests, before another plugin wraps them; mark those that run under seeds."""
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        is_marked = item.get_closest_marker("mesh_backend") is not None
        if (simulated_of(item) is not None or is_marked) and inspect.iscoroutinefunction(item.obj):
            item.stash[_BODY] = item.obj
            if _backend_of(item) == "sim":
                item.add_marker(SEEDED)
            if is_marked:
                item.user_properties.append((VERDICT, [*_test_of(item), 0, None]))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Plan the seeds of every test, which divide the given time among them."""
    config = session.config
    option = cast("Callable[[str], Any]", config.getoption)
    seeded = sum(item.get_closest_marker(SEEDED.name) is not None for item in session.items)
    share = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / max(seeded, 1)
    seconds: float | None = option("--mesh-seconds")
    config.stash[_PLAN] = SeedPlan(
        only=option("--mesh-seed"),
        first=option("--mesh-first-seed"),
        count=option("--mesh-seeds"),
        seconds=None if seconds is None else seconds * share,
        fresh_first=option("--mesh-fresh-seed") or 0,
        fresh_seconds=(option("--mesh-fresh-seconds") or 0.0) * share,
    )


def plan_of(item: pytest.Item) -> SeedPlan:
    """Return the seeds of a test."""
    return item.config.stash[_PLAN]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report the first seeds if they are not 0."""
    first, fresh = config.getoption("--mesh-first-seed"), config.getoption("--mesh-fresh-seed")
    lines = [f"mesh: first seed {first:#x}"] if first else []
    return [*lines, f"mesh: fresh seeds from {fresh:#x} on"] if fresh else lines


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Report the number of tests and runs under seeds, and tests whose back ends differ."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    first = int(config.getoption("--mesh-first-seed") or 0)
    properties = (getattr(report, "user_properties", ()) for report in reports)
    told = runs_told(properties, first, config.getoption("--mesh-fresh-seed"))
    if told:
        terminalreporter.write_line(f"mesh: {told}")
    for line in differing([*reports, *terminalreporter.getreports("skipped")]):
        terminalreporter.write_line(f"mesh: {line}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a mesh test: all its seeds, or its body over real processes."""
    __tracebackhide__ = True
    body = pyfuncitem.stash.get(_BODY, None)
    if body is None:
        return None
    option = cast("Callable[[str], Any]", pyfuncitem.config.getoption)
    names = pyfuncitem._fixtureinfo.argnames  # noqa: SLF001 - what pytest itself passes on
    wanted = {name: pyfuncitem.funcargs[name] for name in names}
    settings = RunSettings(
        seeds=plan_of(pyfuncitem),
        trace_file=option("--mesh-trace"),
        left_out=_left_out(option("--mesh-leave-out")),
    )
    run = ItemRun(pyfuncitem.nodeid, body, wanted, getattr(body, OPTIONS, None), settings)
    try:
        BACKENDS[_backend_of(pyfuncitem)](run)
    finally:
        if run.ran:
            pyfuncitem.user_properties.append((SEEDED.name, len(run.ran)))
        for name, verdict in pyfuncitem.user_properties:
            if name == VERDICT:
                cast("list[object]", verdict)[-2:] = [len(run.ran), run.failed]
        for title, text in run.sections:
            pyfuncitem.add_report_section("call", title, text)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the first failure of a group in its line of the short summary."""
    report = yield
    error: object = None if call.excinfo is None else call.excinfo.value
    crash = getattr(report.longrepr, "reprcrash", None)
    if isinstance(error, BaseExceptionGroup) and crash is not None:
        group = cast("BaseExceptionGroup[BaseException]", error)
        if _BODY in item.stash or _is_of_mesh(group):
            crash.message = first_failure([group])
    return report


def _is_of_mesh(error: BaseExceptionGroup[BaseException]) -> bool:
    """Return whether the failure came from a member of a mesh, in any test."""
    return isinstance(error, MeshErrorGroup) or any(has_origin(leaf) for leaf in leaves(error))


# ---- fixtures --------------------------------------------------------------------------------------------------------


class Provided:
    """Placeholder of a fixture that each run of a mesh test fills in anew."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(
            f"the fixture {self._name!r} exists only inside a test under @trimesh.testing.simulate or marked "
            f"mesh_backend, not in other fixtures; got a read of {attribute!r} elsewhere: read it in the test"
        )


@pytest.fixture
def substitute() -> Generator[Callable[[type[Actor], type[Actor]], None], None, None]:
    """Function that replaces an actor class until the end of the test: see `trimesh.testing.substitute`."""
    from trimesh.testing import substitution  # noqa: PLC0415 - few tests need it

    with ExitStack() as stack:
        yield lambda cls, fake: stack.enter_context(substitution.substitute(cls, fake))


@pytest.fixture
def mesh() -> Any:
    """The processes of a mesh test: a `ProcMesh` of `per_host`, new for each seed."""
    return Provided("mesh")


@pytest.fixture
def host_mesh() -> Any:
    """The hosts of a mesh test with `hosts=`: a `HostMesh`, new for each seed."""
    return Provided("host_mesh")


@pytest.fixture
def faults() -> Any:
    """Plans faults: `trimesh.testing.Faults`."""
    return Provided("faults")


@pytest.fixture
def fault_log() -> Any:
    """Return the faults that have fired so far: a list of `trimesh.testing.Fired`."""
    return Provided("fault_log")


@pytest.fixture
def chaos() -> Any:
    """Random faults: `trimesh.testing.Chaos`."""
    return Provided("chaos")


@pytest.fixture
def mesh_backend_name(request: pytest.FixtureRequest) -> str:
    """Name of the back end that the test runs on."""
    name: str = getattr(request, "param", "sim")
    return name


@pytest.fixture(autouse=True)
def zombie_guard(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process, thread, descriptor or shared-memory name behind."""
    which = request.config.getini("mesh_zombie_guard")
    is_mesh_test = _BODY in request.node.stash
    if which == "all" or (which == "mesh" and is_mesh_test):
        yield from guard()
    else:
        yield
