"""The overview of a run in a notebook, parsed from its HTML."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from msgspec import structs
from tests.rows import rows

from trimesh import limits
from trimesh.errors import place_name
from trimesh.mesh_drawing import CELLS_MAX
from trimesh.observe import ActorRow, CallRow, EndpointRow, EventRow, JobRow, MetricRow, ProcRow, RunSnapshot, SampleRow
from trimesh.observe.overview import Overview
from trimesh.observe.past import Past, PastPoint

SVG = "{http://www.w3.org/2000/svg}"
BYTES_MAX = 600_000
"""Of the overview of a run with `CELLS_MAX` processes."""


def proc(mesh: str, point: dict[str, int], **more: Any) -> ProcRow:
    name = place_name(mesh, point)
    return ProcRow(**{"id": name, "parent": "0", "name": name, "mesh": mesh, "point": point} | more)


def actor(of: ProcRow, **more: Any) -> ActorRow:
    return ActorRow(proc=of.id, name=place_name("trainer", of.point), mesh="trainer", point=of.point, **more)


def run_of(*procs: ProcRow, at: float = 100.0, **tables: Any) -> RunSnapshot:
    job = JobRow(id="0", pid=25871, host="here", started_at=90.0)
    return RunSnapshot(taken_at=at, job=job, procs=(ProcRow(id="0", pid=25871), *procs), **tables)


def page_of(*snapshots: RunSnapshot, first: str = "trainers", has_ended: bool = False) -> ElementTree.Element:
    overview = Overview(first)
    for one in snapshots:
        overview.add(one)
    return ElementTree.fromstring(overview.html(has_ended=has_ended))


def text_of(page: ElementTree.Element) -> str:
    return " ".join(" ".join(page.itertext()).split())


def titles(page: ElementTree.Element) -> list[str]:
    return [title.text or "" for title in page.iter(f"{SVG}title")]


def cards(page: ElementTree.Element) -> list[str]:
    return [code.text or "" for code in page.iter("code")]


def test_mesh_of_processes_is_one_card_with_what_its_actors_do() -> None:
    """OV-1: the mesh of the handle comes first; a process that does not run has its own state."""
    procs = [proc("trainers", {"gpus": rank}) for rank in range(5)]
    told = "Stalled trainers[gpus=4] does not turn its loop"
    procs[4] = proc("trainers", {"gpus": 4}, state="stuck", stalled_seconds=6.0, last_event=told)
    found = page_of(
        run_of(
            proc("generators", {"replica": 0}, memory_bytes=33 << 20),
            *procs,
            actors=(
                actor(procs[0], running=1),
                actor(procs[1], running=1, queued=2),
                actor(procs[2]),
                actor(procs[3], state="ended"),
                actor(procs[4], running=1),
            ),
            calls=(
                CallRow(id="a", proc=procs[0].id, name="", mesh="trainer", endpoint="step", state="running", age=2.0),
            ),
        )
    )

    assert cards(found) == ["trainers{'gpus': 5}", "generators{'replica': 1}"]
    assert sorted(titles(found)) == [
        "generators[replica=0]: running, 33.0 MiB",
        "trainers[gpus=0]: busy, step for 2.0 s",
        "trainers[gpus=1]: calls wait",
        "trainers[gpus=2]: idle",
        "trainers[gpus=3]: running",
        "trainers[gpus=4]: stuck",
    ]
    assert "✗ trainers[gpus=4] stuck for 6.0 s" in text_of(found)


def test_point_without_a_process_is_empty_and_the_newest_incarnation_counts() -> None:
    found = page_of(
        run_of(
            proc("trainers", {"hosts": 1, "gpus": 1}),
            proc("trainers", {"hosts": 0, "gpus": 0}, id="new", incarnation=1),
            proc("trainers", {"hosts": 0, "gpus": 0}, id="old", state="dead"),
        )
    )

    assert cards(found) == ["trainers{'hosts': 2, 'gpus': 2}"]
    assert sorted(titles(found)) == ["trainers[hosts=0,gpus=0]: running", "trainers[hosts=1,gpus=1]: running"]


def test_sums_are_of_the_time_between_two_snapshots() -> None:
    earlier = run_of(
        proc("trainers", {"gpus": 0}, cpu_seconds=10.0, memory_bytes=1 << 30),
        endpoints=(EndpointRow(proc="p", name="t", endpoint="step", calls=100),),
    )
    later = run_of(
        proc("trainers", {"gpus": 0}, cpu_seconds=13.0, memory_bytes=1 << 30, gpu_percent=93, gpu_memory_bytes=1 << 30),
        proc("trainers", {"gpus": 1}, cpu_seconds=50.0),
        at=102.0,
        endpoints=(EndpointRow(proc="p", name="t", endpoint="step", calls=150, errors=3),),
        happened={"trainers": {"Died": 1}, "trainer": {"Died": 1}},
    )

    found = text_of(page_of(earlier, later))

    for part in ("run 25871", "processes 3", "calls 25/s", "CPU 1.5 cores", "memory 1.0 GiB", "GPU 93 %, 1.0 GiB"):
        assert part in found, (part, found)
    assert "errors 3" in found
    assert "deaths 1" in found  # an actor that died with its process is not another death
    assert "cores" not in text_of(page_of(earlier))
    assert "CPU 1.4 cores" in text_of(page_of(earlier, later, structs.replace(later, taken_at=102.1)))  # not of 0.1 s


def test_deadlock_and_death_are_named() -> None:
    """The calls that wait for each other; a dead process by its cause, once."""
    text = "ProcDied: trainers[gpus=1] was killed by SIGKILL (pid 7)"
    found = page_of(
        run_of(
            proc("trainers", {"gpus": 1}, state="dead", last_event=f"Died {text}"),
            calls=(waiting("a", "b"), waiting("b", "a")),
            events=tuple(
                EventRow(number=number, at=100.0 + number, kind=kind, name=name, text=words)
                for number, (kind, name, words) in enumerate(
                    [
                        ("Started", "trainers[gpus=0]", ""),
                        ("Died", "trainers[gpus=1]", text),
                        ("Died", "trainer[gpus=1]", text),
                        ("Restarting", "trainers[gpus=1]", text),
                        ("Restarted", "trainers[gpus=1]", ""),
                    ]
                )
            ),
        )
    )

    shown = text_of(found)
    assert "wait for each other: a.step → b.step → a.step" in shown
    assert f"✗ {text}" in shown
    assert shown.count(text) == 2  # what is wrong, and one event
    assert re.search(r"\d\d:\d\d:\d\d trainers\[gpus=1\] restarted", shown)
    assert "trainers[gpus=0]" not in shown


def waiting(one: str, other: str) -> CallRow:
    from trimesh.observe import WaitRow

    waits = (WaitRow(kind="call", call=other),)
    return CallRow(id=one, proc=one, name=one, mesh=one, endpoint="step", state="waiting", waits=waits)


def test_curves_are_drawn() -> None:
    """The mean of what was logged, the rate of a counter, with the past of the run in front."""
    overview = Overview("trainers")
    overview.load(Past((), tuple(past_loss(step) for step in range(3)), until=99.0))
    for at, tokens in ((100.0, 0), (102.0, 1_000), (104.0, 3_000)):
        counter = MetricRow(proc="0", name="0", mesh="trainers", metric="tokens", kind="counter", value=tokens)
        logged = [
            SampleRow(at=at, proc=name, name=name, mesh="trainers", step=int(at) - 97, values={"loss": loss})
            for name, loss in (("0", 2.0), ("1", 1.0))
        ]
        overview.add(run_of(proc("trainers", {"gpus": 0}), at=at, metrics=(counter,)), logged)
    found = ElementTree.fromstring(overview.html())

    assert "loss 1.5 1 to 9, steps 0 to 7, trainers" in text_of(found)
    assert "tokens/s 1,000 500 to 1,000, in 2.0 s, trainers" in text_of(found)
    loss, tokens = found.iter("polyline")
    places = [tuple(map(float, place.split(","))) for place in loss.attrib["points"].split()]
    assert len(places) == 6
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    assert [y for _, y in places] == sorted(y for _, y in places)  # it falls
    assert len(tokens.attrib["points"].split()) == 2


def test_curve_is_placed_by_its_extent() -> None:
    """The mean as a line, the values of all ranks as an area; one value stands in the middle, at the right."""
    overview = Overview("trainers")
    logged = [
        SampleRow(at=100.0, proc=name, name=name, step=step, values={"loss": value})
        for step, values in ((0, (0.0, 2.0)), (5, (1.0, 3.0)), (10, (4.0, 4.0)))
        for name, value in zip("ab", values, strict=True)
    ]
    overview.add(run_of(proc("trainers", {"gpus": 0})), [*logged, structs.replace(logged[0], values={"one": 1_000.0})])
    found = ElementTree.fromstring(overview.html())

    line, point = [one.attrib["points"] for one in found.iter("polyline")]
    area, _ = [one.attrib["points"] for one in found.iter("polygon")]
    assert (line, point) == ("1.0,32.0 110.0,22.0 219.0,2.0", "218.0,22.0")
    assert area == "1.0,22.0 110.0,12.0 219.0,2.0 219.0,2.0 110.0,32.0 1.0,42.0"
    assert [(one.attrib["cx"], one.attrib["cy"]) for one in found.iter("circle")] == [
        ("219.0", "2.0"),
        ("218.0", "22.0"),
    ]
    assert "loss 4 0 to 4, steps 0 to 10, controller" in text_of(found)
    assert "one 1,000 1,000 to 1,000, steps 0 to 0, controller" in text_of(found)


def test_head_and_long_lines() -> None:
    """The age of the run, else the time for which it has been watched; lines are flat and have a bound."""
    long = proc("trainers", {"gpus": 0}, state="dead", last_event=f"Died trainers[gpus=0]  was\n{'x' * 200}")
    snapshots = [run_of(long, at=at) for at in (100.0, 160.0)]
    assert text_of(page_of(*snapshots)).startswith("run 25871 , 1 min 10 s old")
    unknown = [structs.replace(one, job=None) for one in snapshots]
    shown = text_of(page_of(*unknown))
    assert shown.startswith("run , 1 min 0 s old")
    line = shown.partition("✗ ")[2].partition(" trainers{")[0]
    assert (len(line), line[:25], line[-2:]) == (200, "trainers[gpus=0] was xxxx", "x…")


def past_loss(step: int) -> PastPoint:
    return PastPoint("loss", "trainers", "step", "value", 2, step, total=16.0 - step, count=2, low=7.0, high=9.0)


def test_curves_and_lines_are_few() -> None:
    """OV-2."""
    values = {f"m{number}": 1.0 for number in range(limits.LIVE_CURVES + 3)}
    wrong = [proc("trainers", {"gpus": rank}, state="stuck") for rank in range(limits.LIVE_LINES + 2)]
    overview = Overview("trainers")
    overview.add(run_of(*wrong), [SampleRow(at=100.0, proc="0", name="0", values=values)])
    found = ElementTree.fromstring(overview.html())

    assert len(list(found.iter("polyline"))) == limits.LIVE_CURVES
    assert "and 3 more metrics" in text_of(found)
    assert "and 2 more" in text_of(found)
    assert text_of(found).count("✗") == limits.LIVE_LINES


@rows("meshes", [{"all": CELLS_MAX}, {f"m{number}": 1_024 for number in range(6)}, {"a": 3, "huge": 2 * CELLS_MAX}])
def test_many_processes_are_bounded(meshes: dict[str, int]) -> None:
    """OV-2: as many meshes as have room; the others are counted."""
    procs = [proc(mesh, {"ranks": rank}) for mesh, count in meshes.items() for rank in range(count)]
    overview = Overview(next(iter(meshes)))
    overview.add(run_of(*procs))
    shown = overview.html()

    assert len(shown) < BYTES_MAX
    drawn = 0
    for count in meshes.values():
        drawn += count if drawn + count <= CELLS_MAX else 0
    assert len(titles(ElementTree.fromstring(shown))) == drawn
    assert ("more mesh" in shown) == (drawn < len(procs))


def test_names_are_escaped_and_the_end_is_told() -> None:
    found = page_of(run_of(proc("<b>", {"gpus": 0}, state="dead")), first="<b>", has_ended=True)

    assert cards(found) == ["<b>{'gpus': 1}"]
    assert "✗ <b>[gpus=0] dead" in text_of(found)  # of which no event is known
    assert "as it was at" in text_of(found)
    assert Overview("x").html() == ""
