"""The table of the standard library is complete, holds in simulated actors, and is what the docs say.

`python -m tests.testing.test_stdlib_table` writes the table of docs/reference/simulated-modules.md anew.
"""

from __future__ import annotations

import datetime
import email.utils
import enum
import logging
import os
import random
import sched
import secrets
import signal
import ssl
import threading
import time
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
from tests.rows import rows

import trimesh
from trimesh import Actor, endpoint
from trimesh.testing import simulate
from trimesh.testing.simulated.guards import TABLE, Decisions, owner_of
from trimesh.testing.simulated.seeded_run import SeededOptions, run_once
from trimesh.testing.simulated.time import EPOCH_SECONDS

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "simulated-modules.md"
HEADER = ["| module | virtual | refused | real |", "|---|---|---|---|"]
HELPERS = frozenset({"abc", "collections", "collections.abc", "enum", "functools", "itertools", "types", "typing"})
"""Modules whose names others import without making them theirs."""

VALUES = (int, str, float, bytes, tuple, dict, set, frozenset, list, types.ModuleType, type(None))


def names_in(row: Decisions) -> list[str]:
    """Return every name that a row decides."""
    refused = " ".join(row.refused.values())
    return f"{row.virtual} {row.real} {refused} {row.through} {row.pure}".split()


def public_names(owner: Any) -> set[str]:
    """Return the names of a module or class that need a decision."""
    found = {name for name in dir(owner) if not name.startswith("_")} | ({"_exit"} & set(dir(owner)))
    values = {name: getattr(owner, name) for name in found}
    return {
        name
        for name, value in values.items()
        if not isinstance(value, VALUES)
        and not (isinstance(value, type) and issubclass(value, BaseException | enum.Enum))
        and (callable(value) or isinstance(value, property))
        and getattr(value, "__module__", None) not in HELPERS
    }


@rows("path", TABLE)
def test_every_public_name_is_decided_once(path):
    names = names_in(TABLE[path])
    assert len(names) == len(set(names)), "decided twice"
    if "*" not in names:
        assert public_names(owner_of(path)) <= set(names), "decide these in stdlib_table.py"


def table_of_docs() -> list[str]:
    """Return the lines of the table of the docs."""
    lines = list(HEADER)
    for path, row in TABLE.items():
        refused = " ".join([*row.refused.values(), row.through]).replace("__init__", "").split()
        if path.startswith("_") or "._" in path:
            continue  # what public names use
        if row.virtual or refused or row.note:
            virtual = ", ".join(f"`{name}`" for name in row.virtual.split())
            lines.append(f"| `{path}` | {virtual} | {', '.join(f'`{name}`' for name in refused)} | {row.note} |")
    return lines


def test_docs_have_the_table():
    lines = DOCS.read_text().splitlines()
    start = lines.index(HEADER[0])
    assert lines[start:] == table_of_docs(), "run python -m tests.testing.test_stdlib_table"


# ---- what actors get -------------------------------------------------------------------------------------------------


def refused_names() -> list[str]:
    found = [
        f"{path}.{name}" for path, row in TABLE.items() for names in row.refused.values() for name in names.split()
    ]
    return [one for one in found if hasattr(owner_of(one.rpartition(".")[0]), one.rpartition(".")[2])]


ARGUMENTS = {"locale.setlocale": (0, "C"), "resource.prlimit": (0, 0, (1, 1)), "os.kill": (4_194_305, signal.SIGTERM)}


