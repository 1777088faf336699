"""`Meter`: counts compute, memory, traffic and time of one simulated rank.

The rank's tensors are on torch's device "meta", with shapes and no memory, although its code requests "cpu". So this
dispatch mode can distinguish tensors of the rank from those that rules make to infer shapes (`torch.empty(size,
device="meta")`). The latter, and all tensors made from them, cost nothing.

XM-1 Memory that a rank holds is that of the live storages that operators have made for it.
XM-2 Clocks go forward: that of the rank's Python, and that of the work queued on an asynchronous device.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from trimesh import limits
from trimesh.tensor.controller.trace import named, shown, span, trace_bytes, track
from trimesh.tensor.protocol.tracing import traced
from trimesh.tensor.rules.call import tensors_in

if TYPE_CHECKING:
    from trimesh.tensor.controller.shapes import Line
    from trimesh.tensor.simulation.device import Device, RankLink


_META: Final = torch.device("meta")
_FAKE: Final = torch._C._TorchDispatchModeKey.FAKE
_c10d: Any = distributed_c10d


@attrs.define
class LineTotals:
    """Costs on a rank of the operations that one source line has issued.

    Attributes:
        commands: Operations issued there.
        operators: Torch operators that they ran.
        seconds: Time of the device and of the rank's Python.
        sent: Bytes sent in collectives.
    """

    commands: int = 0
    operators: int = 0
    seconds: float = 0.0
    sent: int = 0


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts what the operators of one rank cost, while they run on tensors without data.

    Args:
        device: Device of the rank.
        rank: Number of the rank in its mesh.
        timeline: Records events for the trace.

    Attributes:
        host_at: Time at which the rank's Python is done with its work so far, in seconds.
        device_at: Time at which the device is.
        held_bytes: Memory held now.
        peak_bytes: Peak of memory held.
        moved_bytes: Bytes read from ranks of other views.
        operators: Operators that have run.
        operations: Arithmetic operations.
        line: Source line that issued the current operation.
        lines: Costs by source line.
    """

    def __init__(self, device: Device, rank: int, timeline: SimulatedTimeline) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.device = device
        self.host_at = self.device_at = 0.0
        self.held_bytes = self.peak_bytes = 0
        self.moved_bytes = self.operators = 0
        self.operations = 0.0
        self.lines: dict[Line, LineTotals] = {}
        self._rank = rank
        self._timeline = timeline
        self.line: Line | None = None
        self._totals = LineTotals()
        self._is_paused = False
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._fake = FakeTensorMode()

    @property
    def now(self) -> float:
        """Time at which all work so far is done."""
        return max(self.host_at, self.device_at)

    # ---- commands --------------------------------------------------------------------------------------------

    def at(self, line: Line, issued_at: float) -> None:
        """Attribute further work to a source line, issued by the controller at the given time."""
        if line != self.line:
            self.line = line
            self._totals = self.lines.setdefault(line, LineTotals())
        self.host_at = max(self.host_at, issued_at)

    def begin_command(self) -> None:
        """Count one operation and its time in the rank's Python."""
        self._totals.commands += 1
        self._totals.seconds += self.device.operator_seconds
        self.host_at += self.device.operator_seconds

    def begin_anew(self) -> None:
        """Reset all counts except memory held."""
        self.host_at = self.device_at = 0.0
        self.peak_bytes = self.held_bytes
        self.moved_bytes = self.operators = 0
        self.operations = 0.0
        self.lines.clear()
        self.line = None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Count nothing in this block, in which code infers shapes."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # ---- work of the rank ------------------------------------------------------------------------------------

    def made(self, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor received from elsewhere; it counts as memory of the rank."""
        with self.paused():
            if stride is None:
                one = torch.empty(tuple(size), dtype=dtype, device=_META)
            else:
                one = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=_META)
        self._hold(one)
        return one

    def spend(self, name: str, seconds: float, *, is_sending: bool = False, sent: int = 0) -> None:
        """Advance the clocks by work of the device or of a link."""
        device = self.device
        begun = max(self.host_at, self.device_at) if device.is_asynchronous or is_sending else self.host_at
        ended = begun + seconds
        if is_sending or not device.is_asynchronous:  # the next operation is not issued before it is over
            self.host_at = ended
        self.device_at = ended
        self._totals.seconds += seconds
        self._totals.sent += sent
        self._timeline.add(self._rank, name, self.line, begun, seconds, sent, is_sending=is_sending)

    def collective(self, name: str, labels: str, link: RankLink, ranks: int, sent: int) -> None:
        """Advance the clocks by a collective along some dimensions of the mesh."""
        self.spend(f"{name} along {labels}", link.seconds(name, ranks, sent), is_sending=True, sent=sent)

    def copy_out(self, nbytes: int) -> None:
        """Advance the clocks by a copy for other ranks; it waits until its source is computed."""
        self.host_at = self.now
        self.spend("copy for others", 2 * nbytes / self.device.memory_bytes_per_second)
        self.host_at = self.now

    def receive(self, name: str, sent_at: float, link: RankLink, nbytes: int) -> None:
        """Advance the clocks by receiving from another rank, which sent at the given time."""
        self.host_at = max(self.now, sent_at)
        self.moved_bytes += nbytes
        self.spend(name, link.seconds("recv", 2, nbytes), is_sending=True, sent=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on shapes, and count it."""
        kwargs = kwargs or {}
        if self._is_paused or FakeTensor in types or torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)
        if any(one is not torch.Tensor for one in types):
            return NotImplemented  # such as a DTensor: torch dispatches its parts here next
        device = kwargs.get("device")
        given = tensors_in((args, kwargs))
        if given and not any(self._has(one) for one in given):
            if func in _LIFTS and args[0].device.type != "meta":
                return self.made(args[0].size(), args[0].dtype, args[0].stride())
            return func(*args, **kwargs)  # shapes of rules, or numbers of this process: states of generators, tables
        if not given and device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        if func is _ONE_VALUE:
            return _ZEROS.get(args[0].dtype, 0.0)  # a rule checks the range of indices
        if func.namespace == "_c10d_functional":
            return self._communicate(func, args, kwargs)
        if func is _TO and kwargs.get("device") is not None and kwargs.get("memory_format") is None:
            kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0]  # it is there
        elif device is not None or (not given and _takes_device(func)):
            kwargs = {**kwargs, "device": _META}
        result = self._computed(func, args, kwargs, given)
        self._count(func, args, kwargs, given, result)
        return result

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[torch.Tensor]) -> Any:
        """Run an operator on shapes and return its results."""
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if not func._schema.returns:
                return None  # it only changes values, and there are none
        cpu = torch.device("cpu")
        known = [(one.size(), one.stride(), one.dtype, cpu) for one in given]

        def filled(fakes: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
            left = iter(fakes)
            found: tuple[Sequence[Any], dict[str, Any]] = pytree.tree_map_only(
                torch.Tensor, lambda _: next(left), (tuple(args), kwargs)
            )
            return found

        with self.paused():
            result, fakes = traced(func, known, filled, self._fake)
            places = {id(fake): one for fake, one in zip(fakes, given, strict=True)}

            def here(one: torch.Tensor) -> torch.Tensor:
                found = places.get(id(one))
                if found is not None:
                    return found
                return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device=_META)

            return pytree.tree_map_only(torch.Tensor, here, result)

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any], given: Sequence[torch.Tensor], result: Any) -> None:
        self.operators += 1
        self._totals.operators += 1
        if func.is_view:
            return
        for one in tensors_in(result):
            self._hold(one)
        operations = operations_of(func, args, kwargs, result)
        self.operations += operations
        if func in _FREE:
            return
        seconds = self.device.compute_seconds(
            dtype_of(given, result), operations, moved_bytes(func, args, kwargs, result)
        )
        self.spend(func._schema.name.partition("::")[2], seconds)

    def _communicate(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one of torch's functional collectives by the process group method that torch itself would call."""
        name = func._schema.name.partition("::")[2]
        if name in _WAITING:
            return args[0]
        result = func(*args, **kwargs)
        for one in tensors_in(result):
            self._hold(one)
        method = _METHODS.get(name)
        if method is None:
            raise NotImplementedError(f"a simulation supports the collectives {sorted(_METHODS)}, got {name}")
        group = _c10d._resolve_process_group(args[-1])
        made = tensors_in(result)
        is_in_place = name.removesuffix("_") in ("all_reduce", "all_reduce_coalesced", "broadcast")
        getattr(group, method)(*([made, None] if is_in_place else [made[0], args[0]]))
        return result

    # ---- memory ----------------------------------------------------------------------------------------------

    def _has(self, one: torch.Tensor) -> bool:
        return one.device.type == "meta" and one.untyped_storage()._cdata in self._storages

    def _hold(self, one: torch.Tensor) -> None:
        storage = one.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        nbytes = storage.nbytes()

        def gone(_: Any) -> None:
            self._storages.pop(key, None)
            self.held_bytes -= nbytes

        self._storages[key] = weakref.ref(storage, gone)
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


_TO: Final = torch.ops.aten._to_copy.default
_LIFTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
_ONE_VALUE: Final = torch.ops.aten._local_scalar_dense.default
_ZEROS: Final[dict[torch.dtype, Any]] = {
    torch.bool: False, torch.int64: 0, torch.int32: 0, torch.int16: 0, torch.int8: 0, torch.uint8: 0,
}  # fmt: skip
_FREE: Final = frozenset(
    (
        torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
    )
)  # fmt: skip
"""Operators that allocate memory without initializing it."""

_IN_LISTS: Final = hasattr(torch.distributed.ProcessGroup, "all_gather_single_coalesced")  # since torch 2.13

_METHODS: Final = {
    "all_reduce": "allreduce",
    "all_reduce_": "allreduce",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_into_tensor": "all_gather_single_coalesced" if _IN_LISTS else "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_single_coalesced" if _IN_LISTS else "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single" if _IN_LISTS else "alltoall_base",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
"""Process group methods that torch's functional collectives call."""


_WAITING: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""Operators that wait for a collective, or defer that; they return the same tensor."""


def _takes_device(func: Any) -> bool:
    return any(one.name == "device" for one in func._schema.arguments)


# ---- operations and bytes of an operator, from the sizes of its arguments and results --------------------------------

aten = torch.ops.aten


def operations_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return the number of arithmetic operations of an operator: matrix products by torch's own table.

    Any other operator counts one for each element of its result, which is negligible beside its bytes.
    """
    counted = flop_registry.get(func.overloadpacket)
    if counted is not None:
        return float(counted(*args, **kwargs, out_val=result))
    own = _OWN.get(func.overloadpacket)
    if own is not None:
        return float(own(*args))
    return float(sum(one.numel() for one in tensors_in(result)))


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that an operator reads and writes: each argument once, each result or changed argument once."""
    if func.overloadpacket in _WRITE_ONLY:
        return sum(map(_nbytes, tensors_in(result)))
    seen: dict[int, int] = {}
    for one in tensors_in((args, kwargs)):
        seen[id(one)] = _nbytes(one)
    moved = sum(seen.values())
    for one in tensors_in(result):
        moved += _nbytes(one)
    return moved


def dtype_of(args: Any, result: Any) -> str:
    """Return the dtype that an operator computes in: that of its first floating-point argument."""
    found = ""
    for one in tensors_in((args, result)):
        found = found or str(one.dtype).removeprefix("torch.")
        if one.is_floating_point():
            return str(one.dtype).removeprefix("torch.")
    return found


def _nbytes(one: torch.Tensor) -> int:
    """Return the bytes of memory behind a tensor; expanded dimensions count once."""
    sizes = (size for size, stride in zip(one.size(), one.stride(), strict=True) if stride or not size)
    return prod(sizes) * one.element_size()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> float:
    batch, heads, length, width = query.shape
    return 2.0 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(
    _grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> float:
    return 2.5 * _attention(query, key, value)


def _layer(given: torch.Tensor, weight: torch.Tensor, *_: Any) -> float:
    return 2.0 * given.numel() * weight.shape[0]


_OWN: Final[dict[Any, Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.linear: _layer,
    aten.mv: lambda matrix, _: 2.0 * matrix.numel(),
    aten.dot: lambda one, _: 2.0 * one.numel(),
}

_WRITE_ONLY: Final = frozenset(
    (
        aten.fill_,
        aten.zero_,
        aten.empty,
        aten.empty_like,
        aten.zeros_like,
        aten.ones_like,
        aten.full_like,
        aten.new_zeros,
    )
)
"""Operators that do not read the values of their arguments."""


# ---- `SimulatedTimeline`: events of simulated ranks, as a trace for Perfetto -----------------------------------------


class SimulatedTimeline:
    """Events of simulated ranks, at most `limits.TENSOR_TRACE_EVENTS_MAX`.

    Attributes:
        missing: Number of events dropped beyond that limit.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._events: list[tuple[int, str, Line | None, float, float, int, bool]] = []

    def add(
        self, rank: int, name: str, line: Line | None, begun: float, seconds: float, sent: int, *, is_sending: bool
    ) -> None:
        """Record one event."""
        if len(self._events) >= limits.TENSOR_TRACE_EVENTS_MAX:
            self.missing += 1
            return
        self._events.append((rank, name, line, begun, seconds, sent, is_sending))

    def clear(self) -> None:
        self.missing = 0
        self._events.clear()

    def trace(self, names: Sequence[tuple[int, str]]) -> Iterator[bytes]:
        """Yield the content of a file in the JSON trace event format.

        Args:
            names: Numbers and names of ranks.
        """
        return trace_bytes(self._all(names), {"missing": self.missing})

    def _all(self, names: Sequence[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        for rank, name in names:
            yield from track(rank + 1, 1, name, ("operators", "collectives"))
        for rank, name, line, begun, seconds, sent, is_sending in self._events:
            arguments: dict[str, Any] = {} if line is None else {"line": shown(line)}
            kind, thread = "operator", 1
            if is_sending:
                arguments["sent_bytes"] = sent
                kind, thread = "collective", 2
            yield span(rank + 1, thread, kind, named(name, line), begun, seconds, arguments)
