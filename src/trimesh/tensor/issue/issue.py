"""Issuing of one operation, from torch to the ranks: check, plan, command, result.

`__torch_dispatch__` calls `issue` below autograd, with the operators into which torch has decomposed the user's call.
`issue` does not wait, except for operators whose results depend on the data (rule N2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from trimesh.tensor.controller.engine import answers_now
from trimesh.tensor.controller.shapes import FRESH, Meta, Plan, Shapes, metas_of
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import (
    NOTE,
    MeshTensor,
    check_views,
    has_changed_bases,
    is_changed_base,
    make,
    make_held,
    note_change,
)
from trimesh.tensor.issue import temporaries
from trimesh.tensor.issue.fetching import same_now, scalar_now, values_now
from trimesh.tensor.issue.temporaries import LocalTensor, adopted
from trimesh.tensor.protocol import arguments
from trimesh.tensor.protocol.arguments import NUMBER_SLOT, SLOT
from trimesh.tensor.protocol.messages import FIRST_SIGNATURE, kinds_of
from trimesh.tensor.protocol.tracing import DATA_DEPENDENT, traced

aten = torch.ops.aten

_STATIC: Final = frozenset({type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


class _Operator:
    """An operator of torch, as `issue` needs it.

    Attributes:
        func: The operator.
        varying: See `_varying_of`.
        varies: By index, whether a parameter is among these.
        replacement: What runs in its place, if anything does.
        may_give_zeros: Whether its derivative may be zeros of this process.
    """

    __slots__ = ("func", "may_give_zeros", "replacement", "varies", "varying")

    def __init__(self, func: Any) -> None:
        self.func = func
        self.varying = _varying_of(func)
        self.varies = [index in self.varying for index in range(len(func._schema.arguments))]
        self.replacement = REPLACED.get(func)
        self.may_give_zeros = func.name() in temporaries.OF_ZEROS


_OPERATORS: Final[dict[int, _Operator]] = {}
"""Operators by the `id` of torch's objects, whose own hash is a function in Python. The values keep these objects."""


def _operator(func: Any) -> _Operator:
    found = _OPERATORS.get(id(func))
    if found is None:
        found = _OPERATORS[id(func)] = _Operator(func)
    return found


def issue(func: Any, args: Sequence[Any], kwargs: dict[str, Any], active: Team | None = None) -> Any:
    """Run an operator of torch on the ranks.

    Args:
        func: The operator, an `OpOverload`.
        args: Its arguments; mesh tensors are of one team.
        kwargs: The others.
        active: The team of an operator without tensors among its arguments.

    Raises:
        TypeError: The arguments do not belong together, as its text shows.
        MeshStopped: The mesh is being left.
        ProcDied: A process of it has ended.
    """
    operator = _OPERATORS.get(id(func)) or _operator(func)
    if operator.replacement is not None:
        return operator.replacement(*args, **kwargs)
    key: list[Any] = [operator]
    tensors: list[MeshTensor] = []
    operands: list[Any] = []
    value: Any = None
    has_local = False
    for value, varies in zip(args, operator.varies, strict=False):
        if type(value) is MeshTensor:
            key.append(value._meta)
            tensors.append(value)
            operands.append(value._held.ref)
        elif _take(value, key, tensors, operands, varies=varies):
            has_local = True
    if kwargs:
        has_local |= _take_named(operator, kwargs, key, tensors, operands)
    team = tensors[0]._held.team if tensors else active
    assert team is not None, "an operator without tensors is issued for the active team"
    plan = None if has_local else team.engine.shapes.plans.get(tuple(key))
    if plan is None and (has_local or _is_mixed(tensors)):
        del value, tensors  # they refer to the arguments
        return _issue_adopting(func, args, kwargs, active)
    for tensor in tensors:
        if tensor._held.team is not team:
            raise explain(func, args, kwargs)
    if plan is None:
        plan = _new_plan(operator, args, kwargs, tensors, operands, tuple(key), team)
        if not isinstance(plan, Plan):
            return plan
    if (operator.may_give_zeros or has_changed_bases()) and torch.is_grad_enabled():
        _see_to_gradients(operator, plan, tensors)
    first = team.emit(plan, operands, len(plan.metas))
    return make(plan.metas[0], team, first) if plan.single == FRESH else _result(plan, team, first, tensors)


