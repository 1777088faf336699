"""`Meter`: what one simulated rank would compute, keep and send, and when.

Its tensors are on torch's device "meta", which has shapes and no memory, while everything else of the rank says "cpu":
so this mode of torch tells what the rank makes from what only its rules make to find something out (`torch.empty(size,
device="meta")`). That costs nothing, and neither does what is made of it.

XM-1 Memory that a rank holds is that of the storages of tensors that operators have made for it and that are alive.
XM-2 Clocks go forward: that of the rank's Python, and of an asynchronous device that of what it has been given.
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
    """What the operations that one line has issued have cost a rank.

    Attributes:
        commands: Operations that were issued there.
        operators: Operators of torch that they ran.
        seconds: Of the device and of the rank's Python.
        sent: Bytes in collectives.
    """

    commands: int = 0
    operators: int = 0
    seconds: float = 0.0
    sent: int = 0


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Counts what the operators of one rank cost, while they run on tensors without data.

    Args:
        device: Its numbers.
        rank: Of the rank in its mesh.
        timeline: Takes what is to be seen later.

    Attributes:
        host_at: When the rank's Python is done with what it was given, in seconds.
        device_at: When the device is.
        held_bytes: Of memory now.
        peak_bytes: The most that it was.
        moved_bytes: Read from ranks of other views.
        operators: Operators that have run.
        operations: Of arithmetic.
        line: What has issued what runs now.
        lines: By line that issued them.
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
        """When all that it was given is done."""
        return max(self.host_at, self.device_at)

    # ---- what commands say -----------------------------------------------------------------------------------

    def at(self, line: Line, issued_at: float) -> None:
        """Let what comes be that of a line, which the controller has issued at some time."""
        if line != self.line:
            self.line = line
            self._totals = self.lines.setdefault(line, LineTotals())
        self.host_at = max(self.host_at, issued_at)

    def begin_command(self) -> None:
        """Count the rank's Python for one operation."""
        self._totals.commands += 1
        self._totals.seconds += self.device.operator_seconds
        self.host_at += self.device.operator_seconds

    def begin_anew(self) -> None:
        """Count from zero; what is held is held."""
        self.host_at = self.device_at = 0.0
        self.peak_bytes = self.held_bytes
        self.moved_bytes = self.operators = 0
        self.operations = 0.0
        self.lines.clear()
        self.line = None

    @contextmanager
    def paused(self) -> Generator[None]:
        """Count nothing: what runs finds something out of shapes."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    # ---- what the rank does ----------------------------------------------------------------------------------

    def made(self, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """Return a tensor that has come from elsewhere."""
        with self.paused():
            if stride is None:
                one = torch.empty(tuple(size), dtype=dtype, device=_META)
            else:
                one = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=_META)
        self._hold(one)
        return one

    def spend(self, name: str, seconds: float, *, is_sending: bool = False, sent: int = 0) -> None:
        """Let time go by for something that the device, or a link, does."""
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
        """Let time go by for a collective along some dimensions of the mesh."""
        self.spend(f"{name} along {labels}", link.seconds(name, ranks, sent), is_sending=True, sent=sent)

    def copy_out(self, nbytes: int) -> None:
        """Let time go by for a copy that others may read: what it is made of must be there."""
        self.host_at = self.now
        self.spend("copy for others", 2 * nbytes / self.device.memory_bytes_per_second)
        self.host_at = self.now

    def receive(self, name: str, sent_at: float, link: RankLink, nbytes: int) -> None:
        """Wait for what another rank has sent, and let it come."""
        self.host_at = max(self.now, sent_at)
        self.moved_bytes += nbytes
        self.spend(name, link.seconds("recv", 2, nbytes), is_sending=True, sent=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator on shapes, and count it."""
        kwargs = kwargs or {}
        if self._is_paused or FakeTensor in types or torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)
        if any(one is not torch.Tensor for one in types):
            return NotImplemented  # a DTensor, say: torch takes it apart, and comes back with the parts
        device = kwargs.get("device")
        given = tensors_in((args, kwargs))
        if given and not any(self._has(one) for one in given):
            if func in _LIFTS and args[0].device.type != "meta":
                return self.made(args[0].size(), args[0].dtype, args[0].stride())
            return func(*args, **kwargs)  # shapes of rules, or numbers of this process: states of generators, tables
        if not given and device is not None and torch.device(device).type == "meta":
            return func(*args, **kwargs)
        if func is _ONE_VALUE:
            return _ZEROS.get(args[0].dtype, 0.0)  # a rule looks whether indices are in range
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
        """Return what an operator makes, of shapes."""
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            if not func._schema.returns:
                return None  # it changes values, of which there are none
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
        """Run a collective of torch's functional ones, as its own code calls it on a process group."""
        name = func._schema.name.partition("::")[2]
        if name in _WAITING:
            return args[0]
        result = func(*args, **kwargs)
        for one in tensors_in(result):
            self._hold(one)
        method = _METHODS.get(name)
        if method is None:
            raise NotImplementedError(f"a simulation knows the collectives {sorted(_METHODS)}, got {name}")
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
"""Operators that make memory, and nothing of what is in it."""

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
"""What torch's functional collectives call on a process group."""


_WAITING: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""What waits for a collective, or puts that off: the tensor is the same."""


def _takes_device(func: Any) -> bool:
    return any(one.name == "device" for one in func._schema.arguments)


# ---- what an operator computes, reads and writes, by the sizes of its arguments and results --------------------------

aten = torch.ops.aten


def operations_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return how many operations of arithmetic an operator takes: those of products by torch's own table.

    Of anything else it is one for each element that it makes, which never counts beside the bytes of that.
    """
    counted = flop_registry.get(func.overloadpacket)
    if counted is not None:
        return float(counted(*args, **kwargs, out_val=result))
    own = _OWN.get(func.overloadpacket)
    if own is not None:
        return float(own(*args))
    return float(sum(one.numel() for one in tensors_in(result)))


def moved_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return how many bytes an operator reads and writes: each argument once, what it makes or changes once."""
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
    """Return the dtype that an operator computes in: that of its first argument with numbers of floating point."""
    found = ""
    for one in tensors_in((args, result)):
        found = found or str(one.dtype).removeprefix("torch.")
        if one.is_floating_point():
            return str(one.dtype).removeprefix("torch.")
    return found


def _nbytes(one: torch.Tensor) -> int:
    """Return the bytes of memory that an element of a tensor is in: what was expanded is there once."""
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
"""Those that do not read the values of their arguments."""


# ---- `SimulatedTimeline`: when simulated ranks would do what, as a trace that Perfetto shows -------------------------


class SimulatedTimeline:
    """What ranks have done, at most `limits.TENSOR_TRACE_EVENTS_MAX` of it.

    Attributes:
        missing: Events beyond the bound, which are not kept.
    """

    def __init__(self) -> None:
        self.missing = 0
        self._events: list[tuple[int, str, Line | None, float, float, int, bool]] = []

    def add(
        self, rank: int, name: str, line: Line | None, begun: float, seconds: float, sent: int, *, is_sending: bool
    ) -> None:
        """Take one event."""
        if len(self._events) >= limits.TENSOR_TRACE_EVENTS_MAX:
            self.missing += 1
            return
        self._events.append((rank, name, line, begun, seconds, sent, is_sending))

    def clear(self) -> None:
        self.missing = 0
        self._events.clear()

    def trace(self, names: Sequence[tuple[int, str]]) -> Iterator[bytes]:
        """Yield a file in the JSON trace event format.

        Args:
            names: Ranks, and what they are called.
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
