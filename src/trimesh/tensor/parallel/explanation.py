"""Explanation of a parallel plan: placement of each tensor, memory of a rank, communication volume of a step."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

import attrs
import torch
from torch import nn

from trimesh.tensor.protocol.placement import Placements, placements_of


@attrs.frozen
class NamedTensor:
    """A parameter or buffer of a module.

    Attributes:
        names: Qualified names in the module; a shared (tied) parameter has several.
        size: Shape of the whole tensor.
        is_parameter: False for a buffer.
        needs_gradient: Its `requires_grad`.
        tensor: The tensor itself.
    """

    names: tuple[str, ...]
    size: tuple[int, ...]
    is_parameter: bool
    needs_gradient: bool
    tensor: torch.Tensor = attrs.field(repr=False, eq=False)

    @property
    def item_bytes(self) -> int:
        return self.tensor.dtype.itemsize


def named_tensors(module: nn.Module) -> list[NamedTensor]:
    """Return each parameter, then each buffer, of a module."""
    names: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    return [
        NamedTensor(
            tuple(names[id(tensor)]),
            tuple(tensor.size()),
            isinstance(tensor, nn.Parameter),
            tensor.requires_grad,
            tensor,
        )
        for tensor in (*module.parameters(), *module.buffers())
    ]


# ---- explanation -----------------------------------------------------------------------------------------------------


@attrs.frozen
class Lying:
    """Placement of one parameter or buffer by a plan.

    Attributes:
        named: The parameter or buffer.
        cuts: For each dimension of the mesh, the tensor dimension sharded along it, or -1 if it is replicated.
        gathered: Labels along which `fully_sharded` shards it: it is all-gathered when its module runs.
        patterns: Patterns of the plan that match its names.
        spoken: Labels along which these patterns give a placement, even a replicated one.
        shared: Labels along which only the state of its optimizer is sharded, each with the tensor dimension.
    """

    named: NamedTensor
    cuts: tuple[int, ...]
    gathered: tuple[str, ...]
    patterns: tuple[str, ...]
    spoken: tuple[str, ...] = ()
    shared: tuple[tuple[str, int], ...] = ()

    def state_placements(self, extent: Mapping[str, int]) -> Placements:
        """Return the placements of its optimizer's state, in the form that `distribute` accepts."""
        shared = dict(self.shared)
        cuts = [shared.get(label, cut) for label, cut in zip(extent, self.cuts, strict=True)]
        return placements_of(cuts, [""] * len(cuts), len(self.named.size), list(extent))

    def placements(self, extent: Mapping[str, int], *, without: tuple[str, ...] = ()) -> Placements:
        """Return its placements in the form that `distribute` accepts, replicated along the labels `without`."""
        cuts = [-1 if label in without else cut for label, cut in zip(extent, self.cuts, strict=True)]
        return placements_of(cuts, [""] * len(cuts), len(self.named.size), list(extent))

    def bytes_on_rank(self, extent: Mapping[str, int], *, without: tuple[str, ...] = ()) -> int:
        """Return the bytes of its shard on rank 0, the largest shard; unsharded along the labels `without`."""
        size = list(self.named.size)
        for (label, count), cut in zip(extent.items(), self.cuts, strict=True):
            if cut >= 0 and label not in without:
                size[cut] = ceil(size[cut] / count)
        return prod(size) * self.named.item_bytes


@attrs.frozen
class Moved:
    """Bytes that a rank sends along one dimension of the mesh in one step.

    Attributes:
        gathered: All-gathers of parameters, once for each forward pass; once for each optimizer step where only the
            state of optimizers is sharded.
        scattered: Reduce-scatters of gradients, once for each backward pass; once for each optimizer step where the
            state of optimizers is sharded and gradients are not.
        reduced: All-reduces of gradients, once for each optimizer step.
        activations: Activations that the plan reshards, in a forward and a backward pass over the example.
    """

    gathered: int = 0
    scattered: int = 0
    reduced: int = 0
    activations: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.gathered + other.gathered,
            self.scattered + other.scattered,
            self.reduced + other.reduced,
            self.activations + other.activations,
        )

    @property
    def all(self) -> int:
        return self.gathered + self.scattered + self.reduced + self.activations