class Probe(Actor):
    """Reads and changes the world by the standard library."""

    @endpoint
    async def refusals(self) -> dict[str, str]:
        """Call every refused name without arguments; return the texts."""
        found: dict[str, str] = {}
        for one in refused_names():
            path, _, name = one.rpartition(".")
            try:
                getattr(owner_of(path), name)(*ARGUMENTS.get(one, ()))
            except RuntimeError as error:
                found[one] = str(error)
            except Exception as error:  # noqa: BLE001 - the real one ran
                found[one] = repr(error)
        return found

    @endpoint
    async def moment(self) -> dict[str, float]:
        """Return what everything says that reads the wall clock."""
        record = logging.makeLogRecord({})
        return {
            "time": time.time(),
            "time_ns": time.time_ns() / 1e9,
            "clock_gettime": time.clock_gettime(time.CLOCK_REALTIME),
            "clock_gettime_ns": time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
            "strftime": time.mktime(time.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S")),
            "asctime": time.mktime(time.strptime(time.asctime())),
            "ctime": time.mktime(time.strptime(time.ctime(None))),
            "localtime": time.mktime(time.localtime()),
            "datetime.now": datetime.datetime.now(datetime.UTC).timestamp(),
            "datetime.today": datetime.datetime.today().timestamp(),
            "date.today": time.mktime(datetime.date.today().timetuple()) + 86_400 / 2,
            "formatdate": email.utils.mktime_tz(email.utils.parsedate_tz(email.utils.formatdate())),
            "email.localtime": email.utils.localtime().timestamp(),
            "LogRecord": record.created,
        }

    @endpoint
    async def processor(self) -> list[float]:
        return [
            time.process_time(),
            time.thread_time_ns() / 1e9,
            time.clock_gettime(time.CLOCK_MONOTONIC),
            os.times().elapsed,
            time.monotonic(),
        ]

    @endpoint
    async def draws(self) -> list[Any]:
        return [
            os.getrandom(8),
            ssl.RAND_bytes(8),
            uuid.getnode(),
            *(getattr(uuid, name)().hex for name in ("uuid1", "uuid4", "uuid6", "uuid7") if hasattr(uuid, name)),
            secrets.token_hex(),
            random.SystemRandom().random(),
            email.utils.make_msgid(domain="example.org"),
            os.getpid(),
        ]

    @endpoint
    async def scheduled(self) -> float:
        start = time.monotonic()
        scheduler = sched.scheduler()
        scheduler.enter(5.0, 1, int)
        scheduler.run()
        return time.monotonic() - start

    @endpoint
    async def kill_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def wait_for_a_thread(self) -> None:
        threading.Event().wait()

    @endpoint
    async def alarm(self) -> None:
        signal.alarm(1)


@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow", "ignore::DeprecationWarning")
@simulate(seeds=1, per_host={"gpus": 1})
async def test_every_refused_name_raises(mesh):
    probe = await mesh.spawn("probe", Probe)
    texts = await probe.refusals.call_one()

    assert texts.keys() == set(refused_names())
    assert {one: text for one, text in texts.items() if "a simulated actor cannot" not in text} == {}
    assert {one: text for one, text in texts.items() if 'mesh_backend("proc")' not in text} == {}


@simulate(seeds=2, per_host={"gpus": 1})
async def test_all_wall_clocks_agree(mesh, faults):
    faults.clock({"gpus": 0}).jump(1_000_000.0)
    probe = await mesh.spawn("probe", Probe)
    moment = await probe.moment.call_one()

    assert {name: seconds for name, seconds in moment.items() if abs(seconds - moment["time"]) > 86_400} == {}
    assert 0 <= moment["time"] - EPOCH_SECONDS - 1_000_000 < 60


@simulate(seeds=2, per_host={"gpus": 1})
async def test_processor_time_is_virtual(mesh):
    probe = await mesh.spawn("probe", Probe)
    clocks = await probe.processor.call_one()

    assert max(clocks) - min(clocks) < 1e-6


def test_what_is_drawn_follows_from_the_seed():
    def draw(seed: int) -> list[list[Any]]:
        drawn: list[list[Any]] = []

        async def body(mesh: Any) -> None:
            probe = await mesh.spawn("probe", Probe)
            drawn.extend((await probe.draws.call()).values())

        outcome = run_once(body, {"mesh": None}, SeededOptions({"gpus": 2}), seed)
        assert outcome.error is None
        return drawn

    first = draw(1)

    assert draw(1) == first
    other = draw(2)
    assert all(one != two for one, two in zip(first[0][:-1], other[0][:-1], strict=True))  # but for the process number
    assert all(one != two for one, two in zip(*first, strict=True))


@simulate(seeds=2, per_host={"gpus": 1})
async def test_scheduler_runs_in_virtual_time(mesh):
    probe = await mesh.spawn("probe", Probe)

    assert await probe.scheduled.call_one() == pytest.approx(5.0)


@simulate(seeds=1, per_host={"gpus": 2})
async def test_process_numbers_are_of_the_simulation(mesh):
    probe = await mesh.spawn("probe", Probe)
    with pytest.raises(trimesh.MeshErrorGroup) as caught:
        await probe.kill_itself.call()

    texts = {str(leaf).splitlines()[0] for leaf in trimesh.leaves(caught.value)}
    assert len(texts) == 2
    for text in texts:
        assert "cannot send signals" in text
        assert "got os.kill(1000000" in text
        assert 'faults.kill(members, how="sigkill")' in text
    assert os.getpid() < 1 << 22


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("wait_for_a_thread", "cannot wait for another thread"),
        ("alarm", r"cannot set a timer of the system: .*got signal.alarm\(1\); use `trio.sleep`"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@simulate(seeds=1, per_host={"gpus": 1})
async def test_refused_where_it_would_wait_or_disturb(mesh, name, text):
    probe = await mesh.spawn("probe", Probe)
    with pytest.raises(RuntimeError, match=text):
        await getattr(probe, name).call_one()


@simulate(seeds=1, per_host={"gpus": 1})
async def test_log_records_of_the_test_have_virtual_time(mesh, caplog):
    del mesh
    logging.getLogger(__name__).warning("in a simulation")

    (record,) = caplog.records
    assert 0 <= record.created - EPOCH_SECONDS < 60
    assert record.relativeCreated == pytest.approx((record.created - EPOCH_SECONDS) * 1000)
    assert time.time() > EPOCH_SECONDS + 600_000_000  # the body's own clocks are real


def test_all_is_real_again_after_a_simulation():
    def values() -> dict[str, Any]:
        names = [
            *refused_names(),
            *(f"time.{name}" for name in TABLE["time"].virtual.split()),
            "os.getpid",
            "os.urandom",
        ]
        return {one: getattr(owner_of(one.rpartition(".")[0]), one.rpartition(".")[2]) for one in names}

    async def body(mesh: Any) -> None:
        del mesh
        assert values() != before

    before = values()
    assert run_once(body, {"mesh": None}, SeededOptions({"gpus": 1}), 0).error is None

    assert values() == before
    assert logging.makeLogRecord({}).created > EPOCH_SECONDS + 600_000_000


def write_docs() -> None:
    """Write the table of docs/reference/simulated-modules.md anew."""
    lines = DOCS.read_text().splitlines()
    start = lines.index(HEADER[0])
    DOCS.write_text("\n".join([*lines[:start], *table_of_docs()]) + "\n")


if __name__ == "__main__":
    write_docs()
