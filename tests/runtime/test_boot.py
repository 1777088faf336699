"""Rule O3: how a worker ends, and rule O2's small parts, looked at one by one."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
from tests.runtime.conftest import Start, ask, tell
from tests.runtime.processes import Controller

from trimesh._runtime.spawner import boot, wire
from trimesh._runtime.spawner import launcher as spawner_caller
from trimesh._runtime.spawner.launcher import ProcLauncher

real = pytest.mark.real


@real
async def test_ending_runs_atexit_functions(start: Start, tmp_path: Path) -> None:
    """Z12: as the interpreter would."""
    child = await start()

    await tell(child, "end", "atexit", str(tmp_path / "mark"))
    report = await child.wait_exited()

    assert report.exit_code == 0
    assert (tmp_path / "mark").read_text() == "atexit ran"


@real
async def test_ending_flushes_what_was_printed(
    launcher: ProcLauncher, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the program has made its stream block-buffered."""
    child = await start()

    await tell(child, "end", "unflushed", "the end")
    await child.wait_exited()
    await launcher.flush_output()

    assert capsys.readouterr().out == "w | the end\n"


@real
async def test_ending_tells_idle_pools_to_end_and_prints_nothing(start: Start) -> None:
    """Z11: a thread pool that nobody has shut down ends at once, silently."""
    child = await start()

    await tell(child, "end", "pool")
    report = await child.wait_exited()

    assert (report.exit_code, report.stderr_tail) == (0, "")  # threads that have to be left are told


@real
async def test_ending_does_not_wait_for_ever_for_threads(start: Start) -> None:
    """Bounded; the threads that were left are named."""
    child = await start()

    await tell(child, "end", "thread")
    report = await child.wait_exited()

    assert report.exit_code == 0
    assert "threads still run" in report.stderr_tail
    assert "sleeper" in report.stderr_tail


@real
@pytest.mark.parametrize("code", [0, 3, 255, 256 + 7])
async def test_ending_returns_the_entry_s_code(start: Start, code: int) -> None:
    """As `sys.exit` does: the low byte."""
    child = await start()

    await tell(child, "exit", code)

    assert (await child.wait_exited()).exit_code == code % 256


@real
async def test_ending_closes_standard_streams_that_the_program_has_closed(start: Start) -> None:
    """A closed stream is no reason not to end well."""
    child = await start()
    await ask(child, "eval", "repr(sys.stdout.close())")

    await tell(child, "exit", 0)

    assert (await child.wait_exited()).exit_code == 0


# ---- small parts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def preserved() -> object:
    """Leave the interpreter as it was."""
    path = list(sys.path)
    with warnings.catch_warnings():
        yield
    sys.path[:] = path


def test_warning_filters_come_through_as_they_were(preserved: object) -> None:
    """Texts, compiled patterns, lines and order; a category whose module is not loaded is left out."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore", ResourceWarning)
    warnings.filterwarnings("error", "some .*message", UserWarning, "some.module", 17)
    captured = spawner_caller.warning_filters()
    foreign = wire.WarningFilter("ignore", "", "no.such.module", "Nested.Warning", "", 0)
    warnings.resetwarnings()

    boot.set_warning_filters([*captured, foreign])

    assert spawner_caller.warning_filters() == captured
    assert len(captured) == 2
    assert captured[0] == wire.WarningFilter("error", "some .*message", "builtins", "UserWarning", "some.module", 17)


@pytest.mark.parametrize(
    ("version", "prefixes", "expected"),
    [
        (sys.version_info[:2], None, ["/usr/lib/other", "/opt/py/lib/site-packages", "/home/me/code"]),
        ((2, 7), ["/opt/py"], ["/usr/lib/other", "/home/me/code"]),
        ((2, 7), ["/opt/p"], ["/usr/lib/other", "/opt/py/lib/site-packages", "/home/me/code"]),
    ],
)
def test_another_interpreter_gets_the_caller_s_own_folders_only(
    version: tuple[int, int], prefixes: list[str] | None, expected: list[str], preserved: object
) -> None:
    """The same Python gets the whole path; another one all but what is installed in the caller's."""
    context = spawner_caller.capture_caller({}, are_several=False)
    own = [os.fsencode(prefix) for prefix in (boot.own_prefixes() if prefixes is None else prefixes)]
    path = ("/usr/lib/other", "/opt/py/lib/site-packages", "/home/me/code")
    changed = wire.CallerContext(
        **{name: getattr(context, name) for name in context.__struct_fields__}
        | {"version": version, "prefixes": tuple(own), "sys_path": tuple(map(os.fsencode, path))}
    )
    before = list(sys.path)

    boot.merge_sys_path(changed)

    assert sys.path == (expected if prefixes is None else [*expected, *before])


def test_context_of_a_caller_is_what_the_kernel_says() -> None:
    """The umask is read, not changed; the overlay wins."""
    mask = os.umask(0o031)
    try:
        context = spawner_caller.capture_caller({"HOME": "/elsewhere"}, are_several=True, cwd=".")
    finally:
        os.umask(mask)

    assert context.umask == 0o031
    assert context.env[b"HOME"] == b"/elsewhere"
    assert context.cwd == os.fsencode(Path.cwd())


@real
async def test_worker_of_a_program_without_streams_still_runs() -> None:
    """A controller that was started with closed stdout and stderr (a service)."""
    controller = Controller("without_streams")
    try:
        assert await controller.wait() == 0
    finally:
        controller.close()
