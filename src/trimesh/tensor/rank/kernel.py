"""Kernels (trimesh's own operations on ranks), command signatures, poison, and random generators.

`kernels/table.py` lists all kernels.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch

from trimesh.errors import ProtocolError
from trimesh.tensor.protocol.arguments import Build, read
from trimesh.tensor.protocol.messages import kinds_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from trimesh.tensor.dtensor.local_trace import LearntReplay
    from trimesh.tensor.dtensor.operators import LearntOperator
    from trimesh.tensor.rank.rank import Rank, TeamOnRank


@attrs.frozen
class Kernel:
    """A trimesh operation on a rank.

    Attributes:
        name: Name in the table; commands call it "trimesh::name".
        function: Takes the `Rank`, the `TeamOnRank` of the command, then its arguments.
        takes_poison: Whether it is called although an argument is a `Poison`; else its outputs are poisoned, too.
        operator: The operator of torch that it implements, if any.
        learnt: Runs the operation instead of `function`, unless an operand is poisoned.
    """

    name: str
    function: Callable[..., Any]
    takes_poison: bool = False
    operator: Callable[..., Any] | None = None
    learnt: LearntOperator | None = None


@attrs.frozen
class Kernels:
    """Operations that a command may name besides torch's own operators.

    Attributes:
        by_name: Kernels that commands call "trimesh::name".
        families: Functions that make a kernel from an operator of torch, by prefix: "global" in
            "global::aten::add.Tensor".
        local_replay: Makes the executor of a recording's replays.
        local_sequence: Makes the executor of a sequence, each command of which is counted.
    """

    by_name: dict[str, Kernel]
    families: dict[str, Callable[[str, Callable[..., Any]], Kernel]]
    local_replay: Callable[[], LearntReplay]
    local_sequence: Callable[[], LearntReplay]


# ---- poison ----------------------------------------------------------------------------------------------------------

# `Poison` marks a tensor that could not be computed.
#
# After a failed or skipped in-place operation the target's memory still exists, and the poison keeps it. A command that
# overwrites all of that memory makes the tensor valid again ("heals" it).

OnKept = Literal["", "overwrites", "views"]
"""Why an operation may run on memory that a poison keeps: it overwrites all of it, or only makes views; "" if not."""

_OVERWRITING: Final = frozenset(
    (
        "copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_", "bernoulli_", "cauchy_", "exponential_",
        "geometric_", "log_normal_", "normal_", "random_", "uniform_",
    )
)  # fmt: skip
"""Operators that write all of their target and do not read it."""

_SAME: Final = frozenset({"alias", "detach"})
"""Views of a global tensor that need no communication."""


@attrs.frozen(eq=False)
class Poison:
    """Marker for a tensor that could not be computed.

    Attributes:
        team, number: Root cause: the command that has failed first.
        what: Name of its operation.
        error: Exception that it has raised.
        kept: Current tensor that an in-place operation should have written to; None for a result that was never made.
    """

    team: int
    number: int
    what: str
    error: BaseException
    kept: torch.Tensor | None = None

    def of_result(self) -> Poison:
        """Return the poison for results computed from this one, which have no memory."""
        return self if self.kept is None else attrs.evolve(self, kept=None)


NO_COMMAND: Final = (-1, -1)
"""Team and number of a poison that no command has caused."""


def on_kept_of(operator: Any, *, is_global: bool) -> OnKept:
    """Return how an operator of torch may use memory of a poisoned tensor; "" if it must not run."""
    schema = getattr(operator, "_schema", None)
    if schema is None:
        return ""
    name = schema.name.partition("::")[2]
    if name in _OVERWRITING:
        return "overwrites"
    is_view = name in _SAME if is_global else bool(operator.is_view)
    return "views" if is_view else ""


def heal(table: MutableMapping[int, Any], written: torch.Tensor) -> None:
    """Restore poisoned tensors of a table whose memory lies entirely in the range that was just overwritten."""
    memory = memory_of(written)
    begin, end = span_of(written)
    if local_of(written).nbytes < end - begin:  # strided: the gaps were not overwritten
        begin = end
    for ref, found in table.items():
        kept = kept_of(found)
        if type(found) is Poison and kept is not None and memory_of(kept) == memory:
            first, last = span_of(kept)
            if kept is written or (begin <= first and last <= end):
                table[ref] = kept


def kept_of(value: Any) -> Any:
    """Return a tensor, or the tensor that a poison keeps."""
    return value.kept if type(value) is Poison else value


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a global tensor, or the tensor itself."""
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local


