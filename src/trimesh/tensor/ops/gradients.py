"""`grad_generator`: gradients one at a time, so that a schedule decides what is computed between two of them.

`torch.autograd.grad` computes all requested gradients at once, and a second call starts at the roots again. This
module walks torch's graph in Python: each node is executed once, when the first gradient that needs it is requested.
Gradients that have reached other nodes wait there.

    GG-1 A node is executed after all nodes that lead to it from the roots, so that its incoming gradient is complete.
    GG-2 A node is executed only if a requested gradient depends on it.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.shape.value_mesh import ValueMesh
from trimesh.tensor.controller import shapes
from trimesh.tensor.controller.engine import answers
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.upload import bytes_of
from trimesh.tensor.issue.temporaries import executing
from trimesh.tensor.session.opening import team_of

_Edge = tuple[Any, int]
"""A node of the graph, and the index of one of its inputs."""


def grad_generator(
    roots: torch.Tensor | Sequence[torch.Tensor],
    params: Iterable[torch.Tensor],
    grad_roots: Sequence[torch.Tensor | None] | None = None,
) -> Generator[torch.Tensor | None]:
    """Yield the gradients of the sum of `roots` by each of `params`, in their order, computed lazily.

    Each gradient is computed when it is requested, and nothing twice: request the last layer first, and send off its
    gradient before the rest of the backward pass. The graph is kept. Accepts mesh tensors, also of several meshes, and
    tensors of this process.

    Hooks of `params` run. Hooks of nodes, and of tensors between `params` and the roots, do not: torch exposes them
    only to its own engine. Nor does it expose `set_materialize_grads(False)`: the `backward` of a
    `torch.autograd.Function` gets zeros for outputs that have no gradient.

    Args:
        roots: Tensors to differentiate; of one element each, unless `grad_roots` is given.
        params: Tensors to differentiate by: any that require gradients, including results of operations.
        grad_roots: Gradients of the roots, None for one.

    Yields:
        The gradient by each of `params`; None where the roots do not depend on it.

    Raises:
        RuntimeError: A root has no history, or more than one element and no gradient.

    Example:
        >>> for parameter, grad in zip(params, trimesh.grad_generator(loss, params)):
        ...     parameter.grad = grad
    """
    roots = [roots] if isinstance(roots, torch.Tensor) else list(roots)
    given = [None] * len(roots) if grad_roots is None else list(grad_roots)
    params = list(params)
    wanted = [_edge(param) for param in params]
    walk = _Walk(frozenset(node for node, _ in wanted))
    starts: list[_Edge] = []
    for root, grad in zip(roots, given, strict=True):
        if grad is None and root.numel() != 1:
            raise RuntimeError(
                f"a root must have one element when no gradient is given for it, got {tuple(root.size())}: "
                "write grad_generator(loss.sum(), params)"
            )
        starts.append(_edge(root))
        with torch.no_grad():
            walk.add(starts[-1], torch.ones_like(root) if grad is None else grad)
    walk.explore([node for node, _ in starts])
    for param, edge in zip(params, wanted, strict=True):
        yield _after_hooks(param, walk.gradient(edge))


def _edge(tensor: torch.Tensor) -> _Edge:
    if not tensor.requires_grad:
        raise RuntimeError(f"roots and params must be tensors that require gradients, got {tensor!r}")
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _after_hooks(param: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is not None:
        for hook in list((param._backward_hooks or {}).values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
    return grad


@attrs.define(eq=False)
class _Walk:
    """Progress of the execution of a graph.

    Attributes:
        wanted: Nodes whose gradients are kept after they have been executed.
    """

    wanted: frozenset[Any]
    _places: dict[Any, int] = attrs.field(factory=dict[Any, int])  # topological order (GG-1)
    _leading: dict[Any, list[Any]] = attrs.field(factory=dict[Any, "list[Any]"])
    _executed: set[Any] = attrs.field(factory=set[Any])
    _grads: dict[Any, dict[int, torch.Tensor]] = attrs.field(factory=dict[Any, "dict[int, torch.Tensor]"])

    def explore(self, starts: Sequence[Any]) -> None:
        """Find all nodes reachable from some, without recursion: graphs can be very deep."""
        finished: list[Any] = []
        seen: set[Any] = set()
        for start in starts:
            stack = [(start, False)]
            while stack:
                node, is_finished = stack.pop()
                if is_finished:
                    finished.append(node)
                elif node not in seen:
                    seen.add(node)
                    stack.append((node, True))
                    for following, _ in node.next_functions:
                        if following is not None:
                            self._leading.setdefault(following, []).append(node)
                            stack.append((following, False))
        self._places = {node: place for place, node in enumerate(reversed(finished))}

    def gradient(self, edge: _Edge) -> torch.Tensor | None:
        """Execute the nodes that the gradient at an edge needs (GG-2), and return that gradient."""
        target, number = edge
        missing: set[Any] = set()
        stack = list(self._leading.get(target, ()))
        while stack:
            node = stack.pop()
            if node not in self._executed and node not in missing:
                missing.add(node)
                stack += self._leading.get(node, ())
        for node in sorted(missing, key=self._places.__getitem__):  # GG-1
            self._execute(node)
        return self._grads.get(target, {}).get(number)

    def add(self, edge: _Edge, grad: torch.Tensor) -> None:
        """Add a gradient at an edge."""
        node, number = edge
        arrived = self._grads.setdefault(node, {})
        arrived[number] = arrived[number] + grad if number in arrived else grad

    def _execute(self, node: Any) -> None:
        self._executed.add(node)
        arrived = self._grads.get(node) if node in self.wanted else self._grads.pop(node, None)
        if not arrived:
            return
        with torch.no_grad():
            with executing(node):
                results = _called(node, arrived)
            for following, result in results:
                if following[0] is not None and result is not None:
                    self.add(following, _as_expected(following, result))


def _called(node: Any, arrived: dict[int, torch.Tensor]) -> Iterable[tuple[_Edge, torch.Tensor | None]]:
    """Run a node; return the gradients of its inputs, each with the edge that it goes to."""
    metas = node._input_metadata
    grads = [arrived.get(number) for number in range(len(metas))]
    if not isinstance(node, BackwardCFunction):
        results = node(*grads)
        return zip(node.next_functions, results if isinstance(results, tuple) else (results,), strict=False)
    # Torch's engine passes zeros for missing gradients to a user's Function, unless it has called
    # `set_materialize_grads(False)`, which cannot be read.
    one = next(iter(arrived.values()))
    grads = [
        one.new_zeros(tuple(meta.shape), dtype=meta.dtype) if grad is None else grad
        for grad, meta in zip(grads, metas, strict=True)
    ]
    apply: Any = node.apply
    results = apply(*grads)
    # It returns a result for each argument, tensor or not; only tensors have edges.
    needed = itertools.compress(results if isinstance(results, tuple) else (results,), node.needs_input_grad)
    return zip((edge for edge in node.next_functions if edge[0] is not None), needed, strict=False)


def _as_expected(edge: _Edge, grad: torch.Tensor) -> torch.Tensor:
    """Reverse broadcasting and type promotion in a gradient, as torch's engine does between two nodes."""
    node, number = edge
    meta = node._input_metadata[number]
    size = tuple(meta.shape)
    if tuple(grad.size()) != size:
        grad = grad.sum_to_size(size)
    if grad.is_complex() and not meta.dtype.is_complex:
        grad = grad.real
    return grad if grad.dtype is meta.dtype else grad.to(meta.dtype)


