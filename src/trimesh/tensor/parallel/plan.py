"""Plans: how the parameters of a module lie on a mesh, by patterns of their names and by kind of parallelism."""

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
    """One pattern of names, and what it says of the tensors that it fits."""

    pattern: str
    where: Where
    must_fit: bool = True

    def cuts(self, name: str, ndim: int, extent: Mapping[str, int]) -> dict[str, int]:
        """Return the dimension of a tensor that is cut, or `WHOLE`, for each label that this says something of.

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
    """How the parameters and buffers of a module lie on a mesh; `module_to_mesh` takes it.

    Plans of several dimensions of a mesh are put together by `|`. Whatever no part of a plan says something of is whole
    on every rank.

    Args:
        patterns: By pattern of names (`"layers.*.up.weight"`, as `fnmatch` has it): placements as `distribute` takes
            them (`["tp", None]`), or for some dimensions of the mesh the dimension of the tensor that is cut along it
            (`{"tp": 0}`; also torch's `Shard(0)`, `Replicate()`), or None: the whole on every rank, whatever
            `fully_sharded` says. All patterns that fit a name count, so they must agree.

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
        """Return a plan of data parallel training: the inputs are cut along `label`, parameters are whole along it.

        It places nothing: `distribute` cuts the inputs. `explain` counts what their gradients move.
        """
        return cls()._changed(batch=(label,))

    @classmethod
    def fully_sharded(cls, label: str) -> Self:
        """Return a plan of data parallel training in which the ranks along `label` share out each parameter.

        A parameter, its gradient and the state of its optimizer are in parts. When a module runs, its own parameters
        are brought together along `label`, and the gradient is added up part by part: ZeRO 3. Autograd keeps the whole
        of a parameter from forward to backward; with `torch.utils.checkpoint` it is brought together again.

        Cut is the first dimension that nothing else cuts and that divides evenly, or else the first that has an
        element for each rank. A parameter without one is whole.
        """
        return cls()._changed(batch=(label,), sharded=(label,))

    @classmethod
    def optimizer_sharded(cls, label: str, *, gradients: bool = False) -> Self:
        """Return a plan of data parallel training in which the ranks along `label` share out the optimizer's state.

        Parameters are whole. The optimizer, once `trimesh.optimizer_to_mesh(optimizer)` has been told of it, updates a
        part of each on each rank, of gradients that are added up part by part, and what comes of it is brought
        together: ZeRO 1. Cut is the dimension that `fully_sharded` would cut. Where gradients are needed whole before,
        as by `clip_grad_norm_`, they are added up for all there, which moves twice as much.

        Args:
            label: A dimension of the mesh.
            gradients: Add them up part by part in each backward pass, and keep parts: ZeRO 2.
        """
        name = f"ParallelPlan.optimizer_sharded({label!r}{', gradients=True' if gradients else ''})"
        return cls()._changed(batch=(label,), shared=((label, gradients),), shown=(name,))

    @classmethod
    def tensor(
        cls, label: str, *, columns: Iterable[str] = (), rows: Iterable[str] = (), sequence: bool = False
    ) -> Self:
        """Return a plan in which the ranks along `label` share out linear layers and tables of rows.

        Args:
            label: A dimension of the mesh.
            columns: Patterns of names of modules whose outputs are shared out: `weight` and `bias` are cut along
                their first dimension. An `nn.Embedding` is cut by rows of its table.
            rows: Of modules whose inputs are: `weight` is cut along its second dimension, `bias` is whole.
            sequence: Cut activations between them along their second dimension (batch, sequence, features): what comes
                out of `rows` and of tables is added up part by part, what goes into `columns` is brought together, and
                what is in between, norms and dropout, computes on parts.
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
        """Return a plan in which the ranks along `label` share out experts, and inputs as in data parallel training.

        Args:
            label: A dimension of the mesh, that the groups of tokens are cut along.
            experts: Patterns of names of modules that compute all experts: of their parameters, and of what goes in
                and comes out, the first dimension is that of experts, and of the latter the second is that of groups of
                tokens. Before and after such a module each rank sends each other one the tokens for its experts.
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
        """Return a plan in which the ranks along `label` share out the sequence of every input.

        It places nothing: `distribute` cuts the inputs (`[None, "cp"]`: batch, sequence). Linear layers, norms and
        whatever else computes place by place does so on parts. For `scaled_dot_product_attention` a rank has the
        queries of its places; keys and values are brought together, in the backward pass once more, and their gradients
        are added up part by part. With `is_causal` a rank does not compute what comes after its places: the last one
        has most to do. A loss that folds batch and sequence brings its inputs together; `cross_entropy` of
        `logits.transpose(1, 2)` does not.

        Args:
            label: A dimension of the mesh.
        """
        shown = (f"ParallelPlan.context({label!r})",)
        return cls()._changed(contexts=(label,), partial=(label,), shown=shown)

    def __or__(self, other: ParallelPlan) -> Self:
        """Return what both say."""
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
        """Show what it says."""
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
        """What it does to activations."""
        return self._exchanges

    @property
    def contexts(self) -> tuple[str, ...]:
        """Labels that the sequence of inputs is cut along."""
        return self._contexts

    def scatters_gradients(self, label: str) -> bool:
        """Whether gradients are added up part by part in each backward pass, of what is whole along a label."""
        return (label, True) in self._shared

    def explain(self, module: nn.Module, mesh: Any, example: Sequence[torch.Tensor] | None = None) -> Explanation:
        """Say what lies where, how many bytes a rank holds, and what a step of training moves.

        Args:
            module: Before it is moved or afterwards; its values are not looked at.
            mesh: The processes, or the sizes of their dimensions (`{"dp": 64, "tp": 8}`), for which none are needed.
            example: Inputs of the module, whole; looked at are sizes and types. What the plan does to activations is
                counted then; the module must be one that was not moved yet.

        Returns:
            The same as data and, by `str`, as text.

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
                f"explain counts the attention of ParallelPlan.context where heads are whole, and parameters are cut "
                f"along {others}: call it without an example"
            )
        return self._contexts

    def resolved(self, tensors: Sequence[NamedTensor], extent: Mapping[str, int]) -> list[Lying]:
        """Return how each tensor lies.

        Raises:
            ShapeError: The plan does not fit them and the mesh.
        """
        for label in (*self._batch, *self._partial):
            if label not in extent:
                raise ShapeError(f"a plan names dimensions of the mesh, {list(extent)}, got {label!r}")
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
        raise TypeError(f"{what} takes several patterns, got {patterns!r}: write {what}=[{patterns!r}]")
    return list(patterns)


def _fitting(rule: PatternRule, names: Sequence[str]) -> str | None:
    return next((name for name in names if fnmatchcase(name, rule.pattern)), None)


def _free_dim(size: Sequence[int], count: int, cut: Iterable[int]) -> int | None:
    """Return the dimension that `ParallelPlan.fully_sharded` cuts."""
    taken = set(cut)
    free = [dim for dim in range(len(size)) if dim not in taken and size[dim] >= count]
    return next((dim for dim in free if size[dim] % count == 0), free[0] if free else None)


# ---- exchanges -------------------------------------------------------------------------------------------------------

# What a plan does to activations: how they are laid out anew along one dimension of the mesh around some modules.


@attrs.frozen
class Exchange:
    """One of them: inputs or outputs of modules are to be cut otherwise along a label.

    Attributes:
        pattern: Of names of modules.
        side: Whether it is done to what goes in or to what comes out.
        label: Of the mesh; along all others a tensor stays as it lies.
        kind: "gather" brings parts together, "scatter" adds up parts of a sum where they are cut, "turn" cuts another
            dimension than before: each rank sends something to each.
        dim: Of the tensor, that is cut afterwards; `WHOLE` for none.
        must_fit: The pattern fits a module.
        of_embeddings: Only modules that are tables of rows count.
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
        """Whether it is done to a value: numbers of classes and the like are left alone."""
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > max(1, self.dim)

    def bytes_sent(self, whole: int, ranks: int) -> int:
        """Return what a rank sends in one direction for `whole` bytes; back it is as much."""
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
            raise ShapeError(f"a plan names dimensions of the mesh, {list(extent)}, got {one.label!r}")
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
    """Return what a rank sends of activations in a forward and a backward pass, by label.

    Args:
        module: Is run on tensors without data.
        exchanges: Of the plan.
        example: Its inputs, whole.
        extent: Of the mesh.
        batch: Labels that its inputs are cut along; each divides what a rank has.
        contexts: Those of them along which the sequence is.
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
    """Sees each attention of a module, and counts what a plan of contexts moves for it."""

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
    """Counts what exchanges of a forward pass, and of the backward pass after it, send."""

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
        """Count keys and values that are brought together along a label, and their gradients."""
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
                return  # modules side by side share what was brought together
            self._gathered.append((one.label, value))
        others = prod(self._extent[label] for label in self._batch if label != one.label)
        sent = one.bytes_sent(value.numel() * value.element_size() // others, self._extent[one.label])
        self.found[one.label] += sent * (2 if value.requires_grad else 1)