def memory_of(value: Any) -> int | None:
    """Return the identity of the storage of a tensor, or of this rank's part of a global one."""
    if not isinstance(value, torch.Tensor):
        return None
    local = local_of(value)
    return local.untyped_storage()._cdata if type(local) is torch.Tensor else None


def span_of(value: torch.Tensor) -> tuple[int, int]:
    """Return the byte range, begin and end, that a tensor or this rank's part spans in its storage."""
    local = local_of(value)
    begin = int(local.storage_offset())
    steps = sum((length - 1) * step for length, step in zip(local.size(), local.stride(), strict=True))
    end = begin + steps + 1 if local.numel() else begin
    return begin * local.element_size(), end * local.element_size()


# ---- signature -------------------------------------------------------------------------------------------------------

# An operation on the rank: a function, and how to build its arguments from the operands of a command.


@attrs.frozen
class Signature:
    """One operation.

    Attributes:
        name: Name of the operator or kernel: "aten::add.Tensor", "trimesh::fetch".
        arity: Number of operands.
        kinds: "r", "n" or "b" by operand.
        outs: For each leaf of its result, the index among the new tensors, or -1 for a tensor that has a ref already.
        writes: Operands that it changes in place.
        strides: Required strides of each new tensor, empty where they do not matter; no entries for views.
        kernel: Set if the operation is a kernel of trimesh.
        has_info: Whether one of its results is a status of the others, which another operation checks.
        on_kept: How it may use memory that a poison keeps.
    """

    name: str
    arity: int
    kinds: str
    outs: Sequence[int]
    writes: Sequence[int]
    strides: Sequence[tuple[int, ...]]
    kernel: Kernel | None
    has_info: bool
    on_kept: OnKept
    _function: Callable[..., Any]
    _args: Sequence[tuple[Build | None, Any]]
    _kwargs: Sequence[tuple[str, Build | None, Any]]

    def run(self, operands: Sequence[Any], *first: Any) -> Any:
        """Call the operation, with `first` before its own arguments."""
        return self.call(self._function, operands, *first)

    def call(self, function: Callable[..., Any], operands: Sequence[Any], *first: Any) -> Any:
        args = [constant if build is None else build(operands) for build, constant in self._args]
        if not self._kwargs:
            return function(*first, *args)
        kwargs = {name: constant if build is None else build(operands) for name, build, constant in self._kwargs}
        return function(*first, *args, **kwargs)

    def take_kept(self, operands: Sequence[Any]) -> bool:
        """Replace poisoned operands by the tensors that they keep, if the operation may use these; return whether."""
        if not self.on_kept:
            return False
        places = self.writes if self.on_kept == "overwrites" else [self.kinds.index("r")]
        poisoned = [index for index, kind in enumerate(self.kinds) if kind == "r" and type(operands[index]) is Poison]
        if any(index not in places or operands[index].kept is None for index in poisoned):
            return False
        assert isinstance(operands, list)
        for index in poisoned:
            operands[index] = operands[index].kept
        return True


def define(description: Any, device: torch.device, kernels: Kernels) -> Signature:
    """Decode a description: [name, args, kwargs, outs, writes], and strides, if any matter.

    Raises:
        ProtocolError: The description is malformed.
    """
    match description:
        case [str(name), ["l", *args], ["d", *kwargs], [*outs], [*writes]]:
            strides: list[tuple[int, ...]] = []
        case [str(name), ["l", *args], ["d", *kwargs], [*outs], [*writes], [*told]]:
            strides = _strides(told, max(outs, default=-1) + 1)
        case _:
            raise ProtocolError(f"an operation must be described by a name, arguments and outputs, got {description!r}")
    if not all(isinstance(number, int) for number in (*outs, *writes)):
        raise ProtocolError(f"outputs and writes must be numbers, got {outs!r}, {writes!r}")
    at = 0
    positional: list[tuple[Build | None, Any]] = []
    for part in args:
        build, constant, at = read(part, at, device)
        positional.append((build, constant))
    named: list[tuple[str, Build | None, Any]] = []
    for key, part in zip(kwargs[::2], kwargs[1::2], strict=True):
        build, constant, at = read(part, at, device)
        named.append((str(key), build, constant))
    kinds = "".join(map(kinds_of, (*args, *kwargs[1::2])))
    if any(not 0 <= index < len(kinds) for index in writes) or at != len(kinds):
        raise ProtocolError(f"writes and operands of {name} must fit its arguments, got {writes!r} of {kinds!r}")
    name, kernel = _kernel(name, kernels)
    function = kernel.function if kernel is not None else _operator(name)
    operator = function if kernel is None else kernel.operator
    schema = getattr(operator, "_schema", None)
    has_info = schema is not None and any(result.name == "info" for result in schema.returns)
    on_kept = on_kept_of(operator, is_global=kernel is not None)
    return Signature(name, at, kinds, outs, writes, strides, kernel, has_info, on_kept, function, positional, named)


