"""What a plan does to a module: where its tensors lie, what a rank holds, what a step moves."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

import attrs
import torch
from torch import nn

from trimesh.tensor.protocol.placement import Placements, placements_of


@attrs.frozen
class NamedTensor:
    """A parameter or buffer as a plan sees it.

    Attributes:
        names: All of them: a shared parameter has several.
        size: Of the whole.
        is_parameter: It is no buffer.
        needs_gradient: It is trained.
        tensor: Itself.
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
    """How one parameter or buffer lies.

    Attributes:
        named: What it is.
        cuts: For each dimension of the mesh the dimension of the tensor that is cut along it, or -1.
        gathered: Labels along which it is brought together when its module runs.
        patterns: Those that fit it.
        spoken: Labels that these say something of.
        shared: Labels along which the state of its optimizer is cut, and it is not.
    """

    named: NamedTensor
    cuts: tuple[int, ...]
    gathered: tuple[str, ...]
    patterns: tuple[str, ...]
    spoken: tuple[str, ...] = ()
    shared: tuple[tuple[str, int], ...] = ()

    def state_placements(self, extent: Mapping[str, int]) -> Placements:
        """Return how the state of its optimizer lies, as `distribute` takes it."""
        shared = dict(self.shared)
        cuts = [shared.get(label, cut) for label, cut in zip(extent, self.cuts, strict=True)]
        return placements_of(cuts, [""] * len(cuts), len(self.named.size), list(extent))

    def placements(self, extent: Mapping[str, int], *, without: tuple[str, ...] = ()) -> Placements:
        """Return the same as `distribute` takes it, whole along some labels."""
        cuts = [-1 if label in without else cut for label, cut in zip(extent, self.cuts, strict=True)]
        return placements_of(cuts, [""] * len(cuts), len(self.named.size), list(extent))

    def bytes_on_rank(self, extent: Mapping[str, int], *, without: tuple[str, ...] = ()) -> int:
        """Return what the first rank holds of it, which is the most that one does."""
        size = list(self.named.size)
        for (label, count), cut in zip(extent.items(), self.cuts, strict=True):
            if cut >= 0 and label not in without:
                size[cut] = ceil(size[cut] / count)
        return prod(size) * self.named.item_bytes


@attrs.frozen
class Moved:
    """What a rank sends along one dimension of the mesh in one step, in bytes.

    Attributes:
        gathered: Parts of parameters that are brought together, once for each forward pass; where only the state of
            optimizers is shared out, once for each step of the optimizer.
        scattered: Gradients that are added up part by part, once for each backward pass; where only the state of
            optimizers is shared out, and gradients are not, once for each step of the optimizer.
        reduced: Gradients that are added up for all, once for each step of the optimizer.
        activations: What the plan lays out anew between modules, in a forward and a backward pass of the example.
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
    """What `ParallelPlan.explain` has found; `str` makes a table of it.

    Attributes:
        lying: How each parameter and buffer lies.
        extent: Sizes of the dimensions of the mesh.
        batch: Labels that inputs are cut along.
        partial: Labels that activations are cut along: what no pattern says is used on parts of them.
        activations: What the plan lays out anew between modules, by label, for the example; None without one.
    """

    lying: tuple[Lying, ...]
    extent: Mapping[str, int]
    batch: tuple[str, ...]
    partial: tuple[str, ...] = ()
    activations: Mapping[str, int] | None = None

    @property
    def bytes_on_rank(self) -> int:
        """Bytes of parameters and buffers that a rank holds, at most; AdamW keeps twice those of parameters besides."""
        return sum(one.bytes_on_rank(self.extent) for one in self.lying)

    @property
    def bytes_whole(self) -> int:
        """Bytes of parameters and buffers of the module."""
        return sum(prod(one.named.size) * one.named.item_bytes for one in self.lying)

    @property
    def moved(self) -> dict[str, Moved]:
        """What parameters and gradients move in one step, for each dimension of the mesh.

        A forward and a backward pass of each module and a step of the optimizer, by rings: to bring B bytes together
        among n ranks each sends B (n - 1) / n, to add them up for all twice that. Activations, which move along
        dimensions that linear layers are cut along, depend on the batch: of those are counted, with an example, what
        the plan lays out anew, and none that the rules of operators move.
        """
        found = {label: Moved(activations=(self.activations or {}).get(label, 0)) for label in self.extent}
        for one in self.lying:
            for label, moved in self._moved_by(one).items():
                found[label] += moved
        return found

    def _moved_by(self, one: Lying) -> dict[str, Moved]:
        """Return what one tensor moves; each module that has a shared parameter brings it together for itself."""
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
                held //= count  # along what comes after it in the mesh parts of it are added up
            elif cut < 0 and (label in self.batch or (label in self.partial and label not in one.spoken)):
                found[label] = Moved(reduced=2 * ring_bytes(held, count))
        return found

    def __str__(self) -> str:
        """Show a line for each tensor, then the sums."""
        rows = [("name", "size", "lies", "bytes on a rank", "by")]
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


# ---- what collectives send, by rings ---------------------------------------------------------------------------------


def ring_bytes(count: int, ranks: int) -> int:
    """Return the bytes that each of some ranks sends to bring `count` bytes together."""
    return count * (ranks - 1) // ranks
