"""Members named on the command line: what is printed is taken, all else is refused with the names that exist."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
from tests.observe.test_incidents import Shell, cancelled_at_the_end
from tests.rows import rows

from trimesh import Actor, Isolate, endpoint, observe, this_host
from trimesh.errors import place_name
from trimesh.observe import ActorRow, ProcRow

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run
from trimesh.cli.members import ArgumentRefused, choose, parse


class Keeper(Actor):
    @endpoint
    async def hold(self) -> None:
        await trio.sleep_forever()

    @endpoint
    def rest(self) -> None:
        return

    @endpoint
    def say(self, text: str) -> None:
        print(text, flush=True)


def processes(mesh: str, **sizes: int) -> list[ProcRow]:
    """Return rows of processes along one dimension, or of one process."""
    points = [{label: index} for label, size in sizes.items() for index in range(size)] or [{}]
    return [ProcRow(id=place_name(mesh, one), name=place_name(mesh, one), mesh=mesh, point=one) for one in points]


ROWS: Sequence[ProcRow | ActorRow] = [
    ProcRow(id="c"),
    *processes("procs", gpus=12),
    *processes("alone"),
    ProcRow(id="g", name="grid[hosts=1,gpus=2]", mesh="grid", point={"hosts": 1, "gpus": 2}),
    ActorRow(proc="g", name="my.trainers[hosts=1,gpus=2]", mesh="my.trainers", point={"hosts": 1, "gpus": 2}),
    ActorRow(proc="g", name="odd [x", mesh="odd [x"),
]


@rows(
    ("text", "parsed"),
    [
        ("procs[gpus=2]", ("procs", {"gpus": 2})),
        ("procs[hosts=1,gpus=2]", ("procs", {"hosts": 1, "gpus": 2})),
        (" procs[ hosts=1, gpus = 2 ] ", ("procs", {"hosts": 1, "gpus": 2})),
        ("procs", ("procs", {})),
        ("", None),
        ("procs[]", None),
        ("procs[2]", None),
        ("procs[gpus=2", None),
        ("procs[gpus=-1]", None),
        ("procs[gpus=1,gpus=1]", None),
        ("gpus=2", None),
        ("procs{gpus=" + "2}", None),
        ("procs{'gpus': 2" + "/4}", None),
    ],
)
def test_names_are_parsed_as_they_are_printed(text: str, parsed: tuple[str, dict[str, int]] | None) -> None:
    assert parse(text) == parsed


def test_every_printed_name_is_taken() -> None:
    assert [choose(row.name, ROWS).name for row in ROWS] == [row.name for row in ROWS]
    assert choose("grid[gpus=2, hosts=1]", ROWS).name == "grid[hosts=1,gpus=2]"
    chosen = choose("my.trainers[hosts=1,gpus=2].step", ROWS, endpoints=True)
    assert (chosen.name, chosen.endpoint) == ("my.trainers[hosts=1,gpus=2]", "step")
    chosen = choose("alone.step", ROWS, endpoints=True)
    assert (chosen.name, chosen.endpoint) == ("alone", "step")


@rows(
    ("text", "code", "first", "second"),
    [
        ("nonsense", 1, "no process or actor is named nonsense", "there are controller, procs[gpus=0], "),
        (
            "procs[gpus=99]",
            1,
            "no process or actor is named procs[gpus=99]; did you mean procs[gpus=11]?",
            "procs has procs[gpus=0], ",
        ),
        ("procs", 1, "no process or actor is named procs; did you mean procs[gpus=0]?", "procs has procs[gpus=0], "),
        (
            "prox[gpu=3]",
            1,
            "no process or actor is named prox[gpu=3]; did you mean procs[gpus=3]?",
            "there are controller, ",
        ),
        (
            "grid[gpus=7,host=3]",
            1,
            "no process or actor is named grid[gpus=7,host=3]; did you mean grid[hosts=1,gpus=2]?",
            "grid has grid[hosts=1,gpus=2]; ",
        ),
        ("alone[gpus=0]", 1, "no process or actor is named alone[gpus=0]; did you mean alone?", "alone has alone; "),
        ("alone.step", 1, "no process or actor is named alone.step; did you mean alone?", "there are controller, "),
        (
            "procs[2]",
            2,
            "a member must be named by its mesh and coordinates, such as procs[gpus=2], got 'procs[2]'; did you mean "
            "procs[gpus=2]?",
            "there are",
        ),
        (
            "a\x1b=",
            2,
            "a member must be named by its mesh and coordinates, such as procs[gpus=2], got 'a\\x1b='",
            "there are ",
        ),
    ],
)
def test_other_names_are_refused(text: str, code: int, first: str, second: str) -> None:
    with pytest.raises(ArgumentRefused) as caught:
        choose(text, ROWS)
    lines = str(caught.value).splitlines()
    assert (caught.value.code, lines[0]) == (code, first)
    assert lines[1].startswith(second)
    assert lines[1].endswith("; trimesh ps --all shows them")
    assert len(lines) == 2


def test_a_large_mesh_is_listed_in_part() -> None:
    with pytest.raises(ArgumentRefused, match=r"procs\[gpus=7\] and 4 more; trimesh"):
        choose("procs[gpus=12]", ROWS)
    with pytest.raises(
        ArgumentRefused, match=r"procs\[gpus=2\] and 9 more, alone, grid\[hosts=1,gpus=2\], my\.trainers"
    ):
        choose("no", ROWS)


async def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command."""
    capfd.readouterr()
    code = await trio.to_thread.run_sync(run, arguments)
    return code, *capfd.readouterr()