def _take(value: Any, key: list[Any], tensors: list[MeshTensor], operands: list[Any], *, varies: bool) -> bool:
    """Add an argument to the key of a call, and to its tensors and operands.

    Args:
        value: The argument.
        key: Cache key of the plan.
        tensors: Mesh tensors, in order.
        operands: Refs of the tensors, and numbers that vary, in order.
        varies: See `_varying_of`.

    Returns:
        Whether it is, or holds, a tensor of this process, which is none of these.
    """
    kind = type(value)
    if kind in _STATIC:
        if varies and kind is int:
            key.append(int)
            operands.append(value)
        else:
            key += (kind, value)
    elif kind is list or kind is tuple:
        key += (kind, len(value))
        if not varies and [*map(type, value)].count(int) == len(value):
            key += value
            return False
        has_local = False
        for item in value:
            has_local |= _take(item, key, tensors, operands, varies=varies)
        return has_local
    elif kind is float:
        key.append(float)
        if varies:
            operands.append(value)
        else:
            key.append(value.hex())  # -0.0 equals 0.0, and nan nothing
    elif kind is MeshTensor:
        key.append(value._meta)
        tensors.append(value)
        operands.append(value._held.ref)
    elif isinstance(value, torch.Tensor):
        return True
    else:
        key += (kind, value)
    return False


def _take_named(
    operator: _Operator, kwargs: dict[str, Any], key: list[Any], tensors: list[MeshTensor], operands: list[Any]
) -> bool:
    """Add the arguments that are given by name; see `_take`."""
    has_local = False
    for name, value in kwargs.items():
        key.append(name)
        has_local |= _take(value, key, tensors, operands, varies=name in operator.varying)
    return has_local


def _is_mixed(tensors: Sequence[MeshTensor]) -> bool:
    """Return whether both global and local mesh tensors are among some."""
    return len({tensor._meta.is_global for tensor in tensors}) > 1


def _see_to_gradients(operator: _Operator, plan: Plan, tensors: Sequence[MeshTensor]) -> None:
    """Refuse a call with wrong gradients; put gradients that torch makes in this process onto the ranks."""
    if has_changed_bases() and operator.func is not aten.detach.default:
        check_views(plan.name, tensors, _tensors_at(plan.kinds, plan.description[4]))
    if operator.may_give_zeros:
        temporaries.keep_gradients(tensors)


def _new_plan(
    operator: _Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[MeshTensor],
    operands: Sequence[Any],
    key: tuple[Any, ...],
    team: Team,
) -> Any:
    """Return a new plan for a call; for an operator that is replaced by others, return their result."""
    func, shapes = operator.func, team.engine.shapes
    if is_composite(func):  # torch decomposes those itself, but not in inference mode
        operator.replacement = func.decompose
        return func.decompose(*args, **kwargs)
    if temporaries.is_product_of_mask(func, args):
        if temporaries.is_shared_out():
            return temporaries.filled(*args)
        key = (*key, None)  # the formula issues the plain key again, which must miss
        found = shapes.plans.get(key)
        if found is not None:
            return found
    try:
        plan = _plan(shapes, operator, args, kwargs, tensors)
    except DATA_DEPENDENT:
        is_global = any(tensor._meta.is_global for tensor in tensors)
        described = _described(operator, args, kwargs, is_global=is_global)
        return issue_asking(func, described, key, operands, team, is_global=is_global)
    except (IndexError, RuntimeError) as error:
        if func.is_view and is_changed_base(args[0]):
            error.add_note(NOTE)
        raise
    shapes.remember(key, plan)
    return plan


