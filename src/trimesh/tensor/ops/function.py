"""`@trimesh.remote`: user functions that run on every rank with the rank's own tensors."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload
from weakref import WeakKeyDictionary

import attrs
import torch
from torch.utils import _pytree as pytree

from trimesh import limits
from trimesh._wire.pickled.by_value import find, is_by_value
from trimesh._wire.pickled.payload import Encoded
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller import shapes as expected
from trimesh.tensor.controller.engine import answers, answers_now
from trimesh.tensor.controller.shapes import Meta, Shapes
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import Sizes
from trimesh.tensor.groups.groups import ProcessGroup, RanksDeviceMesh, SentDeviceMesh, SentGroup
from trimesh.tensor.issue import issue as checks
from trimesh.tensor.issue.fetching import place_of
from trimesh.tensor.ops.global_tensor import checked_team
from trimesh.tensor.protocol.placement import contiguous_strides
from trimesh.tensor.rank.function_parts import LocalMeta, Named, Operand, put_together, take_apart
from trimesh.tensor.session.activation import active_team, nothing_active

P = ParamSpec("P")
R = TypeVar("R")

Propagate = Callable[..., Any] | Literal["cached", "inspect"] | None
"""Rule that infers the metadata of a function's results at the controller: see `remote`."""


class _Metas(tuple[Any, ...]):
    """Metadata of a function's results, as an operand of an operation."""

    __slots__ = ()


@attrs.frozen(eq=False)
class _Prepared:
    """One call, ready to be issued.

    Attributes:
        team: The ranks.
        number: Number of the function there.
        tensors: Its tensor arguments.
        encoded: Its other arguments, encoded.
    """

    team: Team
    number: int
    tensors: Sequence[MeshTensor]
    encoded: Encoded

    def operands(self) -> tuple[Any, ...]:
        """Return the leading operands of each kernel."""
        bodies = [memoryview(bytes(buffer)) for buffer in self.encoded.buffers]
        return self.number, list(self.tensors), memoryview(self.encoded.payload), bodies


@attrs.frozen
class _Made:
    """Inferred result of a call.

    Attributes:
        metas: Metadata of its tensors.
        parts: Structure of the result.
    """

    metas: Sequence[Meta]
    parts: Any


