"""Copied views: views of global tensors that torch can only make by copying, kept consistent with their base.

Example: one row of a tensor that is cut by rows. Torch gathers the row from its rank, so a write to the row would not
reach the tensor, nor the other way round. Here a write to such a view is copied back to its base. A write to the base
makes the view stale, and it is made again before its next read. All ranks have the same records, so all take part.
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
    """One copied view.

    Attributes:
        base: The tensor that it is a view of.
        view: Makes the view from `base`, or from a whole tensor with the same values.
        is_stale: Whether `base` has been written to since.
    """

    base: DTensor
    view: Callable[[Any], Any]
    is_stale: bool = False


@attrs.define(eq=False)
class CopiedViews:
    """All copied views of one rank."""

    _engine: RuleEngine
    _found: Any = attrs.field(factory=WeakIdKeyDictionary)

    def __bool__(self) -> bool:
        return len(self._found) > 0

    def has(self, tensors: Iterable[DTensor]) -> bool:
        return any(one in self._found for one in tensors)

    def made(
        self, base: DTensor, results: Sequence[Any], view: Callable[[Any], Sequence[Any]], *, overlaps: bool = False
    ) -> None:
        """Record the results of a view operator, if they are copies.

        Args:
            base: The tensor that they are views of.
            results: The views.
            view: Makes them from `base`, or from a whole tensor with the same values.
            overlaps: Whether elements of a view may share memory, so that they cannot all be written.
        """
        for index, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                continue
            if overlaps or memory_of(result) != memory_of(base) or base in self._found:
                self._found[result] = _Copied(base, partial(_at, view, index))

    def copies_of(self, tensor: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the root base of a tensor (itself if it is no copied view), and all copied views on its memory."""
        base = self._base_of(tensor)
        memory = memory_of(base)
        return base, [one for one in list(self._found) if memory_of(self._base_of(one)) == memory]

    def _base_of(self, tensor: DTensor) -> DTensor:
        return self._views_to(tensor)[0]

    def share(self, one: DTensor, other: DTensor) -> bool:
        """Return whether two tensors have one root base, or root bases over exactly the same memory."""
        return _memory(self._base_of(one)) == _memory(self._base_of(other))

    def laid_out_as(self, tensors: Iterable[DTensor], device: torch.device) -> list[torch.Tensor]:
        """Return plain zero tensors with the strides and memory sharing that global ones would have in one process."""
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
        """Return the root base of a tensor, and the functions that make the tensor from it, the last one first."""
        views = list[Callable[[Any], Any]]()
        while (copied := self._found.get(tensor)) is not None:
            views.append(copied.view)
            tensor = copied.base
        return tensor, views

    def refresh(self, tensor: DTensor) -> None:
        """Update a stale view from its base, before it is read."""
        copied = self._found.get(tensor)
        if copied is None:
            return
        self.refresh(copied.base)
        if copied.is_stale:
            again = copied.view(copied.base)
            tensor._local_tensor, tensor._spec = again._local_tensor, again._spec
            copied.is_stale = False

    def written(self, tensor: DTensor) -> None:
        """Propagate a write: copy it back to the bases of a view, and mark other views of them stale."""
        memory = memory_of(tensor)
        for other, copied in list(self._found.items()):
            if other is not tensor and memory_of(copied.base) == memory:
                self._forget(other, copied)
        own = self._found.get(tensor)
        if own is None:
            return
        base, views = self._views_to(tensor)
        engine = self._engine
        # Apply all views to one memory, so that elements that share a place in it are written together.
        once = _once(engine.whole(base), base).clone(memory_format=torch.preserve_format)
        target = once.expand(base.size())
        for view in reversed(views):
            target = view(target)
        place, value = _once(target, tensor), _once(engine.whole(tensor), tensor)
        overlaps = _overlaps(place)
        if overlaps:  # an unwritten element may share memory with a written one, and still have the former value
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
            if further.base is tensor:  # stale ones, too: views of them may have been written to since
                self._forget(other, further)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor fill a range of memory, without gaps or overlaps."""
    expected = 1
    for stride, size in _steps(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor may share memory."""
    end = 0
    for stride, size in _steps(tensor):
        if stride <= end:
            return True
        end += (size - 1) * stride
    return False


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return stride and size of each dimension longer than 1, the smallest stride first."""
    return sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)


def _changed(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the mask of elements that differ in any bit: NaN equals itself, 0 differs from -0."""
    was, now = (one.contiguous().unsqueeze(-1).view(torch.uint8) for one in (before, after))
    return (was != now).any(-1)


def _memory(base: torch.Tensor) -> tuple[object, int]:
    """Return a key that is equal for global tensors over exactly the same memory."""
    return (memory_of(base) if is_dense(base) else id(base)), base.numel()


def _once(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Narrow a tensor along the expanded dimensions of `like`, so that each place of its memory occurs once."""
    for dim, stride in enumerate(like.stride()):
        if stride == 0:
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