@pytest.mark.real
@pytest.mark.daily
@pytest.mark.usefixtures("patient")
async def test_commands_refuse_what_is_no_member(capfd: pytest.CaptureFixture[str]):
    """Q3: nothing is shown for another member, and nothing ends."""
    async with this_host().spawn_procs({"gpus": 2}) as procs:
        await (await procs.spawn("keepers", Keeper)).rest.call()
        for command in (("stack",), ("kill",), ("debug",), ("logs", "--at")):
            for text, code in (("nonsense", 1), ("procs[gpus=99]", 1), ("procs[gpus=0", 2)):
                got, out, err = await said(capfd, *command, text)
                assert (got, out) == (code, "")
                assert text in err
                assert "procs[gpus=0], procs[gpus=1]" in err
                assert len(err.splitlines()) == 2
        got, out, err = await said(capfd, "logs", "--at", "gpus=99")
        assert (got, out) == (1, "")
        first = "trimesh: no process has the coordinates gpus=99; did you mean procs[gpus=1]?"
        assert err.startswith(f"{first}\nthere are controller, procs[gpus=0], ")
        assert (await said(capfd, "stack", "procs[gpus=1]"))[::2] == (
            1,
            "trimesh: no stacks: no call runs at procs[gpus=1], and all Trio loops run\n",
        )
        _, _, err = await said(capfd, "stack", "keepers[gpus=1].rset")
        assert err.endswith("all Trio loops run; did you mean rest?\n")
        assert {proc.state for proc in (await observe.snapshot()).procs} == {"running"}


@pytest.mark.real
@pytest.mark.usefixtures("patient")
async def test_what_commands_print_can_be_pasted(capfd: pytest.CaptureFixture[str]):
    """Q3: names of processes and actors, with and without an endpoint, in a mesh of two dimensions."""
    shell = Shell(capfd)
    async with this_host().spawn_procs({"hosts": 1, "gpus": 2}, supervision=Isolate()) as procs:
        keepers = await procs.spawn("keepers", Keeper)
        await keepers.say.call("hello")
        async with cancelled_at_the_end() as nursery:
            nursery.start_soon(keepers.hold.call)
            await shell.until("x2: keepers[hosts=0,gpus=0], keepers[hosts=0,gpus=1]", "stack")
            for text in ("keepers[hosts=0,gpus=1]", "keepers[hosts=0,gpus=1].hold", "procs[hosts=0,gpus=1]"):
                code, shown = await shell("stack", text)
                assert code == 0
                assert shown.startswith("keepers.hold x1: keepers[hosts=0,gpus=1]\n")
            assert (await shell("stack", "keepers[hosts=0,gpus=1].say"))[0] == 1
        await shell.until(("procs[hosts=0,gpus=0]", "hello"), "logs")
        for text in ("keepers[hosts=0,gpus=1]", "procs[hosts=0,gpus=1]", "gpus=1", "hosts=0,gpus=1"):
            shown = await shell.until("hello", "logs", "--at", text)
            assert "procs[hosts=0,gpus=1]" in shown
            assert "procs[hosts=0,gpus=0]" not in shown
        assert (await shell("kill", "keepers[hosts=0,gpus=1]"))[0] == 0
        await shell.until("procs[hosts=0,gpus=1]", "events")