def _strides(told: Sequence[Any], count: int) -> list[tuple[int, ...]]:
    if len(told) != count or not all(
        isinstance(one, list | tuple) and all(isinstance(step, int) and step >= 0 for step in one) for one in told
    ):
        raise ProtocolError(f"an operation must have the strides of each new tensor, got {told!r:.100}")
    return [tuple(one) for one in told]


def _kernel(name: str, kernels: Kernels) -> tuple[str, Kernel | None]:
    """Return the name of the operator, or of the kernel, and the kernel, if it is one."""
    space, _, rest = name.partition("::")
    family = kernels.families.get(space)
    if family is not None:
        return rest, family(rest, _operator(rest))
    return name, kernels.by_name.get(rest) if space == "trimesh" else None


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator of torch. One that is missing in this process fails when called, as any operation may."""
    space, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), operator), overload or "default")
    except (AttributeError, RuntimeError) as error:
        text = f"the process of the rank has no operator {name}: {error}"

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(text)

        return missing
    return _WithGradients(found) if name in _ASKING else found


_ASKING: Final = frozenset({"aten::mkldnn_rnn_layer.default", "aten::mkldnn_rnn_layer"})
"""Operators that save data for their derivative only while gradients are enabled; on ranks they are disabled."""


class _WithGradients:
    """Proxy of an operator that runs with gradients enabled."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return self._operator(*args, **kwargs)


# ---- results get the strides that the controller expects -------------------------------------------------------------

# The controller infers strides without data. Torch's kernels sometimes choose others, by device and build. Torch makes
# a contiguous copy only where its metadata requires one, so a kernel would read a tensor with unexpected strides in the
# wrong order.


def laid_out(made: Any, strides: Sequence[int]) -> Any:
    """Return a tensor with these strides: the same one, if it has them.

    Args:
        made: A tensor, local or global, that shares its memory with no other. Other values are returned unchanged.
        strides: Strides of the whole tensor; empty if they do not matter.
    """
    if not strides or not isinstance(made, torch.Tensor):
        return made
    found = made.stride()
    if found == strides or len(found) != len(strides):
        return made
    pairs = zip(made.size(), found, strides, strict=True)
    if all(size <= 1 or one == other for size, one, other in pairs) or not made.numel():
        return made
    local = getattr(made, "_local_tensor", None)
    if local is None:
        return torch.empty_strided(made.size(), strides, dtype=made.dtype, device=made.device).copy_(made)
    return _global_laid_out(made, local, strides)


def _global_laid_out(made: Any, local: torch.Tensor, strides: Sequence[int]) -> Any:
    """Return a global tensor whose parts have the dimension order of these strides."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415

    order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
    back = [order.index(dim) for dim in range(len(order))]
    part = local.permute(order).contiguous().permute(back)
    spec = made._spec
    known = TensorMeta(made.size(), tuple(strides), made.dtype)
    laid = DTensorSpec(spec.mesh, spec.placements, tensor_meta=known)
    return global_tensor(part, laid)


def global_tensor(part: torch.Tensor, spec: Any) -> DTensor:
    """Return the `DTensor` with this spec, of which `part` is this rank's part."""
    kind = _dtensor()
    made: DTensor = kind.__new__(
        kind, part, spec, requires_grad=False
    )  # skips `__init__`, which takes 6 us to do nothing
    return made


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes a while

    return DTensor


# ---- random ----------------------------------------------------------------------------------------------------------

# Random numbers of global tensors: one generator for each team, in the same state on all of its ranks.


def generator_of(rank: Rank, team: TeamOnRank) -> torch.Generator:
    """Return the generator of a team, from which all ranks draw alike. It starts with torch's default seed."""
    found = team.above.get(torch.Generator)
    if found is None:
        found = team.above[torch.Generator] = torch.Generator(rank.device)
    assert isinstance(found, torch.Generator)
    return found