# ---- random numbers on the ranks: seeds, and the state of their generators -------------------------------------------


def manual_seed(seed: int, mesh: ProcMesh, *, same: bool = False) -> None:
    """Seed torch's generators on the ranks, in order with the operations on their tensors.

    `torch.manual_seed` seeds those of this process only. A rank's generator is shared by all code in its process.
    Global tensors of this view draw from a separate generator, equal on every rank. It gets `seed`, and produces the
    numbers that torch produces here after `torch.manual_seed(seed)`, whatever the placements.

    Args:
        seed: Seed of the first rank of the view; each further rank gets one more.
        mesh: The processes.
        same: Whether all ranks get the same seed instead.

    Raises:
        RuntimeError: The mesh is a reference, or `this_proc()`.
    """
    call_kernel(team_of(mesh, "generators are seeded on"), "seed", seed, 0 if same else 1)


async def get_rng_state(mesh: ProcMesh) -> ValueMesh[torch.Tensor]:
    """Return the state of torch's generator on each rank, after all operations issued so far.

    The same tensor also holds, after it, the state of the generator for global tensors of this view.

    Raises:
        MeshErrorGroup: A process has ended.
        RuntimeError: The mesh is a reference, or `this_proc()`.

    Blocking: a checkpoint, cancellable.
    """
    team = team_of(mesh, "the state of generators is asked of")
    found = await in_trio(_states)(team)
    return ValueMesh(team.region, found)


def set_rng_state(states: ValueMesh[torch.Tensor] | Sequence[torch.Tensor] | torch.Tensor, mesh: ProcMesh) -> None:
    """Set the state of the ranks' generators, in order with the operations on their tensors.

    The generator for global tensors gets the state of the first rank, on all ranks, so that they draw alike.

    Args:
        states: Result of `get_rng_state`, or one state for all ranks. A state of `torch.get_rng_state()` leaves the
            generator for global tensors unchanged.
        mesh: The processes.

    Raises:
        ValueError: The number of states differs from the number of ranks.
        RuntimeError: The mesh is a reference, or `this_proc()`.
    """
    team = team_of(mesh, "the state of generators is set on")
    each = [states] if isinstance(states, torch.Tensor) else list(_each(states))
    if len(each) not in (1, len(team.peers)):
        raise ValueError(f"there must be one state for all ranks or one for each of {len(team.peers)}, got {len(each)}")
    call_kernel(team, "set_generator", [bytes_of(state) for state in each])


async def _states(team: Team) -> list[Any]:
    places = range(len(team.peers))
    request = team.engine.ask(team, places, lambda number: call_kernel(team, "get_generator", number), shapes.RNG_STATE)
    found = await answers(request)
    return [found[place] for place in places]


def _each(states: ValueMesh[torch.Tensor] | Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return list(states.values()) if isinstance(states, ValueMesh) else states
