"""Views of global tensors that torch could only make by copying, and that are to be views all the same.

A row of a tensor that is cut by rows lies on one rank; torch gathers it, so that what is written to it would never
reach the tensor, nor the other way round. Here a write to such a view is copied back, and one to the tensor makes the
view again before it is read next. Every rank knows the same of each, so all of them take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils.weak import WeakIdKeyDictionary

from trimesh.tensor.rank.kernel import memory_of
from trimesh.tensor.rank.rank import Rank
from trimesh.tensor.rules.engine import RuleEngine, engine_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@attrs.define(eq=False)
class _Copied:
    """One such view.

    Attributes:
        base: What it is a view of.
        view: Makes it of `base`, or of a whole tensor with the same values.
        is_stale: Whether `base` has been written to since.
    """

    base: DTensor
    view: Callable[[Any], Any]
    is_stale: bool = False


@attrs.define(eq=False)
class CopiedViews:
    """All of one rank."""

    _engine: RuleEngine
    _found: Any = attrs.field(factory=WeakIdKeyDictionary)

    def __bool__(self) -> bool:
        return len(self._found) > 0

    def has(self, tensors: Iterable[DTensor]) -> bool:
        return any(one in self._found for one in tensors)

    def made(
        self, base: DTensor, results: Sequence[Any], view: Callable[[Any], Sequence[Any]], *, overlaps: bool = False
    ) -> None:
        """Learn what an operator that makes views has made.

        Args:
            base: What they are views of.
            results: The views.
            view: Makes them of `base`, or of a whole tensor with the same values.
            overlaps: Whether places of a view may be the same place of memory: nothing could be written to all of it.
        """
        for index, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                continue
            if overlaps or memory_of(result) != memory_of(base) or base in self._found:
                self._found[result] = _Copied(base, partial(_at, view, index))

    def copies_of(self, tensor: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return what a tensor is a view of in the end, or that itself, and all such views of it."""
        base = self._base_of(tensor)
        memory = memory_of(base)
        return base, [one for one in list(self._found) if memory_of(self._base_of(one)) == memory]

    def _base_of(self, tensor: DTensor) -> DTensor:
        return self._views_to(tensor)[0]

    def share(self, one: DTensor, other: DTensor) -> bool:
        """Whether two tensors are views of one in the end, or of two that are the same memory from end to end."""
        return _memory(self._base_of(one)) == _memory(self._base_of(other))

    def laid_out_as(self, tensors: Iterable[DTensor], device: torch.device) -> list[torch.Tensor]:
        """Return plain tensors of zeros that lie as global ones do in one process: on one memory where these do."""
        whole: dict[Any, torch.Tensor] = {}
        found: list[torch.Tensor] = []
        for tensor in tensors:
            base, views = self._views_to(tensor)
            memory = whole.get(key := _memory(base))
            if memory is None:
                memory = whole[key] = torch.empty_strided(base.size(), base.stride(), dtype=base.dtype, device=device)
                memory.zero_()
            plain = memory.as_strided(base.size(), base.stride())
            for view in reversed(views):
                plain = view(plain)
            found.append(plain)
        return found

    def _views_to(self, tensor: DTensor) -> tuple[DTensor, list[Callable[[Any], Any]]]:
        """Return what a tensor is a view of in the end, and what makes it of that, the last one first."""
        views = list[Callable[[Any], Any]]()
        while (copied := self._found.get(tensor)) is not None:
            views.append(copied.view)
            tensor = copied.base
        return tensor, views

    def refresh(self, tensor: DTensor) -> None:
        """Let a tensor that is about to be read be what it is a view of."""
        copied = self._found.get(tensor)
        if copied is None:
            return
        self.refresh(copied.base)
        if copied.is_stale:
            again = copied.view(copied.base)
            tensor._local_tensor, tensor._spec = again._local_tensor, again._spec
            copied.is_stale = False

    def written(self, tensor: DTensor) -> None:
        """Carry a write to all that the tensor is a view of, and to what are views of these."""
        memory = memory_of(tensor)
        for other, copied in list(self._found.items()):
            if other is not tensor and memory_of(copied.base) == memory:
                self._forget(other, copied)
        own = self._found.get(tensor)
        if own is None:
            return
        base, views = self._views_to(tensor)
        engine = self._engine
        engine.settle(base)
        # All views are made of one memory, so that places of them that are one place of it are written to at once.
        once = _once(engine.whole(base), base).clone(memory_format=torch.preserve_format)
        target = once.expand(base.size())
        for view in reversed(views):
            target = view(target)
        place, value = _once(target, tensor), _once(engine.whole(tensor), tensor)
        overlaps = _overlaps(place)
        if overlaps:  # what was not written may be a place that was, and is there now what it was before
            changed = _changed(place, value)
            place[changed] = value[changed]
        else:
            place.copy_(value)
        engine.write(base, once.expand(base.size()))
        self.written(base)
        own.is_stale = overlaps

    def _forget(self, tensor: DTensor, copied: _Copied) -> None:
        copied.is_stale = True
        for other, further in list(self._found.items()):
            if (
                further.base is tensor
            ):  # also of one that was stale: what is a view of it may have been written to since
                self._forget(other, further)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor take each place of some memory once."""
    expected = 1
    for stride, size in _steps(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may be one place of its memory."""
    end = 0
    for stride, size in _steps(tensor):
        if stride <= end:
            return True
        end += (size - 1) * stride
    return False


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return stride and size of each dimension of more than one place, the smallest stride first."""
    return sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)


def _changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return where two tensors are not the same, bit by bit: NaN is the same as itself, and 0 not as -0."""
    was, now = (one.contiguous().unsqueeze(-1).view(torch.uint8) for one in (before, after))
    return (was != now).any(-1)


def _memory(base: torch.Tensor) -> tuple[object, int]:
    """Return what is the same of two global tensors that are one memory from end to end."""
    return (memory_of(base) if is_dense(base) else id(base)), base.numel()


def _once(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a part of a tensor in which each place of the memory of another one, which was expanded, is once."""
    for dim, (size, stride) in enumerate(zip(like.size(), like.stride(), strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(dim, 0, min(1, value.size(dim)))
    return value


def _at(view: Callable[[Any], Sequence[Any]], index: int, base: Any) -> Any:
    return view(base)[index]


def copied_views(rank: Rank) -> CopiedViews:
    found = rank.above.get(CopiedViews)
    if found is None:
        found = rank.above[CopiedViews] = CopiedViews(engine_of(rank))
        rank.copies_of = found.copies_of
    assert isinstance(found, CopiedViews)
    return found


def has_copied_views(rank: Rank) -> bool:
    return bool(rank.above.get(CopiedViews))
