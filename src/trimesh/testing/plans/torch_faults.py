"""Torch faults: operators that run out of memory, break their device or hang, and collectives of one rank that fail.

A mode of torch asks before each operator that an actor, or a rank of a mesh of tensors, runs on a faulty member: also
inside modules, optimizers and backward passes. Operators of compiled graphs and other threads do not ask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import msgspec
import trio

from trimesh._runtime.actors.cell import Cell, cell_in
from trimesh._runtime.peers.incoming import IncomingCall
from trimesh._runtime.values.endpoint_spec import EndpointKind, EndpointSpec
from trimesh.plain_numbers import suggestion
from trimesh.testing.plans.fault import (
    ActiveFault,
    Heal,
    MemberFault,
    OfMembers,
    Place,
    all_healed,
    checked_amount,
    checked_error,
    once,
)

if TYPE_CHECKING:
    from trimesh.ids import ProcId
    from trimesh.testing.plans.armed import Armed
    from trimesh.testing.plans.plan import Planned
    from trimesh.testing.simulated.simulation import Simulation

Failure = Literal["", "memory", "device", "collective"]

COLLECTIVES: Final = ("c10d", "_c10d_functional", "c10d_functional")
"""Namespaces of torch's collectives."""

_MEMORY_TEXT: Final = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free "
    "(a planned fault)."
)
_DEVICE_TEXT: Final = (
    "CUDA error: an illegal memory access was encountered (a planned fault)\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect."
)
_COLLECTIVE_TEXT: Final = "NCCL error: remote process exited or there was a network error (a planned fault)"


@attrs.frozen
class TorchFault(MemberFault):
    """From the `nth` operator on, counted for each member since this was planned, `times` of them misbehave.

    Attributes:
        operator: Full name of the operator, "" for all of `aten`, "collective" for all collectives.
        failure: Error of torch that each raises; a broken device fails all later operators of its process, too.
        error: Another error that each raises.
        seconds: How long each hangs before it runs.
    """

    operator: str
    nth: int = 1
    times: int = 1
    failure: Failure = ""
    error: BaseException | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        effect = f"hangs({self.seconds:g})" if self.seconds else f"raises({self.failure or type(self.error).__name__})"
        return f"torch {self.where.text} {self.operator or '*'} nth={self.nth}: {effect}"

    # ---- which code asks -------------------------------------------------------------------------------------

    def simulated(self, run: Simulation, planned: Planned) -> Heal:
        heal = super().simulated(run, planned)
        return all_healed(_ask_in_tasks(self, run.faults.active[-1], run.place_of), heal)

    def armed(self, process: Armed, index: int) -> Heal:
        heal = super().armed(process, index)
        return all_healed(_ask_in_tasks(self, process.faults.active[-1], lambda _: process.place), heal)

    def dispatch(
        self, active: ActiveFault, place: Place, cell: Cell, call: IncomingCall, spec: EndpointSpec
    ) -> EndpointSpec:
        """Let an endpoint ask in its thread; others ask in their task."""
        del cell, call
        if spec.kind is not EndpointKind.THREAD or place not in self.where.places:
            return spec

        def asking(*args: Any, **kwargs: Any) -> Any:
            with self.operating(active, place):
                return spec.fn(*args, **kwargs)

        return msgspec.structs.replace(spec, fn=asking)

    def operating(self, active: ActiveFault, place: Place) -> AbstractContextManager[Any]:
        return _mode()(functools.partial(self._ask, active, place))

    # ---- what happens then -----------------------------------------------------------------------------------

    def _ask(self, active: ActiveFault, place: Place, name: str) -> None:
        """Let an operator fail, or hang, if it is one of those meant."""
        if place not in self.where.places or active not in active.faults.active or not self._means(name):
            return
        if place not in active.broken:
            if not active.hits(place, self.nth, self.times):
                return
            active.fire_at("torch", place)
            if self.failure == "device":
                active.broken.add(place)
        if self.seconds:
            self._hang(active, place)
        else:
            raise self._made()

    def _means(self, name: str) -> bool:
        namespace = name.partition("::")[0]
        if self.operator == "collective":
            return namespace in COLLECTIVES
        return name == self.operator if self.operator else namespace == "aten"

    def _hang(self, active: ActiveFault, place: Place) -> None:
        left = self.seconds
        while left > 0 and active in active.faults.active:
            left -= active.faults.spend(place, left)

    def _made(self) -> BaseException:
        import torch  # noqa: PLC0415 - only these faults need it

        if self.failure == "memory":
            return torch.OutOfMemoryError(_MEMORY_TEXT)
        if self.failure == "device":
            return torch.AcceleratorError(_DEVICE_TEXT)
        if self.failure == "collective":
            return getattr(torch.distributed, "DistBackendError", RuntimeError)(_COLLECTIVE_TEXT)
        assert self.error is not None
        return checked_error(self.error)


