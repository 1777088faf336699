"""`breakpoint()` in a process of a mesh."""

from __future__ import annotations

import pytest

from trimesh import Actor, configured, endpoint, this_host, this_proc

pytestmark = pytest.mark.real


class Stopping(Actor):
    @endpoint
    async def stop(self) -> str:
        breakpoint()
        return "went on"


@pytest.mark.parametrize("setting", ["debug", "observe"])
async def test_breakpoint_to_which_no_terminal_can_come_says_so(setting: str) -> None:
    with configured(**{setting: "off"}):
        async with this_host().spawn_procs({}) as procs:
            stopping = await procs.spawn("stopping", Stopping)
            with pytest.raises(RuntimeError, match=rf"TRIMESH_{setting.upper()}=off rules out.* this_proc\(\)"):
                await stopping.stop.call_one()


async def test_debugger_of_the_environment_stays() -> None:
    async with this_host().spawn_procs({}, env={"PYTHONBREAKPOINT": "0"}) as off:
        assert await (await off.spawn("stopping", Stopping)).stop.call_one() == "went on"


async def test_breakpoint_of_an_actor_in_this_process_is_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.breakpointhook", lambda: None)
    async with this_proc().spawn("stopping", Stopping) as stopping:
        assert await stopping.stop.call_one() == "went on"
