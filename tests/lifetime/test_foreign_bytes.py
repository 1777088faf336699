"""Bytes that are no messages, on the sockets that processes were started with (E12)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.lifetime.program import Program

pytestmark = pytest.mark.real

RUBBISH = {"text": "GET / HTTP/1.1\r\n\r\n", "zeros": "\0" * 64, "one byte": "x", "large": "x" * 60_000}


def end_of(program: Program) -> list[dict[str, Any]]:
    """Hold the mesh and leave it; return the leaves of its error, if there is one. Nothing may be left or printed."""
    program.say("open")
    while (ended := program.event("open", "raised", "left all"))["event"] == "open":
        program.say("leave")
    assert program.family() == {program.process}
    program.say("end")
    assert program.wait() == 0
    assert program.stderr == ""
    return ended["error"]["leaves"] if ended["event"] == "raised" else []


@pytest.mark.parametrize("data", RUBBISH.values(), ids=RUBBISH)
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
def test_rubbish_costs_at_most_the_member_that_sent_it(kind: str, data: str, tmp_path: Path) -> None:
    """On its link or to the spawner: the mesh goes on, or the block's one error names that member."""
    plan = {"size": 3, "before": [["babble", kind, data, 1], ["add", 1, 2], ["babble", kind, data, 1], ["add", 1, 2]]}
    with Program(tmp_path, "hold", plan) as program:
        leaves = end_of(program)
        written = [said["values"] for said in program.said("done") if said["name"] == "babble"]

    assert written[0][1] > 0
    assert [(leaf["type"], leaf["point"]) for leaf in leaves] in (
        [],
        [("LinkLost", {"n": 1})],
        [("ProcDied", {"n": 1})],
    )


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_SEQPACKET"])
def test_rubbish_of_the_controller_leaves_nothing(kind: str, tmp_path: Path) -> None:
    """A program that corrupts its own sockets gets errors of ours at most."""
    with Program(tmp_path, "hold", {"rubbish": kind}) as program:
        leaves = end_of(program)

    assert {leaf["type"] for leaf in leaves} <= {"LinkLost", "ProcDied"}


@pytest.mark.daily
def test_nothing_listens_and_nothing_has_a_name(tmp_path: Path) -> None:
    """E12: there is no address that a stranger could connect to, but the control socket, which is off here (Q3)."""
    with Program(tmp_path, "hold", {"size": 3}, env={"TRIMESH_OBSERVE": "off"}) as program:
        program.say("open")
        program.event("open")
        inodes = {inode for process in program.family() for inode in process.sockets()}
        named = [line for line in Path("/proc/net/unix").read_text().splitlines()[1:] if is_reachable(line, inodes)]
        internet = [
            line
            for table in ("tcp", "tcp6", "udp", "udp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
            if line.split()[9] in inodes
        ]

    assert len(inodes) > 4
    assert named == []
    assert internet == []


def is_reachable(line: str, inodes: set[str]) -> bool:
    """Tell whether a line of /proc/net/unix is a socket of ours that listens, or has a path."""
    fields = line.split()
    listens = int(fields[3], 16) & 0x10000
    return fields[6] in inodes and bool(listens or len(fields) > 7)