def _ask_in_tasks(fault: TorchFault, active: ActiveFault, place_of: Callable[[ProcId], Place]) -> Heal:
    """Let the operators of tasks of actors ask, whenever one runs; return a function that ends that."""
    _mode()  # imports torch now, not in a task of an actor
    asking = _AskingTasks(fault, active, place_of)
    trio.lowlevel.add_instrument(asking)
    return once(lambda: trio.lowlevel.remove_instrument(asking))


class _AskingTasks(trio.abc.Instrument):
    """Sets the mode of a fault while tasks of actors of its members run: the modes of torch belong to a thread."""

    def __init__(self, fault: TorchFault, active: ActiveFault, place_of: Callable[[ProcId], Place]) -> None:
        self._fault = fault
        self._active = active
        self._place_of = place_of
        self._entered: AbstractContextManager[Any] | None = None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        cell = cell_in(task.context)
        if cell is not None:
            place = self._place_of(cell.proc.proc_id)
            if place in self._fault.where.places:
                self._entered = self._fault.operating(self._active, place)
                self._entered.__enter__()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        del task
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


@functools.cache
def _mode() -> Callable[[Callable[[str], None]], AbstractContextManager[Any]]:
    """Return the class of modes that call a function with the name of each operator before it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415 - only these faults need it

    class Asking(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self, ask: Callable[[str], None]) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.ask = ask

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            self.ask(func._schema.name)  # noqa: SLF001 - torch has no public name of an operator
            return func(*args, **(kwargs or {}))

    return Asking


# ---- planning --------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class OfTorch(OfMembers):
    """Operators of torch; their fault is chosen next."""

    _operator: str
    _nth: int
    _times: int

    def raises(self, error: BaseException | type[BaseException]) -> Heal:
        """Make them raise `error` instead of running.

        Returns:
            A function that ends the fault, as those of the other methods.
        """
        return self._plan(error=checked_error(error))

    def out_of_memory(self) -> Heal:
        """Make them raise `torch.OutOfMemoryError`, as the allocator of CUDA does."""
        return self._plan(failure="memory")

    def breaks_device(self) -> Heal:
        """Make the first raise `torch.AcceleratorError`, and then each operator of its process until that ends."""
        return self._plan(failure="device")

    def hangs(self, seconds: float = math.inf) -> Heal:
        """Block their thread for `seconds` before they run; heartbeats go on."""
        return self._plan(seconds=checked_amount("seconds", seconds))

    def _plan(self, *, failure: Failure = "", error: BaseException | None = None, seconds: float = 0.0) -> Heal:
        made = TorchFault(self._where, self._operator, self._nth, self._times, failure, error, seconds)
        return self._faults.plan(made)


@attrs.frozen(eq=False)
class OfCollective(OfTorch):
    """Collectives of torch at some members; their fault is chosen next."""

    def fails(self) -> Heal:
        """Make them raise `torch.distributed.DistBackendError` there; the other ranks wait."""
        return self._plan(failure="collective")


def checked_operator(name: str) -> str:
    """Return the full name of an operator, `aten::mm` of `mm`; "" stays.

    Raises:
        ImportError: torch is not installed.
        ValueError: There is no such operator, or it is computed by others.
    """
    from torch import _C  # noqa: PLC0415 - only these faults need it

    if not name:
        return ""
    full = name if "::" in name else f"aten::{name}"
    dispatcher: Any = _C
    names: list[str] = dispatcher._dispatch_get_all_op_names()  # noqa: SLF001 - torch has no public list
    overloads = [one for one in names if one.partition(".")[0] == full]
    if not overloads:
        known = {one.partition(".")[0].removeprefix("aten::") for one in names}
        raise ValueError(f"torch has no operator {full}{suggestion(full.removeprefix('aten::'), known)}")
    is_computed = dispatcher._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - the same
    if all(is_computed(one, "CompositeImplicitAutograd") for one in overloads if not one.endswith("out")):
        raise ValueError(
            f"a fault must be of an operator that torch runs, and {full} is computed by others: name one of these, as "
            '"mm" or "addmm" of a linear layer, or none'
        )
    return full
