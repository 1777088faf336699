"""The places of a line of the table of operations, filled with operands of fitting size, dtype and values."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from tests.tensor.judge.interpreter import Run
from tests.tensor.judge.placements import draw_layout
from tests.tensor.judge.program import Extent, Input
from torch.utils import _pytree as pytree

NUMEL_MOST: Final = 400
"""Elements of a result, that a program stays quick."""

PLACE: Final = re.compile(r"\{(\w+?)(\d*)\}")

FLOATS: Final = ("float64", "float64", "float64", "float32", "float32", "bfloat16")


class Unfit(Exception):
    """There is no operand for a place."""


class Operands:
    """What a program has so far, from which places are filled.

    Attributes:
        run: The plain run, in which all steps so far were run.
        inputs: All inputs; filling a place may add one.
        added: Those that the line at hand has added.
    """

    def __init__(self, drawn: random.Random, extent: Extent, run: Run, inputs: list[Input], dtype: str) -> None:
        self._drawn = drawn
        self._extent = extent
        self._dtype = dtype
        self._base: torch.Tensor | None = None
        self._dim = 0
        self._filled: dict[str, str] = {}
        self.run = run
        self.inputs = inputs
        self.added: list[Input] = []

    def fill(self, line: str) -> str:
        """Return the code of a line.

        Raises:
            Unfit: The program has nothing that fits.
        """
        self._base = None
        self._filled = {}
        self.added = []
        return PLACE.sub(self._place, line)

    def _place(self, found: re.Match[str]) -> str:
        text = found[0]
        if text not in self._filled:
            way: Callable[[], str] | None = getattr(self, f"_fill_{found[1]}", None)
            if way is None:
                raise ValueError(f"no such place: {text}")
            self._filled[text] = way()
        return self._filled[text]

    # ---- tensors ------------------------------------------------------------------------------------------------

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Return all tensors of the program by the expression for them; late ones twice, so that chains get long."""
        found = []
        for name, value in self.run.names.items():
            if re.fullmatch(r"[vx]\d+", name):
                for path, leaf in pytree.tree_leaves_with_path(value):
                    if isinstance(leaf, torch.Tensor):
                        found.append((name + pytree.keystr(path), leaf))
        return found + found[-3:]

    def _choose(self, fits: Callable[[torch.Tensor], bool]) -> str:
        found = [one for one in self.tensors() if fits(one[1])]
        if not found:
            raise Unfit
        text, value = self._drawn.choice(found)
        if self._base is None:
            self._base = value
        return text

    def new_input(self, shape: tuple[int, ...], dtype: str, kind: str, *, bound: int = 1, grad: bool = False) -> str:
        """Add an input; return its name."""
        drawn = self._drawn
        one = Input(
            name=f"x{len(self.inputs)}",
            shape=shape,
            dtype=dtype,
            kind=kind,
            seed=drawn.randrange(10_000),
            layout=draw_layout(drawn, shape, self._extent, dtype),
            needs_grad=grad and dtype.startswith(("float", "bfloat")),
            bound=bound,
        )
        self.inputs.append(one)
        self.added.append(one)
        self.run.add(one)  # type: ignore[attr-defined]
        return one.name

    def _needed(self) -> torch.Tensor:
        if self._base is None:
            raise Unfit
        return self._base

    def _fill_x(self) -> str:
        return self._choose(lambda one: one.numel() <= NUMEL_MOST)

    def _fill_f(self) -> str:
        return self._choose(lambda one: one.is_floating_point())

    def _fill_n(self) -> str:
        return self._choose(lambda one: one.dtype != torch.bool)

    def _fill_i(self) -> str:
        return self._choose(lambda one: one.dtype == torch.int64)

    def _fill_b(self) -> str:
        return self._choose(lambda one: one.dtype == torch.bool)

    def _fill_v(self) -> str:
        return self._choose(lambda one: one.is_floating_point() and one.ndim == 1)

    def _fill_m(self) -> str:
        return self._choose(lambda one: one.is_floating_point() and one.ndim == 2)

    def _fill_q(self) -> str:
        return self._choose(lambda one: one.is_floating_point() and one.ndim == 3)

    def _fill_z(self) -> str:
        return self._choose(lambda one: one.is_floating_point() and one.ndim == 0)

    def _fill_a(self) -> str:
        """Of one dimension at least."""
        return self._choose(lambda one: one.ndim > 0)

    def _fill_held(self) -> str:
        """Of one element at least."""
        return self._choose(lambda one: one.is_floating_point() and one.ndim > 0 and one.numel() > 0)

    def _fill_product(self) -> str:
        """Whose product has one gradient: torch's formula for its subclasses gives other ones of NaN and infinity."""
        return self._choose(
            lambda one: one.dtype != torch.bool and not (one.requires_grad and not bool(one.isfinite().all()))
        )

    def _fill_g(self) -> str:
        """Of which there is a gradient."""
        return self._choose(lambda one: one.is_floating_point() and one.requires_grad)

    def _fill_leaf(self) -> str:
        found = [one.name for one in self.inputs if one.needs_grad]
        if not found:
            raise Unfit
        text = self._drawn.choice(found)
        if self._base is None:
            self._base = self.run.names[text]
        return text

    def _fill_w(self) -> str:
        """One that may be written to."""
        return self._choose(
            lambda one: (
                one.is_floating_point()
                and one.ndim > 0
                and not (one.requires_grad and (one.is_leaf or one._is_view()))
                and all(one.stride(dim) or one.size(dim) < 2 for dim in range(one.ndim))
            )
        )

    def _fill_free(self) -> str:
        """One that may be written to where autograd does not see it."""
        return self._choose(
            lambda one: one.is_floating_point() and one.ndim > 0 and not one.requires_grad and one.is_contiguous()
        )

    def _fill_label(self) -> str:
        """A dimension of the mesh."""
        return repr(self._drawn.choice([label for label, _ in self._extent]))

    def _fill_cuts(self) -> str:
        """How the first is to lie."""
        base = self._needed()
        cuts: list[tuple[str, ...]] = [() for _ in range(base.ndim)]
        for label, _ in self._extent:
            if cuts and self._drawn.random() < 0.7:
                cuts[self._drawn.randrange(base.ndim)] += (label,)
        return repr([one or None for one in cuts])

    def _fill_y(self) -> str:
        """One that broadcasts with the first; mostly of its dtype."""
        base, mixed = self._needed(), self._drawn.random() < 0.15
        return self._choose(
            lambda one: (mixed or one.dtype == base.dtype) and _broadcast(one.shape, base.shape, NUMEL_MOST)
        )

    def _fill_into(self) -> str:
        """One that is expanded to the size of the first."""
        base = self._needed()
        return self._choose(
            lambda one: one.dtype == base.dtype and _broadcast(one.shape, base.shape, max(1, base.numel()), base.shape)
        )

    def _fill_same(self) -> str:
        base = self._needed()
        if self._drawn.random() < 0.2 and base.is_floating_point():
            return self.new_input(tuple(base.shape), str(base.dtype)[6:], "quarters")
        return self._choose(lambda one: one.shape == base.shape and one.dtype == base.dtype)

    def _fill_mask(self) -> str:
        """A truth value for each place of the first."""
        base = self._needed()
        if self._drawn.random() < 0.5:
            return self.new_input(tuple(base.shape), "bool", "quarters")
        found = [one for one, value in self.tensors() if value.shape == base.shape]
        return f"({self._drawn.choice(found)} > 0)" if found else self._choose(lambda one: one.dtype == torch.bool)

    def _fill_rowmask(self) -> str:
        base = self._needed()
        if base.ndim == 0:
            raise Unfit
        return self.new_input((base.shape[0],), "bool", "quarters")

    def _fill_right(self) -> str:
        """A matrix to be multiplied with the first from the right."""
        base = self._needed()
        found = [
            text for text, one in self.tensors()
            if one.ndim == 2 and one.dtype == base.dtype and one.shape[0] == base.shape[-1]
        ]  # fmt: skip
        if found and self._drawn.random() < 0.6:
            return self._drawn.choice(found)
        return self.new_input((base.shape[-1], self._drawn.randint(1, 5)), str(base.dtype)[6:], "quarters", grad=True)

    def _weights(self, *shape: int, kind: str = "quarters") -> str:
        base = self._needed()
        dtype = str(base.dtype)[6:] if base.is_floating_point() else self._dtype
        return self.new_input(shape, dtype, kind, grad=self._drawn.random() < 0.6)

    def _fill_linear(self) -> str:
        return self._weights(self._drawn.randint(1, 6), self._needed().shape[-1])

    def _fill_last(self) -> str:
        """A vector as long as the last dimension."""
        return self._weights(self._needed().shape[-1], kind="positive")

    def _fill_filters(self) -> str:
        return self._weights(self._drawn.randint(1, 4), self._needed().shape[1], 2)

    def _fill_table(self) -> str:
        """A table of embeddings for the first, whose numbers are rows of it."""
        base = self._needed()
        top = int(base.max()) + 1 if base.numel() else 1
        if top > 40 or (base.numel() and int(base.min()) < 0):
            raise Unfit
        return self._weights(top + self._drawn.randint(0, 3), self._drawn.randint(1, 5))

    def _fill_classes(self) -> str:
        """A class for each row of the first."""
        base = self._needed()
        return self.new_input((base.shape[0],), "int64", "index", bound=base.shape[1])

    # ---- numbers ------------------------------------------------------------------------------------------------

    def _fill_s(self) -> str:
        """A number: of Python, of any kind, or a tensor without dimensions."""
        found = [text for text, one in self.tensors() if one.ndim == 0]
        if found and self._drawn.random() < 0.4:
            return self._drawn.choice(found)
        return self._drawn.choice(("2", "3", "-1", "0", "1", "2.0", "0.5", "-1.5", "0.25", "True", "inf", "1.0"))

    def _fill_num(self) -> str:
        return self._drawn.choice(("0.5", "2.0", "-0.25", "1", "3", "0.0"))

    def _fill_k(self) -> str:
        return self._drawn.choice(("True", "False"))

    def _fill_dtype(self) -> str:
        return "torch." + self._drawn.choice(("float64", "float32", "bfloat16", "int64", "int32", "bool", "uint8"))

    # ---- dimensions and places ----------------------------------------------------------------------------------

    def _fill_d(self) -> str:
        ndim = max(1, self._needed().ndim)
        at = self._drawn.randrange(-ndim, ndim)
        if self._drawn.random() < 0.01:
            at = ndim  # out of range: an error there, too
        self._dim = at
        return str(at)

    def _fill_ds(self) -> str:
        """One dimension, or several."""
        ndim = self._needed().ndim
        if ndim < 2 or self._drawn.random() < 0.5:
            return self._fill_d()
        dims = self._drawn.sample(range(ndim), self._drawn.randint(1, ndim))
        return str(tuple(dim - ndim if self._drawn.random() < 0.4 else dim for dim in dims))

    def _length(self) -> int:
        base = self._needed()
        return base.shape[self._dim] if base.ndim and -base.ndim <= self._dim < base.ndim else 1

    def _fill_e(self) -> str:
        """A place along the dimension."""
        length = self._length()
        if length == 0 or self._drawn.random() < 0.01:
            return str(length)  # out of range
        return str(self._drawn.randrange(-length, length))

    def _fill_c(self) -> str:
        """A count of at most the length of the dimension."""
        return str(self._drawn.randint(0 if self._drawn.random() < 0.1 else 1, max(1, self._length())))

    def _fill_slice(self) -> str:
        """An index of slices, places and dimensions."""
        base = self._needed()
        parts = []
        for size in base.shape[: self._drawn.randint(0, base.ndim)]:
            way = self._drawn.random()
            if way < 0.35 and size:
                parts.append(str(self._drawn.randrange(-size, size)))
            elif way < 0.8:
                low = self._drawn.choice(("", "1", "-2"))
                parts.append(
                    f"{low}:{self._drawn.choice(('', '', '-1', '3'))}{self._drawn.choice(('', '', '::2'[1:]))}"
                )
            else:
                parts.append(":")
        if self._drawn.random() < 0.3:
            parts.append("...")
        if self._drawn.random() < 0.15:
            parts.insert(0, "None")
        return ", ".join(parts) or "..."

    def _fill_ix(self) -> str:
        """Places along the dimension: a vector."""
        length = self._length()
        if length == 0:
            raise Unfit
        bound = length + 2 if self._drawn.random() < 0.02 else length
        return self.new_input((self._drawn.randint(1, 4),), "int64", "index", bound=bound)

    def _fill_one(self) -> str:
        """One place along the dimension: a vector of one."""
        if self._length() == 0:
            raise Unfit
        return self.new_input((1,), "int64", "index", bound=self._length())

    def _fill_gx(self) -> str:
        """Places along the dimension for each place of a part of the first."""
        base, length = self._needed(), self._length()
        if length == 0 or base.ndim == 0:
            raise Unfit
        dim = self._dim % base.ndim
        shape = [
            self._drawn.randint(1, 4) if at == dim else self._drawn.choice((size, size, max(1, size - 1)))
            for at, size in enumerate(base.shape)
        ]
        if min(shape) == 0 or any(shape[at] > size for at, size in enumerate(base.shape) if at != dim):
            raise Unfit
        shape[dim] = min(shape[dim], length) if self._drawn.random() < 0.7 else shape[dim]
        return self.new_input(tuple(shape), "int64", "index", bound=length)

    def _fill_like(self) -> str:
        """Numbers of the size of the last index, to be scattered."""
        return self._weights(*self.added[-1].shape)

    def _fill_shape(self) -> str:
        """Another size of as many elements."""
        base = self._needed()
        left, made = base.numel(), []
        if left == 0:
            return str(tuple(base.shape))
        for _ in range(self._drawn.randint(0, 2)):
            made.append(self._drawn.choice([size for size in range(1, left + 1) if left % size == 0]))
            left //= made[-1]
        if made and self._drawn.random() < 0.5 and math.prod(made):
            return str((*made, -1))
        return str((*made, left))

    def _fill_perm(self) -> str:
        dims = list(range(self._needed().ndim))
        self._drawn.shuffle(dims)
        return str(tuple(dims))

    def _fill_bigger(self) -> str:
        """A size that the first is expanded to."""
        base = self._needed()
        return str(
            (self._drawn.randint(1, 3), *(size if size != 1 else self._drawn.randint(1, 3) for size in base.shape))
        )


def _broadcast(one: Any, other: Any, most: int, wanted: Any = None) -> bool:
    try:
        shape = torch.broadcast_shapes(one, other)
    except RuntimeError:
        return False
    return math.prod(shape) <= most and (wanted is None or shape == wanted)