def _issue_adopting(func: Any, args: Sequence[Any], kwargs: dict[str, Any], active: Team | None) -> Any:
    """Run an operator after putting temporaries that torch has made in this process onto the ranks."""
    seen = {
        (one._held.team, one._meta.is_global) for one in pytree.tree_leaves((args, kwargs)) if type(one) is MeshTensor
    }
    team, is_global = max(seen, key=lambda pair: pair[1], default=(active, False))
    assert team is not None
    is_one_hot = temporaries.is_one_hot(func, args)
    try:
        args, kwargs = adopted(func, args, kwargs, team, is_global=is_global)
    except LocalTensor:
        raise explain(func, args, kwargs) from None
    if is_one_hot:
        return temporaries.one_hot(args[0], args[1].numel())
    return issue(func, args, kwargs, active)


def _result(plan: Plan, team: Team, first: int, tensors: Sequence[MeshTensor]) -> Any:
    if plan.counted:
        increment_version([tensors[place] for place in plan.counted])
    if plan.single is not None:
        return tensors[plan.single]
    leaves: list[Any] = []
    new = iter(enumerate(plan.metas, first))
    for leaf, is_alias in zip(plan.leaves, plan.has_alias, strict=True):
        if leaf is FRESH:
            ref, meta = next(new)
            leaves.append(make(meta, team, ref))
        else:
            leaves.append(tensors[leaf] if is_alias else leaf)
    return pytree.tree_unflatten(leaves, plan.tree)


_CANNOT_SHAPE: Final = frozenset({"number", "float", "Tensor", "List[number"})  # less a bracket at the end


def _varying_of(func: Any) -> frozenset[int | str]:
    """Return the parameters of an operator whose numbers cannot change the shape of its result.

    These are typed Scalar, Scalar[], float or Tensor in its schema, if it also takes a tensor: the numbers of `arange`
    set the shape, those of `add` do not. Foreach optimizers pass lists, with new numbers each step.
    """
    parameters = func._schema.arguments
    names: set[int | str] = set()
    kinds = [str(parameter.type) for parameter in parameters]
    if any("Tensor" in kind for kind in kinds):
        for index, (parameter, kind) in enumerate(zip(parameters, kinds, strict=True)):
            if kind.removeprefix("Optional[").removesuffix("]") in _CANNOT_SHAPE:
                names.add(parameter.name if parameter.kwarg_only else index)
                names.add(parameter.name)
    return frozenset(names)