class RemoteFunction(Generic[P, R]):
    """A function that runs on the ranks when it is called here: see `remote`.

    Attributes:
        function: The function itself; None if it was given by its name.
    """

    def __init__(
        self, function: Callable[P, R] | str, propagate: Propagate, *, returns_global: bool | None = None
    ) -> None:
        if isinstance(function, str):
            module, dot, name = function.rpartition(".")
            if not dot:
                raise ValueError(f"the name of a remote function must be package.module.function, got {function!r}")
            self._named: Named | None = Named(module, name)
            self.function: Callable[P, R] | None = None
            self.__name__ = self.__qualname__ = name
        else:
            self._named = None
            self.function = self.__trimesh_function__ = function
            functools.update_wrapper(self, function)
        if not (propagate in (None, "cached", "inspect") or callable(propagate)):
            raise ValueError(f"propagate must be None, 'cached', 'inspect' or a function, got {propagate!r}")
        self._propagate = propagate
        self._returns_global = returns_global
        self._numbers: WeakKeyDictionary[Team, int] = WeakKeyDictionary()
        self._cache: dict[Any, _Made] = {}

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it on every rank of the tensors among its arguments, or of the active mesh; return its tensors."""
        call = self._prepare(args, kwargs)
        result: R
        if self._propagate == "inspect":
            result = self._inspect(call)
            return result
        made = self._propagated(call, args, kwargs)
        needed = [index for index, one in enumerate(call.tensors) if one.requires_grad]
        if needed and torch.is_grad_enabled():
            apply: Any = _Differentiable.apply
            outputs = apply(call, made, Sizes(needed), *call.tensors)
        else:
            outputs = call_kernel(call.team, "function", *call.operands(), _metas(made), outputs=made.metas)
        result = put_together(made.parts, outputs)
        return result

    async def fetch(self, shard: Mapping[str, int] | None, args: Any, kwargs: Any) -> Any:
        """See `call_on_shard_and_fetch`."""
        call = self._prepare(args, kwargs)
        team = call.team
        places = list(range(len(team.peers))) if shard is None else [place_of(team, shard)]
        request = team.engine.ask(
            team,
            places,
            lambda number: call_kernel(team, "function_fetch", *call.operands(), number, list(places)),
            expected.ANYTHING,
        )
        found = await answers(request)
        return found[places[0]] if shard is not None else ValueMesh(team.region, [found[place] for place in places])

    # ---- before the call -------------------------------------------------------------------------------------

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Prepared:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors: list[MeshTensor] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, MeshTensor):
                leaves[index] = Operand(len(tensors))
                tensors.append(leaf)
            elif isinstance(leaf, ProcessGroup):
                leaves[index] = SentGroup(leaf.labels)
            elif isinstance(leaf, RanksDeviceMesh):
                leaves[index] = SentDeviceMesh(leaf.labels)
        team = tensors[0]._held.team if tensors else active_team()
        if team is None:
            raise RuntimeError(
                f"a remote function without tensors needs an active mesh, got none: write "
                f"`with mesh.activate(): {self.__name__}(...)`"
            )
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves) or any(one._held.team is not team for one in tensors):
            raise checks.explain(self, args, kwargs)
        if self._returns_global or any(one._meta.is_global for one in tensors):
            checked_team(team)
        values = team.engine.proc.values
        if not values.is_pickled:
            raise TypeError("remote functions need pickle, which this mesh refuses (pickle='off'): write endpoints")
        what = f"the arguments of {self.__qualname__}()"
        encoded = values.encode(pytree.tree_unflatten(leaves, tree), what=what)
        self._send_definitions(team, encoded, what)
        return _Prepared(team, self._number(team), tensors, encoded)

    def name(self) -> str:
        """Return its name, in the form of a torch operator."""
        return f"remote::{self.__qualname__}"

    def _number(self, team: Team) -> int:
        """Return the function's number on the ranks of a team; defines it there at first use."""
        found = self._numbers.get(team)
        if found is None:
            what = f"the remote function {self.__qualname__}"
            encoded = team.engine.proc.values.encode(self._reference(), what=what)
            self._send_definitions(team, encoded, what)
            found = team.engine.shapes.new_number()
            bodies = [memoryview(bytes(buffer)) for buffer in encoded.buffers]
            call_kernel(team, "define_function", found, memoryview(encoded.payload), bodies)
            self._numbers[team] = found
        return found

    def _reference(self) -> Any:
        """Return a reference to the function: its name if importable, otherwise the function itself."""
        if self._named is not None:
            return self._named
        assert self.function is not None
        module, qualname = self.function.__module__, self.function.__qualname__
        found = find(sys.modules.get(module), qualname)
        if found is self and not is_by_value(module):
            return Named(module, qualname)  # its own name refers to this object, not to the function
        return self.function

    def _send_definitions(self, team: Team, encoded: Encoded, what: str) -> None:
        if encoded.attachments:
            raise TypeError(f"{what} must be data and mesh tensors, got a port: pass ports to actors only")
        for peer in team.peers:
            peer.define(encoded.definitions)

    # ---- inference of results --------------------------------------------------------------------------------

    def _propagated(self, call: _Prepared, args: Any, kwargs: Any) -> _Made:
        if self._propagate != "cached":
            return self._propagate_now(call, args, kwargs)
        key = (call.encoded.payload, *map(bytes, call.encoded.buffers), *(one._meta for one in call.tensors))
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= limits.TENSOR_PLANS:
                self._cache.clear()
            found = self._cache[key] = self._propagate_now(call, args, kwargs)
        return found

    def _propagate_now(self, call: _Prepared, args: Any, kwargs: Any) -> _Made:
        shapes = call.team.engine.shapes
        function = self._propagate if callable(self._propagate) else self._imported()
        try:
            with nothing_active():
                fakes = pytree.tree_map_only(MeshTensor, lambda one: shapes.example(one._meta), (args, kwargs))
                result = shapes.run(function, *fakes)
                result = pytree.tree_map(_example(shapes), result, is_leaf=lambda one: isinstance(one, torch.Size))
        except Exception as error:
            raise TypeError(
                f"results of {self.__qualname__} must be inferable by running "
                f"{getattr(function, '__qualname__', function)} here on tensors without data, which raised "
                f"{type(error).__name__}: {error}; write @trimesh.remote(propagate=...) with a function that returns "
                "examples of the results, or 'inspect'"
            ) from error
        tensors, parts = take_apart(self.__qualname__, result)
        device = call.team.engine.device
        is_global = self._returns_global
        if is_global is None:
            is_global = any(one._meta.is_global for one in call.tensors)
        return _Made(
            [shapes.meta(one.size(), one.stride(), one.dtype, device, is_global=is_global) for one in tensors], parts
        )

    def _imported(self) -> Callable[..., Any]:
        if self.function is not None:
            return self.function
        assert self._named is not None
        found: Callable[..., Any] = getattr(importlib.import_module(self._named.module), self._named.qualname)
        return getattr(found, "__trimesh_function__", found)

    def _inspect(self, call: _Prepared) -> Any:
        team = call.team
        shapes, device = team.engine.shapes, team.engine.device
        kept: list[MeshTensor] = []
        opaque = _opaque(team)

        def issue(number: int) -> None:
            kept.extend(call_kernel(team, "function_inspect", *call.operands(), number, outputs=[opaque]))

        found = answers_now(team.engine.ask(team, range(len(team.peers)), issue, expected.RESULTS))
        told: Sequence[LocalMeta]
        told, parts = found[0]
        different = next((place for place, (others, _) in found.items() if others != told), None)
        if different is not None:
            raise TypeError(
                f"a remote function must return tensors of the same size, stride and dtype on every rank, "
                f"{self.__qualname__} returned {told} on the first and {found[different][0]} at place {different}"
            )
        metas = [shapes.meta(one.size, one.stride, one.dtype, device, is_global=one.is_global) for one in told]
        return put_together(parts, call_kernel(team, "function_parts", *kept, outputs=metas))

    def __repr__(self) -> str:
        return f"<remote function {self.__qualname__}>"

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(RemoteFunction, returns_global=self._returns_global)
        return make, (self.function or self._reference(), self._propagate)


