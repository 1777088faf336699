"""`breakpoint()` in a process of a mesh."""

from __future__ import annotations

import pytest

from trimesh import Actor, endpoint, this_host, this_proc

pytestmark = pytest.mark.real


class Stopping(Actor):
    @endpoint
    async def stop(self) -> str:
        breakpoint()
        return "went on"


async def test_breakpoint_says_what_to_do_instead() -> None:
    async with this_host().spawn_procs({}) as procs, this_host().spawn_procs({}, env={"PYTHONBREAKPOINT": "0"}) as off:
        with pytest.raises(RuntimeError, match=r"breakpoint\(\) needs a terminal.* this_proc\(\)"):
            await (await procs.spawn("stopping", Stopping)).stop.call_one()
        assert await (await off.spawn("stopping", Stopping)).stop.call_one() == "went on"


async def test_breakpoint_of_an_actor_in_this_process_is_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.breakpointhook", lambda: None)
    async with this_proc().spawn("stopping", Stopping) as stopping:
        assert await stopping.stop.call_one() == "went on"