def _plan(
    shapes: Shapes,
    operator: _Operator,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: Sequence[MeshTensor],
) -> Plan:
    """Make the plan of a call by running it on fake tensors."""
    func = operator.func
    known = [(one._meta.size, one._meta.stride, one._meta.dtype, one._meta.device) for one in tensors]

    def filled(fakes: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        places = iter(fakes)
        found: tuple[Sequence[Any], dict[str, Any]] = pytree.tree_map_only(
            MeshTensor, lambda _: next(places), (tuple(args), kwargs)
        )
        return found

    result, fakes = traced(func, known, filled, shapes.fake)
    is_global = any(tensor._meta.is_global for tensor in tensors)
    check_in_place(func, fakes, tensors)
    leaves, tree = pytree.tree_flatten(result)
    metas: list[Meta] = []
    found: list[Any] = []
    aliases: list[bool] = []
    outs: list[int] = []
    for leaf in leaves:
        place = next((place for place, one in enumerate(fakes) if one is leaf), None)
        aliases.append(place is not None)
        if place is not None:
            found.append(place)
            outs.append(-1)
        elif isinstance(leaf, torch.Tensor):
            check_dense(func, leaf)
            outs.append(len(metas))
            device = known[0][3] if fakes and fakes[0].device.type == "meta" else leaf.device
            metas.append(shapes.meta(leaf.size(), leaf.stride(), leaf.dtype, device, is_global=is_global))
            found.append(FRESH)
        else:
            outs.append(-1)
            found.append(leaf)
    writes = _writes(operator, args, kwargs)
    described = [*_described(operator, args, kwargs, is_global=is_global), outs, writes]
    strides = _strides_that_matter(func, metas)
    if any(strides):
        described.append(strides)
    single = found[0] if isinstance(result, torch.Tensor) else None
    number = FIRST_SIGNATURE + shapes.new_number()
    counted: list[int] = []
    if writes and _writes_lists(func):
        counted = _tensors_at(kinds_of(described[1]) + kinds_of(described[2]), writes)
    return Plan(number, func.name(), described, metas, found, aliases, tree, single, counted)


def _strides_that_matter(func: Any, metas: Sequence[Meta]) -> list[list[int]]:
    """Return the strides of each new tensor; empty for vectors and scalars, no entries for views."""
    is_view = any(one.alias_info is not None for one in func._schema.returns)
    return [[] if is_view or len(one.size) < 2 or 0 in one.size else list(one.stride) for one in metas]


def _writes_lists(func: Any) -> bool:
    """Return whether an operator writes to lists, so that the operators that it calls count the writes for autograd.

    Torch counts the writes of other operators, except to batch norm statistics, which no derivative reads.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")
    written = (one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write)
    return not has_kernel and any(str(one.type).startswith("List") for one in written)


def _tensors_at(operands: str, writes: Sequence[int]) -> list[int]:
    """Convert indices among the operands to indices among the tensors, which have "r" in `operands`."""
    return [operands.count("r", 0, place) for place in writes]


def _described(operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any], *, is_global: bool) -> list[Any]:
    """Return the name and arguments of an operator, encoded for the ranks."""
    name, varying = operator.func.name(), operator.varying

    def slot(value: Any, *, varies: bool) -> Any:
        if isinstance(value, MeshTensor):
            return SLOT
        if varies and type(value) in (int, float):
            return NUMBER_SLOT
        if isinstance(value, list | tuple):
            return type(value)(slot(item, varies=varies) for item in value)
        return value

    return [
        f"global::{name}" if is_global else name,
        arguments.describe([slot(value, varies=index in varying) for index, value in enumerate(args)]),
        arguments.describe({key: slot(value, varies=key in varying) for key, value in kwargs.items()}),
    ]


def _writes(operator: _Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> list[int]:
    """Return the indices of the operands that an operator changes in place."""
    func, varying = operator.func, operator.varying
    if not func._schema.is_mutable:
        return []
    writes: list[int] = []
    at = 0
    parameters = {parameter.name: parameter for parameter in func._schema.arguments}
    names = list(parameters)
    for key, value in [*enumerate(args), *kwargs.items()]:
        parameter = parameters[names[key] if isinstance(key, int) else key]
        is_written = parameter.alias_info is not None and parameter.alias_info.is_write
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, MeshTensor):
                if is_written:
                    writes.append(at)
                at += 1
            elif key in varying and type(leaf) in (int, float):
                at += 1
    return writes


# ---- inplace views ---------------------------------------------------------------------------------------------------

# Operators that change the shape of a tensor in place without touching its data, such as `squeeze_`.
#
# The ranks make a view instead, and the handle switches to it: the memory is the same, and a part of a global tensor
# could not change its shape in place.

_VIEWS: Final[dict[Any, Any]] = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.detach_.default: aten.detach.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def _change(func: Any, view: Any, tensor: MeshTensor, *args: Any, **kwargs: Any) -> MeshTensor:
    viewed = view(tensor, *args, **kwargs)
    _relook(func, (tensor, *args), kwargs)
    tensor._held, tensor._meta = viewed._held, viewed._meta
    if func is not aten.detach_.default and not tensor.is_inference():
        is_moved = func is aten.as_strided_.default and (*args, *kwargs.values())[2:] not in ((), (None,))
        # Torch increments the version afterwards. Without gradients it then regenerates the history of a view.
        note_change(tensor, version=tensor._version + 1 if torch.is_grad_enabled() else -1, is_moved=is_moved)
    return tensor


def _relook(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Run the operator itself on the handle, which has no data, so that the handle gets the view's metadata.

    Torch's own wrapper subclasses do so in `return_and_correct_aliasing`.
    """
    with no_dispatch():
        was = torch._C._meta_in_tls_dispatch_include()
        torch._C._set_meta_in_tls_dispatch_include(True)  # noqa: FBT003 - torch takes it so
        try:
            func(*args, **kwargs)
        finally:
            torch._C._set_meta_in_tls_dispatch_include(was)


INPLACE_VIEWS: Final[dict[Any, Callable[..., MeshTensor]]] = {
    func: partial(_change, func, view) for func, view in _VIEWS.items()
}
"""Replacement of each of these operators."""


# ---- operators of torch whose result is a Python value: these block (rule N2) ----------------------------------------


def list_now(tensor: MeshTensor) -> Any:
    """Return a tensor as lists of numbers, as `Tensor.tolist` does. Blocks.

    Raises:
        ValueError: The ranks have different values.
    """
    return same_now(tensor).tolist()


def _allclose(one: Any, other: Any, *tolerances: Any, **named: Any) -> bool:
    close: Any = torch.isclose(one, other, *tolerances, **named)
    return _on_all(close)


def _equal(one: Any, other: Any) -> bool:
    if one.size() != other.size():
        return False
    return _on_all(torch.eq(one, other))


def _on_all(tensor: Any) -> bool:
    """Return whether all elements of a boolean tensor are true on every rank."""
    return all(bool(value) for value in values_now(tensor.all()))


WAITING: Final[dict[Any, Callable[..., Any]]] = {
    aten._local_scalar_dense.default: scalar_now,
    aten.equal.default: _equal,
    aten.allclose.default: _allclose,
}


# ---- operators of torch that are replaced by others ------------------------------------------------------------------

REPLACED: Final[dict[Any, Callable[..., Any]]] = {
    **WAITING,
    **INPLACE_VIEWS,
    # Views marked by a bit of the tensor (conjugate, negative), which handles lack: copies instead.
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Replacements of operators; composite operators get theirs on first use."""


def is_composite(func: Any) -> bool:
    """Return whether an operator is defined by others, on every device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# ---- data-dependent shapes -------------------------------------------------------------------------------------------

# Operators whose result shapes depend on values: issued, then the ranks are queried for the shapes (rule N2).

_LEAF: Final = pytree.tree_structure(0)


def issue_asking(
    func: Any, described: list[Any], key: tuple[Any, ...], operands: Sequence[Any], team: Team, *, is_global: bool
) -> Any:
    """Run an operator like `nonzero`, and block until the ranks have reported the metadata of its results.

    Args:
        func: The operator.
        described: Its encoded name and arguments.
        key: Cache key of the encoding.
        operands: Operands of the command.
        team: The ranks.
        is_global: Whether the arguments are global tensors.

    Raises:
        TypeError: It returns anything but new tensors, or their shapes differ between the ranks.
        MeshErrorGroup: The operator has failed; see `answers_now` for other errors.
    """
    returns = func._schema.returns
    if any(str(one.type) != "Tensor" or one.alias_info is not None for one in returns):
        raise explain_data_dependent(func)
    shapes = team.engine.shapes
    unknown = shapes.meta((0,), (1,), torch.float32, team.engine.device, is_global=is_global)
    plan = shapes.plans.get(("asking", *key))
    if plan is None:
        outs = list(range(len(returns)))
        number = FIRST_SIGNATURE + shapes.new_number()
        metas, leaves = [unknown] * len(outs), [FRESH] * len(outs)
        plan = Plan(number, func.name(), [*described, outs, []], metas, leaves, [False] * len(outs), _LEAF)
        shapes.remember(("asking", *key), plan)
    first = team.emit(plan, operands, len(returns))
    made = [make(unknown, team, first + index) for index in range(len(returns))]
    places = range(len(team.peers))
    request = team.engine.ask(
        team, places, lambda number: call_kernel(team, "metadata", number, *made), metas_of(len(made))
    )
    found = answers_now(request)
    if any(found[place] != found[0] for place in places):
        sizes = ", ".join(str([tuple(size) for size, *_ in found[place]]) for place in places[:8])
        raise explain_data_dependent(func, f"of sizes {sizes}")
    results: list[torch.Tensor] = []
    for tensor, (size, stride, dtype) in zip(made, found[0], strict=True):
        meta = shapes.meta(size, stride, getattr(torch, dtype), team.engine.device, is_global=is_global)
        results.append(make_held(meta, tensor._held))
    return results[0] if len(results) == 1 else tuple(results)


# ---- errors for arguments that do not belong together, and for unsupported results -----------------------------------


def explain(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> TypeError:
    """Return the error for arguments that do not belong together, with a mark at each that is wrong."""
    leaves = [(None, value) for value in args] + list(kwargs.items())
    first = next((one for _, value in leaves for one in _tensors(value) if isinstance(one, MeshTensor)), None)
    lines: list[str] = []
    for name, value in leaves:
        faults = [fault for one in _tensors(value) for fault in [_fault(one, first)] if fault]
        label = "" if name is None else f"{name}="
        lines.append(f"{' -> ' if faults else '    '}{label}{_shown(value)}," + (f"   # {faults[0]}" if faults else ""))
    called = func.name().partition("::")[2]
    body = "\n".join(lines)
    return TypeError(f"the tensors of an operation must be on the same ranks:\n{called}(\n{body}\n)")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [one for item in value for one in _tensors(item)]
    return []


def _fault(tensor: torch.Tensor, first: MeshTensor | None) -> str | None:
    if not isinstance(tensor, MeshTensor):
        return (
            "a tensor of this process: make it inside `with mesh.activate():`, "
            "or write trimesh.replicate(t, mesh) or trimesh.distribute(t, mesh, [...])"
        )
    assert first is not None
    team, expected = tensor._held.team, first._held.team
    if team is not expected:
        if team.engine is not expected.engine:
            return f"on {team.name}, not on {expected.name}: write t.to_mesh(mesh)"
        return f"on other ranks of {team.engine.name}: write t.slice_mesh(...) or t.to_mesh(view)"
    if tensor._meta.is_global is not first._meta.is_global:
        return (
            f"{'parts of one global tensor' if tensor._meta.is_global else 'a tensor on each rank'}, "
            f"the first is {'global' if first._meta.is_global else 'one on each rank'}: "
            "write trimesh.replicate(t, mesh) or t.local()"
        )
    return None


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        left, right = "[]" if isinstance(value, list) else "()"
        return f"{left}{', '.join(map(_shown, value))}{right}"
    if isinstance(value, torch.Tensor) and not isinstance(value, MeshTensor):
        return f"<local tensor {str(value.dtype).removeprefix('torch.')}{list(value.size())}>"
    return repr(value)


def explain_data_dependent(func: Any, got: str = "whose shape depends on values") -> TypeError:
    """Return the error for an operation whose result shape depends on the data.

    Args:
        func: The operation.
        got: Description of the ranks' results, if they were queried.
    """
    name = func.name().partition("::")[2].partition(".")[0]
    return TypeError(
        f"the shape of an operation's result must be the same on every rank, got {name}, {got}: "
        "write torch.where(mask, a, b) instead of a[mask], call "
        f"{name} in a function under @trimesh.remote, or on what `await trimesh.fetch(t)` returns"
    )


def check_dense(func: Any, fake: torch.Tensor) -> None:
    """Refuse to make a tensor that size and stride do not describe.

    Raises:
        TypeError: The tensor is sparse, quantized or nested.
    """
    if fake.layout is not torch.strided or fake.is_quantized:
        name = func.name().partition("::")[2].partition(".")[0]
        kind = "quantized" if fake.is_quantized else str(fake.layout).removeprefix("torch.")
        raise TypeError(
            f"a mesh tensor must be dense, got one that is {kind} from {name}: "
            "use it inside a function under @trimesh.remote"
        )


def check_in_place(func: Any, fakes: Sequence[torch.Tensor], tensors: Sequence[MeshTensor]) -> None:
    """Refuse an operation that gives a tensor another shape, or other memory, in place.

    Raises:
        TypeError: The operation does so; the handle would keep the old metadata.
    """
    if func.overloadpacket is torch.ops.aten.set_:
        raise TypeError(
            f"an operation must not give a mesh tensor other memory in place, got set_ of {tensors[0]!r}: "
            "write tensor.data = other"
        )
    for fake, tensor in zip(fakes, tensors, strict=True):
        meta = tensor._meta
        if tuple(fake.size()) != meta.size or tuple(fake.stride()) != meta.stride:
            name = func.name().partition("::")[2].partition(".")[0]
            raise TypeError(
                f"an operation must not change the shape of a mesh tensor in place, got {name} of {meta.size} to "
                f"{tuple(fake.size())}: write {name.rstrip('_')}, which returns a new tensor"
            )