def _example(shapes: Shapes) -> Callable[[Any], Any]:
    def example(leaf: Any) -> Any:
        if isinstance(leaf, torch.Size):
            with shapes.fake:
                return torch.empty(leaf)
        return leaf

    return example


def _metas(made: _Made) -> _Metas:
    return _Metas(_Metas((Sizes(meta.size), Sizes(meta.stride), meta.dtype, meta.is_global)) for meta in made.metas)


def _opaque(team: Team) -> Meta:
    """Return metadata for a non-tensor value on the ranks; no torch operation ever receives it."""
    return team.engine.shapes.meta((), (), torch.uint8, team.engine.device)


class _Differentiable(torch.autograd.Function):
    """Autograd function of a call: the ranks keep the state for the gradient as long as it may be needed."""

    @staticmethod
    def forward(ctx: Any, call: _Prepared, made: _Made, needed: Sizes, *tensors: MeshTensor) -> tuple[MeshTensor, ...]:
        outputs = [*made.metas, _opaque(call.team)]
        *results, ctx.graph = call_kernel(
            call.team, "function_graph", *call.operands(), _metas(made), needed, outputs=outputs
        )
        ctx.needed, ctx.count = needed, len(tensors)
        ctx.metas = [tensors[index]._meta for index in needed]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(one for one in results if not one.dtype.is_floating_point))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(grad is not None and grad.requires_grad for grad in grads):
            raise RuntimeError("the gradient of a remote function cannot be differentiated, got create_graph=True")
        team: Team = ctx.graph._held.team
        given = Sizes(index for index, grad in enumerate(grads) if grad is not None and grad.is_floating_point())
        metas = [_row_major(team, meta) for meta in ctx.metas]
        found = call_kernel(
            team, "function_backward", ctx.graph, [grads[index] for index in given], given, outputs=metas
        )
        by_index: list[Any] = [None] * ctx.count
        for index, grad in zip(ctx.needed, found, strict=True):
            by_index[index] = grad
        return None, None, None, *by_index