@attrs.frozen
class Explanation:
    """Result of `ParallelPlan.explain`; `str` formats it as a table.

    Attributes:
        lying: Placement of each parameter and buffer.
        extent: Sizes of the dimensions of the mesh.
        batch: Labels along which inputs are sharded.
        partial: Labels along which activations are sharded. Gradients of replicated parameters are all-reduced along
            them, unless a pattern gives the parameter a placement along that label.
        activations: Bytes of activations that the plan reshards, by label, for the example; None without one.
    """

    lying: tuple[Lying, ...]
    extent: Mapping[str, int]
    batch: tuple[str, ...]
    partial: tuple[str, ...] = ()
    activations: Mapping[str, int] | None = None

    @property
    def bytes_on_rank(self) -> int:
        """Maximum bytes of parameters and buffers of a rank; AdamW keeps twice the bytes of parameters in addition."""
        return sum(one.bytes_on_rank(self.extent) for one in self.lying)

    @property
    def bytes_whole(self) -> int:
        """Bytes of all parameters and buffers of the unsharded module."""
        return sum(prod(one.named.size) * one.named.item_bytes for one in self.lying)

    @property
    def moved(self) -> dict[str, Moved]:
        """Bytes that parameters and gradients move in one step, for each dimension of the mesh.

        A step is a forward and a backward pass of each module, then an optimizer step. Collectives count as rings: in
        an all-gather of B bytes among n ranks, each rank sends B (n - 1) / n; in an all-reduce, twice that. Activations
        depend on the batch. With an example, those that the plan reshards are counted, not those that operator rules
        reshard.
        """
        found = {label: Moved(activations=(self.activations or {}).get(label, 0)) for label in self.extent}
        for one in self.lying:
            for label, moved in self._moved_by(one).items():
                found[label] += moved
        return found

    def _moved_by(self, one: Lying) -> dict[str, Moved]:
        """Return the bytes that one tensor moves, by label. Each module gathers a shared parameter separately."""
        if not one.named.is_parameter:
            return {}
        found: dict[str, Moved] = {}
        held = one.bytes_on_rank(self.extent)
        for label in one.gathered:
            held *= self.extent[label]
            found[label] = Moved(gathered=ring_bytes(held, self.extent[label]) * len(one.named.names))
        if not one.named.needs_gradient:
            return found
        shared = dict(one.shared)
        for (label, count), cut in zip(self.extent.items(), one.cuts, strict=True):
            if label in one.gathered:
                found[label] += Moved(scattered=ring_bytes(held, count) * len(one.named.names))
                held //= count
            elif label in shared:
                found[label] = Moved(gathered=ring_bytes(held, count), scattered=ring_bytes(held, count))
                held //= count  # along later mesh dimensions only the shard is reduced
            elif cut < 0 and (label in self.batch or (label in self.partial and label not in one.spoken)):
                found[label] = Moved(reduced=2 * ring_bytes(held, count))
        return found

    def __str__(self) -> str:
        """Format a line for each tensor, then the totals."""
        rows = [("name", "size", "placements", "bytes on a rank", "by")]
        for one in self.lying:
            by = [*one.patterns, *(f"fully sharded along {label!r}" for label in one.gathered)]
            by += [f"its optimizer's state cut along {label!r}" for label, _ in one.shared]
            rows.append(
                (
                    " = ".join(one.named.names),
                    str(one.named.size),
                    str(list(one.placements(self.extent))),
                    f"{one.bytes_on_rank(self.extent):,}",
                    ", ".join(by),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[4]]).rstrip() for row in rows]
        lines.append(f"a rank holds {self.bytes_on_rank:,} bytes of {self.bytes_whole:,}")
        for label, moved in self.moved.items():
            lines.append(
                f"along {label!r} ({self.extent[label]} ranks) a step sends {moved.gathered:,} bytes of parameters, "
                f"{moved.scattered:,} of gradients in parts, {moved.reduced:,} of whole gradients, by each rank"
                + (f", and {moved.activations:,} of activations" if self.activations is not None else "")
            )
        if self.activations is None:
            lines.append("activations are not counted")
        return "\n".join(lines)


# ---- traffic of ring collectives -------------------------------------------------------------------------------------


def ring_bytes(count: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a ring all-gather of `count` bytes."""
    return count * (ranks - 1) // ranks
