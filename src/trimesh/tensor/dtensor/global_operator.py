"""The operators of torch on global tensors, on the ranks: by the table of `rules`, or on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from trimesh.tensor.dtensor.copied_view import copied_views
from trimesh.tensor.dtensor.learnt_operator import LearntOperator
from trimesh.tensor.dtensor.overlaps import check_overlap
from trimesh.tensor.rank.kernel import Kernel
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.arguments import globals_in, is_global, written_in
from trimesh.tensor.rules.draws import draw_of
from trimesh.tensor.rules.engine import engine_of

Operator = Callable[..., Any]


def operator_on_globals(name: str, operator: Operator) -> Kernel:
    schema = getattr(operator, "_schema", None)
    if schema is None:  # this process does not have it: it says so when it is called
        return Kernel(name, lambda _rank, _team, *args, **kwargs: operator(*args, **kwargs), takes_poison=False)
    draw = draw_of(operator)
    shares = [one.alias_info is not None for one in schema.arguments]
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    makes_views = any(shares) and not writes
    overlaps = schema.name == "aten::unfold"

    def compute(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        engine = engine_of(rank)
        if draw is not None:
            return draw(engine, rank, team, args, kwargs)
        return engine.run(operator, args, kwargs)

    def run(rank: Rank, team: TeamOnRank, *args: Any, **kwargs: Any) -> Any:
        views = copied_views(rank)
        if views:
            for one in globals_in((args, kwargs)):
                views.refresh(one)
        if writes:
            written = list(written_in(operator, args, kwargs).values()) if views else []
            if len(written) > 1 and isinstance(args[0], list | tuple) and views.has(globals_in((args, kwargs))):
                for at_place, named in _places(args, kwargs):
                    run(rank, team, *at_place, **named)
                return None
            check_overlap(views, operator, args, kwargs, written)
            result = compute(rank, team, *args, **kwargs)
            for one in written:
                views.written(one)
            return result
        result = compute(rank, team, *args, **kwargs)
        if makes_views and is_global(args[0]):
            view = partial(_again, rank, team, compute, args[1:], kwargs)
            views.made(args[0], list(_parts(result)), view, overlaps=overlaps)
        return result

    learnt = None if draw is not None or overlaps else LearntOperator(operator, run, makes_views)
    return Kernel(name, run, takes_poison=False, operator=operator, learnt=learnt)


def _places(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Yield the arguments of an operator on lists for each place of these.

    What is written at one place is read at the next, where that is a view of it.
    """

    def at(place: int, value: Any) -> Any:
        return value[place : place + 1] if isinstance(value, list | tuple) else value

    for place in range(len(args[0])):
        yield [at(place, one) for one in args], {name: at(place, one) for name, one in kwargs.items()}


def _again(
    rank: Rank, team: TeamOnRank, compute: Operator, rest: Sequence[Any], kwargs: dict[str, Any], base: Any
) -> list[Any]:
    """Make views of a tensor that has been written to, or of a whole one, again."""
    return list(_parts(compute(rank, team, base, *rest, **kwargs)))


def _parts(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, list | tuple) else [value]
