"""Parallel plans: placements of a module's parameters on a mesh, by name patterns and kinds of parallelism."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Literal, Self

import attrs
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trimesh.errors import ShapeError
from trimesh.tensor.parallel.explanation import Explanation, Lying, NamedTensor, named_tensors, ring_bytes
from trimesh.tensor.protocol.placement import WHOLE, Where, cuts_by_label, dim_cut_along


@attrs.frozen
class PatternRule:
    """A name pattern, and the placement of tensors that match it."""

    pattern: str
    where: Where
    must_fit: bool = True

    def cuts(self, name: str, ndim: int, extent: Mapping[str, int]) -> dict[str, int]:
        """Return, for each label that the rule mentions, the tensor dimension that is cut, or `WHOLE`.

        Raises:
            ShapeError: It does not fit the tensor and the mesh.
        """
        try:
            if isinstance(self.where, Mapping):
                return {label: dim_cut_along(label, one, ndim, extent) for label, one in self.where.items()}
            along = dict(zip(extent, cuts_by_label(self.where, ndim, extent), strict=True))
        except ShapeError as error:
            raise ShapeError(f"{name}: {error}, by {self.pattern!r}") from None
        cut = {label: dim for label, dim in along.items() if dim != WHOLE}
        return cut or along


class ParallelPlan:
    """Placements of the parameters and buffers of a module on a mesh; an argument of `module_to_mesh`.

    Combine plans for several dimensions of a mesh by `|`. Tensors that no part of a plan mentions are replicated.

    Args:
        patterns: Placements by name pattern (`"layers.*.up.weight"`, syntax of `fnmatch`). A placement is as in
            `distribute` (`["tp", None]`); or for some dimensions of the mesh the tensor dimension to cut along each
            (`{"tp": 0}`; also torch's `Shard(0)`, `Replicate()`); or None to replicate, even under `fully_sharded`.
            All patterns that match a name apply, so they must agree.

    Example:
        >>> plan = ParallelPlan.tensor("tp", columns=["*.up"], rows=["*.down"]) | ParallelPlan.fully_sharded("dp")
        >>> print(plan.explain(model, {"dp": 2, "tp": 2}))
        >>> model = trimesh.module_to_mesh(model, procs, plan)
    """

    __slots__ = ("_batch", "_contexts", "_exchanges", "_partial", "_rules", "_sharded", "_shared", "_shown")

    def __init__(self, patterns: Mapping[str, Where] | None = None) -> None:
        self._rules = tuple(PatternRule(pattern, where) for pattern, where in (patterns or {}).items())
        self._batch: tuple[str, ...] = ()
        self._sharded: tuple[str, ...] = ()
        self._shared: tuple[tuple[str, bool], ...] = ()
        self._partial: tuple[str, ...] = ()
        self._exchanges: tuple[Exchange, ...] = ()
        self._contexts: tuple[str, ...] = ()
        self._shown: tuple[str, ...] = ()

    @classmethod
    def data(cls, label: str) -> Self:
        """Return a plan of data parallel training: inputs are cut along `label`, parameters are replicated along it.

        It places nothing: cut the inputs by `distribute`. `explain` counts the traffic of gradients.
        """
        return cls()._changed(batch=(label,))

    @classmethod
    def fully_sharded(cls, label: str) -> Self:
        """Return a plan of fully sharded data parallel training (ZeRO 3) along `label`.

        Parameters, their gradients and the state of their optimizer are sharded. When a module runs, its own parameters
        are all-gathered along `label`, and gradients are reduce-scattered. Autograd keeps the whole parameter from
        forward to backward; with `torch.utils.checkpoint` it is gathered again.

        The plan cuts the first dimension that nothing else cuts and that divides evenly, or else the first that has an
        element for each rank. A parameter without such a dimension is replicated.
        """
        return cls()._changed(batch=(label,), sharded=(label,))

    @classmethod
    def optimizer_sharded(cls, label: str, *, gradients: bool = False) -> Self:
        """Return a plan of data parallel training with the optimizer's state sharded along `label` (ZeRO 1).

        Parameters are replicated. Call `trimesh.optimizer_to_mesh(optimizer)`: from then on gradients are
        reduce-scattered, the optimizer updates one part of each parameter on each rank, and the updated parts are
        all-gathered. The dimension is the one that `fully_sharded` would cut. If gradients are needed whole before the
        step, as by `clip_grad_norm_`, they are all-reduced there, which moves twice as much.

        Args:
            label: A dimension of the mesh.
            gradients: Whether to reduce-scatter gradients in each backward pass, and keep only parts (ZeRO 2).
        """
        name = f"ParallelPlan.optimizer_sharded({label!r}{', gradients=True' if gradients else ''})"
        return cls()._changed(batch=(label,), shared=((label, gradients),), shown=(name,))

    @classmethod
    def tensor(
        cls, label: str, *, columns: Iterable[str] = (), rows: Iterable[str] = (), sequence: bool = False
    ) -> Self:
        """Return a plan of tensor parallelism along `label`, for linear layers and embeddings.

        Args:
            label: A dimension of the mesh.
            columns: Name patterns of modules with sharded outputs: `weight` and `bias` are cut along their first
                dimension. An `nn.Embedding` is cut by rows of its table.
            rows: Name patterns of modules with sharded inputs: `weight` is cut along its second dimension, `bias` is
                replicated.
            sequence: Cut activations between them along their second dimension (batch, sequence, features). Outputs of
                `rows` and of embeddings are reduce-scattered, inputs of `columns` are all-gathered, and modules in
                between, such as norms and dropout, compute on parts.
        """
        made: list[PatternRule] = []
        exchanges: list[Exchange] = []
        for name in _several(columns, "columns"):
            made += [PatternRule(f"{name}.weight", {label: 0}), PatternRule(f"{name}.bias", {label: 0}, must_fit=False)]
            exchanges += [
                Exchange(name, "input", label, "gather", WHOLE),
                Exchange(name, "output", label, "scatter", 1, must_fit=False, of_embeddings=True),
            ]
        for name in _several(rows, "rows"):
            made += [
                PatternRule(f"{name}.weight", {label: 1}),
                PatternRule(f"{name}.bias", {label: None}, must_fit=False),
            ]
            exchanges.append(Exchange(name, "output", label, "scatter", 1))
        if not sequence:
            return cls()._changed(rules=tuple(made))
        shown = f"with activations cut along {label!r}"
        return cls()._changed(rules=tuple(made), exchanges=tuple(exchanges), partial=(label,), shown=(shown,))

    @classmethod
    def expert(cls, label: str, experts: Iterable[str]) -> Self:
        """Return a plan of expert parallelism along `label`, with inputs cut as in data parallel training.

        Args:
            label: A dimension of the mesh, along which groups of tokens are cut.
            experts: Name patterns of modules that compute all experts. The first dimension of their parameters, inputs
                and outputs is the expert; the second of inputs and outputs is the group of tokens. An all-to-all before
                and after such a module sends each rank the tokens for its experts.
        """
        names = _several(experts, "experts")
        exchanges = [
            one
            for name in names
            for one in (Exchange(name, "input", label, "turn", 0), Exchange(name, "output", label, "turn", 1))
        ]
        rules = tuple(PatternRule(f"{name}.*", {label: 0}) for name in names)
        shown = (f"ParallelPlan.expert({label!r}, {names})",)
        return cls()._changed(rules=rules, exchanges=tuple(exchanges), partial=(label,), shown=shown)

    @classmethod
    def context(cls, label: str) -> Self:
        """Return a plan of context parallelism along `label`: the sequence of every input is cut.

        It places nothing: cut the inputs by `distribute` (`[None, "cp"]`: batch, sequence). Linear layers, norms and
        other position-wise modules compute on parts. In `scaled_dot_product_attention` a rank has the queries of its
        positions; keys and values are all-gathered, in the backward pass once more, and their gradients are
        reduce-scattered. With `is_causal` a rank skips the keys after its positions, so the last rank has most to
        compute. A loss that folds batch and sequence gathers its inputs; `cross_entropy` of `logits.transpose(1, 2)`
        does not.

        Args:
            label: A dimension of the mesh.
        """
        shown = (f"ParallelPlan.context({label!r})",)
        return cls()._changed(contexts=(label,), partial=(label,), shown=shown)

    def __or__(self, other: ParallelPlan) -> Self:
        """Combine two plans."""
        if not isinstance(other, ParallelPlan):
            return NotImplemented
        return self._changed(
            rules=other._rules,
            batch=other._batch,
            sharded=other._sharded,
            shared=other._shared,
            partial=other._partial,
            exchanges=other._exchanges,
            contexts=other._contexts,
            shown=other._shown,
        )

    def __repr__(self) -> str:
        """Show the calls that make the plan."""
        parts = [f"ParallelPlan({ {rule.pattern: rule.where for rule in self._rules} })"] if self._rules else []
        shared = [label for label, _ in self._shared]
        parts += [
            f"ParallelPlan.{'fully_sharded' if label in self._sharded else 'data'}({label!r})"
            for label in self._batch
            if label not in shared
        ]
        return " | ".join((*parts, *self._shown)) or "ParallelPlan()"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Resharding of activations around modules."""
        return self._exchanges

    @property
    def contexts(self) -> tuple[str, ...]:
        """Labels that the sequence of inputs is cut along."""
        return self._contexts

    def scatters_gradients(self, label: str) -> bool:
        """Return whether each backward pass reduce-scatters gradients of tensors that are replicated along a label."""
        return (label, True) in self._shared

    def explain(self, module: nn.Module, mesh: Any, example: Sequence[torch.Tensor] | None = None) -> Explanation:
        """Return the placement of each tensor, the bytes that a rank holds, and the bytes that a training step moves.

        Args:
            module: The module, moved already or not; its values are not used.
            mesh: The processes, or sizes of dimensions (`{"dp": 64, "tp": 8}`), for which no processes are needed.
            example: Whole inputs of the module, of which only sizes and types are used. With it, traffic of
                activations is counted; the module must not have been moved yet.

        Returns:
            The explanation; `str` formats it as a table.

        Raises:
            ShapeError: The plan does not fit the module and the mesh, as `module_to_mesh` would say.

        Blocking: no checkpoint.
        """
        extent = dict(mesh if isinstance(mesh, Mapping) else mesh.extent)
        lying = tuple(self.resolved(named_tensors(module), extent))
        check_exchanges(self._exchanges, module, extent)
        activations = None
        if example is not None:
            cut = (*self._batch, *self._partial)
            activations = activations_sent(
                module, self._exchanges, example, extent, cut, self._countable(lying, extent)
            )
        return Explanation(lying, extent, self._batch, self._partial, activations)

    def _countable(self, lying: Sequence[Lying], extent: Mapping[str, int]) -> tuple[str, ...]:
        """Return the labels whose attention can be counted.

        Raises:
            ShapeError: Heads may be cut, too.
        """
        cut = {label for one in lying for label, dim in zip(extent, one.cuts, strict=True) if dim != WHOLE}
        others = sorted(cut - {label for one in lying for label in one.gathered})
        if self._contexts and others:
            raise ShapeError(
                "explain can count the attention of ParallelPlan.context only if heads are whole, got parameters cut "
                f"along {others}: call it without an example"
            )
        return self._contexts

    def resolved(self, tensors: Sequence[NamedTensor], extent: Mapping[str, int]) -> list[Lying]:
        """Return the placement of each tensor.

        Raises:
            ShapeError: The plan does not fit them and the mesh.
        """
        for label in (*self._batch, *self._partial):
            if label not in extent:
                raise ShapeError(f"a plan must name dimensions of the mesh, {list(extent)}, got {label!r}")
        every = [name for tensor in tensors for name in tensor.names]
        unfit = [rule.pattern for rule in self._rules if rule.must_fit and not _fitting(rule, every)]
        if unfit:
            raise ShapeError(
                f"a pattern of a plan must fit a parameter or buffer, got {', '.join(map(repr, unfit))} for {every}"
            )
        return [self._lying(tensor, extent) for tensor in tensors]

    def _lying(self, tensor: NamedTensor, extent: Mapping[str, int]) -> Lying:
        said: dict[str, tuple[int, PatternRule]] = {}
        for rule in self._rules:
            name = _fitting(rule, tensor.names)
            if name is None:
                continue
            for label, dim in rule.cuts(name, len(tensor.size), extent).items():
                before = said.setdefault(label, (dim, rule))
                if before[0] != dim:
                    raise ShapeError(
                        f"patterns of a plan that fit one name must agree along {label!r}, got "
                        f"{before[1].pattern!r}: {before[1].where!r} and {rule.pattern!r}: {rule.where!r} for {name!r}"
                    )
        cuts = {label: dim for label, (dim, _) in said.items() if dim != WHOLE}
        gathered = []
        for label in self._sharded:
            if tensor.is_parameter and label not in said:
                free = _free_dim(tensor.size, extent[label], cuts.values())
                if free is not None:
                    cuts[label] = free
                    gathered.append(label)
        shared = []
        for label, _ in self._shared:
            if tensor.is_parameter and tensor.needs_gradient and label not in said:
                free = _free_dim(tensor.size, extent[label], cuts.values())
                if free is not None:
                    shared.append((label, free))
        patterns = tuple(dict.fromkeys(rule.pattern for _, rule in said.values()))
        along = tuple(cuts.get(label, WHOLE) for label in extent)
        return Lying(tensor, along, tuple(gathered), patterns, tuple(said), tuple(shared))

    def _changed(
        self,
        *,
        rules: tuple[PatternRule, ...] = (),
        batch: tuple[str, ...] = (),
        sharded: tuple[str, ...] = (),
        shared: tuple[tuple[str, bool], ...] = (),
        partial: tuple[str, ...] = (),
        exchanges: tuple[Exchange, ...] = (),
        contexts: tuple[str, ...] = (),
        shown: tuple[str, ...] = (),
    ) -> Self:
        made = type(self)()
        made._rules = self._rules + rules
        made._batch = tuple(dict.fromkeys(self._batch + batch))
        made._sharded = tuple(dict.fromkeys(self._sharded + sharded))
        made._shared = tuple(dict.fromkeys(self._shared + shared))
        made._partial = tuple(dict.fromkeys(self._partial + partial))
        made._exchanges = self._exchanges + exchanges
        made._contexts = tuple(dict.fromkeys(self._contexts + contexts))
        made._shown = self._shown + shown
        return made


def _several(patterns: Iterable[str], what: str) -> list[str]:
    if isinstance(patterns, str):
        raise TypeError(f"{what} must be a list of patterns, got {patterns!r}: write {what}=[{patterns!r}]")
    return list(patterns)


def _fitting(rule: PatternRule, names: Sequence[str]) -> str | None:
    return next((name for name in names if fnmatchcase(name, rule.pattern)), None)


def _free_dim(size: Sequence[int], count: int, cut: Iterable[int]) -> int | None:
    """Return the dimension that `ParallelPlan.fully_sharded` cuts."""
    taken = set(cut)
    free = [dim for dim in range(len(size)) if dim not in taken and size[dim] >= count]
    return next((dim for dim in free if size[dim] % count == 0), free[0] if free else None)


# ---- exchanges -------------------------------------------------------------------------------------------------------

# Exchanges of a plan: resharding of activations along one dimension of the mesh, around some modules.


@attrs.frozen
class Exchange:
    """Resharding of inputs or outputs of modules along one label.

    Attributes:
        pattern: Pattern of module names.
        side: Whether it applies to inputs or to outputs.
        label: Dimension of the mesh; placements along all others are kept.
        kind: "gather" is an all-gather, "scatter" a reduce-scatter, "turn" an all-to-all that cuts another dimension
            than before.
        dim: Tensor dimension that is cut afterwards; `WHOLE` for none.
        must_fit: Whether the pattern must match a module.
        of_embeddings: Whether it applies to embeddings only.
    """

    pattern: str
    side: Literal["input", "output"]
    label: str
    kind: Literal["gather", "scatter", "turn"]
    dim: int
    must_fit: bool = True
    of_embeddings: bool = False

    def fits(self, name: str, part: nn.Module) -> bool:
        return fnmatchcase(name, self.pattern) and (not self.of_embeddings or isinstance(part, nn.Embedding))

    def is_for(self, value: Any) -> bool:
        """Return whether it applies to a value: only tensors of floating point with enough dimensions are resharded."""
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > max(1, self.dim)

    def bytes_sent(self, whole: int, ranks: int) -> int:
        """Return the bytes that a rank sends for `whole` bytes in the forward pass; the backward pass sends as many."""
        sent = ring_bytes(whole, ranks)
        return sent // ranks if self.kind == "turn" else sent


def check_exchanges(exchanges: Sequence[Exchange], module: nn.Module, extent: Mapping[str, int]) -> None:
    """Refuse exchanges that do not fit a module and a mesh.

    Raises:
        ShapeError: They do not.
    """
    parts = dict(module.named_modules())
    for one in exchanges:
        if one.label not in extent:
            raise ShapeError(f"a plan must name dimensions of the mesh, {list(extent)}, got {one.label!r}")
        if one.must_fit and not any(one.fits(*named) for named in parts.items()):
            raise ShapeError(f"a pattern of a plan must fit a module, got {one.pattern!r} for {list(parts)}")


def activations_sent(
    module: nn.Module,
    exchanges: Sequence[Exchange],
    example: Sequence[torch.Tensor],
    extent: Mapping[str, int],
    batch: Sequence[str],
    contexts: Sequence[str] = (),
) -> dict[str, int]:
    """Return the bytes of activations that a rank sends in a forward and a backward pass, by label.

    Args:
        module: The module; it runs on tensors without data.
        exchanges: Exchanges of the plan.
        example: Whole inputs of the module.
        extent: Extent of the mesh.
        batch: Labels that inputs are cut along; each divides the part of a rank.
        contexts: The labels among them along which the sequence is cut.
    """
    counting = _Counting(extent, batch)
    if not exchanges and not contexts:
        return counting.found
    twin = copy.deepcopy(module).to("meta")
    for name, part in twin.named_modules():
        for one in exchanges:
            if one.fits(name, part):
                counting.follow(part, one)
    with _Attention(counting, contexts):
        twin(*(one.to("meta") for one in example))
    return counting.found


class _Attention(TorchFunctionMode):
    """Function mode that counts the traffic of each attention under context parallelism."""

    def __init__(self, counting: _Counting, contexts: Sequence[str]) -> None:
        super().__init__()
        self._counting, self._contexts = counting, contexts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key, value = [*args, *(named[name] for name in ("query", "key", "value")[len(args) :])][:3]
            for label in self._contexts:
                self._counting.attention(label, query, (key, value))
        return func(*args, **named)


class _Counting:
    """Counts the bytes that exchanges of a forward pass and its backward pass send."""

    def __init__(self, extent: Mapping[str, int], batch: Sequence[str]) -> None:
        self._extent, self._batch = extent, batch
        self._gathered: list[tuple[str, torch.Tensor]] = []
        self.found = dict.fromkeys(extent, 0)

    def follow(self, part: nn.Module, one: Exchange) -> None:
        if one.side == "input":
            part.register_forward_pre_hook(lambda _, args: self._count_all(one, args))
        else:
            part.register_forward_hook(lambda _part, _args, made: self._count_all(one, (made,)))

    def attention(self, label: str, query: torch.Tensor, keys: Sequence[torch.Tensor]) -> None:
        """Count the all-gather of keys and values along a label, and the reduce-scatter of their gradients."""
        others = prod(self._extent[one] for one in self._batch if one != label)
        has_gradient = query.requires_grad or any(one.requires_grad for one in keys)
        for one in keys:
            sent = ring_bytes(one.numel() * one.element_size() // others, self._extent[label])
            self.found[label] += sent * (3 if has_gradient else 1)

    def _count_all(self, one: Exchange, values: Sequence[Any]) -> None:
        for value in values:
            if one.is_for(value):
                self._count(one, value)

    def _count(self, one: Exchange, value: torch.Tensor) -> None:
        if one.kind == "gather" and value.grad_fn is not None:
            if any(label == one.label and other is value for label, other in self._gathered):
                return  # sibling modules (queries, keys, values) share one gathered input
            self._gathered.append((one.label, value))
        others = prod(self._extent[label] for label in self._batch if label != one.label)
        sent = one.bytes_sent(value.numel() * value.element_size() // others, self._extent[one.label])
        self.found[one.label] += sent * (2 if value.requires_grad else 1)
