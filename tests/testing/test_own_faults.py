"""A kind of fault is one class: kinds of this file happen, are healed and refused, on simulated and real processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import pytest
from tests.conformance.vault import SMALL, Reader, Vault, pattern
from tests.testing.actors import Worker, is_exact

from trimesh.errors import place_name
from trimesh.testing import UnsupportedFault, simulate
from trimesh.testing.plans.endpoint_faults import preceded
from trimesh.testing.plans.fault import Fault, MemberFault, healed, raise_after

both = pytest.mark.mesh_backend("sim", "proc")


class Overloaded(Exception):
    """What the endpoints raise."""


@attrs.frozen
class Overload(MemberFault):
    """All endpoints of some members raise until it is healed."""

    def __str__(self) -> str:
        return f"overload {self.where.text}"

    def dispatch(self, active: Any, place: Any, cell: Any, call: Any, spec: Any) -> Any:
        if place not in self.where.places:
            return spec
        active.fire("dispatch", place_name(cell.spec.name, cell.spec.point))
        return preceded(spec, partial(raise_after, 0.0, Overloaded()))


@attrs.frozen
class Renamed(Fault):
    """A kind that one back end alone can have; it changes nothing."""

    is_simulated: bool

    def __str__(self) -> str:
        return "renamed"

    def _happen(self, run: Any, planned: Any) -> Any:
        run.fire(planned.index, "name", "controller")
        return healed

    def simulated(self, run: Any, planned: Any) -> Any:
        return self._happen(run, planned) if self.is_simulated else super().simulated(run, planned)

    def real(self, run: Any, planned: Any) -> Any:
        return super().real(run, planned) if self.is_simulated else self._happen(run, planned)


@both
@simulate(seeds=5)
async def test_own_kind_happens_until_it_is_healed(mesh, faults, fault_log):
    w = await mesh.spawn("w", Worker)
    heal = faults.plan(Overload(faults.where({"gpus": 1})))

    for _ in range(2):
        outcomes = (await w.step.call_settled(7)).values()
        assert [type(outcome.error) for outcome in outcomes] == [type(None), Overloaded]

    for _ in range(2):
        heal()
        assert list((await w.step.call(7)).values()) == [7, 7]
    assert [(fired.site, fired.where) for fired in fault_log] == [("dispatch", "w[gpus=1]")] * 2


@both
@simulate(seeds=1)
async def test_kind_of_another_back_end_is_refused_when_it_is_planned(mesh, faults, fault_log):
    del mesh
    other = "proc" if is_exact() else "sim"
    with pytest.raises(UnsupportedFault, match=f'run on the back end "{other}".* got renamed'):
        faults.plan(Renamed(is_simulated=not is_exact()))

    faults.plan(Renamed(is_simulated=is_exact()))

    assert [fired.site for fired in fault_log] == ["name"]
    assert len(faults.executor.plan.planned) == 1


@pytest.mark.mesh_backend("proc")
async def test_late_transfers_of_a_real_process_are_healed(mesh, faults):
    """As in a simulation: `times` that are left are not made late."""
    vault = await mesh.slice(gpus=0).spawn("vault", Vault)
    reader = await mesh.slice(gpus=1).spawn("reader", Reader)
    handle = await vault.handle.call_one()
    faults.transfer({"gpus": 1}, times=3).raises(Overloaded())
    with pytest.raises(Overloaded):
        await reader.read.call_one(handle)

    faults.heal()

    assert await reader.read.call_one(handle) == pattern(SMALL)