def _row_major(team: Team, meta: Meta) -> Meta:
    strides = contiguous_strides(meta.size)
    return team.engine.shapes.meta(meta.size, strides, meta.dtype, meta.device, is_global=meta.is_global)


@overload
def remote(
    function: str, /, *, propagate: Propagate = None, returns_global: bool | None = None
) -> RemoteFunction[..., Any]: ...
@overload
def remote(
    function: Callable[P, R], /, *, propagate: Propagate = None, returns_global: bool | None = None
) -> RemoteFunction[P, R]: ...
@overload
def remote(
    *, propagate: Propagate = None, returns_global: bool | None = None
) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...
def remote(function: Any = None, /, *, propagate: Propagate = None, returns_global: bool | None = None) -> Any:
    """Make a function run on every rank of a mesh when it is called here: `@trimesh.remote`.

    Arguments are tensors of one mesh, in lists, tuples and dicts, and any values that can be pickled. Each rank gets
    its own tensors; results are tensors. A global tensor arrives as a `DTensor` on the memory of its parts and the mesh
    of `procs.device_mesh()`, with torch's own sharding rules. Without tensors among its arguments the function runs on
    the active mesh. It is sent once: by name if ranks can import it, otherwise by value, as classes of actors are. Its
    errors poison its results. Gradients are computed on the ranks, by torch; second derivatives are not supported.

    Args:
        function: The function, or its name: "package.module.function".
        propagate: How the controller infers the metadata of results. None: run the function on tensors without data.
            "cached": the same, once for arguments with equal metadata. A function: run that instead; it returns example
            tensors, or a `torch.Size`. "inspect": run on the ranks and wait for their metadata, which blocks as
            `.item()` does, and gives no gradients.
        returns_global: Whether the tensors that it returns are `DTensor`s, which become global tensors on the same
            memory. None: if and only if some arguments are global. "inspect" checks each result.

    Raises:
        ShapeError: From a call: a tensor is global, and ranks are missing in the view.
        TypeError: From a call: the tensors are not on the same ranks, or results cannot be inferred.
        RuntimeError: From a call: it has no tensors, and no mesh is active.

    Example:
        @trimesh.remote
        def scaled(t: torch.Tensor, factor: float) -> torch.Tensor:
            return t * factor
    """
    if function is None:
        return lambda found: RemoteFunction(found, propagate, returns_global=returns_global)
    return RemoteFunction(function, propagate, returns_global=returns_global)


async def call_on_shard_and_fetch(
    function: Callable[..., Any] | str, /, *args: Any, shard: Mapping[str, int] | None = None, **kwargs: Any
) -> Any:
    """Run a function on the ranks, as `remote` does, and return its result: any value, not only tensors.

    Args:
        function: A remote function, any other function, or its name.
        *args: Tensors of one mesh, and other values.
        shard: Coordinates of the one rank to run it on; None for all.
        **kwargs: Like `args`.

    Returns:
        The value of that rank, or a `ValueMesh` of all. Tensors in it are copies, on the CPU.

    Raises:
        MeshErrorGroup: The function has raised, an argument could not be computed, or a process has ended.
        TypeError, RuntimeError: As a call of a remote function.
        ShapeError: No rank has the coordinates `shard`.

    Blocking: a checkpoint, cancellable; the ranks go on.
    """
    found = function if isinstance(function, RemoteFunction) else RemoteFunction(function, None)
    return await found.fetch(shard, args, kwargs)
