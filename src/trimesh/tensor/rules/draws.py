"""Random numbers of global tensors.

All ranks draw the same ones, for the whole tensor, from a generator that the team shares, and each keeps its part. So
values do not depend on how a tensor lies, and replicas are equal. It costs every rank the time and, for a moment, the
memory of the whole; torch's own way serves CUDA only, and its numbers depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from trimesh.tensor.rank.random import generator_of
from trimesh.tensor.rank.rank import Rank, TeamOnRank
from trimesh.tensor.rules.row import words

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from trimesh.tensor.rules.engine import RuleEngine

Draw = Callable[["RuleEngine", Rank, TeamOnRank, Sequence[Any], dict[str, Any]], Any]

_LIKES: Final = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}
_RANDOM: Final = frozenset(words("""
    bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial normal normal_ poisson random_
    rrelu_with_noise rrelu_with_noise_ uniform_ _sample_dirichlet _standard_gamma
"""))  # fmt: skip

aten = torch.ops.aten


def draw_of(operator: Any) -> Draw | None:
    """Return how an operator draws random numbers; None for one that draws none."""
    name = operator._schema.name.partition("::")[2]
    if name in _LIKES:
        return _like(_LIKES[name], takes_sizes=name == "randint_like")
    if name == "native_dropout":
        return _dropout
    if name not in _RANDOM:
        return _refused(operator) if torch.Tag.nondeterministic_seeded in operator.tags else None
    schema = operator._schema.arguments
    written = [place for place, one in enumerate(schema) if one.alias_info is not None and one.alias_info.is_write]
    if written == [0] and sum("Tensor" in str(one.type) for one in schema) == 1:
        return _fill(operator)

    def random(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = {**kwargs, "generator": generator_of(rank, team)}
        return engine.fall_back(operator, args, given, is_counted=False)

    return random


def _refused(operator: Any) -> Draw:
    """Each rank would draw its own numbers, and replicas differ; attention draws none without dropout."""

    def refuse(engine: RuleEngine, _rank: Rank, _team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        names = [one.name for one in operator._schema.arguments]
        name = next((one for one in ("dropout_p", "dropout") if one in names), None)
        at = -1 if name is None else names.index(name)
        if name is not None and not (args[at] if at < len(args) else kwargs.get(name, 0)):
            return engine.run(operator, args, kwargs)
        raise NotImplementedError(
            f"{operator.name()} draws random numbers that the ranks cannot share, so it does not take global tensors: "
            "write it by operators that take a generator, or in a function under @trimesh.remote"
        )

    return refuse


def _fill(operator: Callable[..., Any]) -> Draw:
    def fill(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
        target: DTensor = args[0]
        engine.settle(target)
        _drawn(engine, operator, generator_of(rank, team), target, *args[1:], **kwargs)
        return target

    return fill


def _drawn(
    engine: RuleEngine,
    operator: Callable[..., Any],
    generator: torch.Generator,
    target: DTensor,
    *args: Any,
    **kwargs: Any,
) -> None:
    local = target._local_tensor
    kwargs.pop("generator", None)
    if local.size() == target.size():  # each rank has all of it
        operator(local, *args, **kwargs, generator=generator)
        return
    values = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=local.device)
    operator(values, *args, **kwargs, generator=generator)
    engine.write(target, values)


def _like(filler: str, *, takes_sizes: bool) -> Draw:
    def like(engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> DTensor:
        value, *bounds = args
        if takes_sizes and len(bounds) == 1:
            bounds = [0, *bounds]
        made: DTensor = engine.run(aten.empty_like.default, (value,), kwargs)
        # The overload is torch's to choose: `random_` has one for each number of bounds.
        _drawn(
            engine,
            lambda local, *given, **rest: getattr(local, filler)(*given, **rest),
            generator_of(rank, team),
            made,
            *bounds,
        )
        return made

    return like


def _dropout(
    engine: RuleEngine, rank: Rank, team: TeamOnRank, args: Sequence[Any], _: dict[str, Any]
) -> Sequence[DTensor]:
    value, p, train = args
    if train is False:
        ones = engine.run(aten.ones_like.default, (value,), {"dtype": torch.bool})
        return engine.run(aten.clone.default, (value,), {}), ones
    mask = engine.run(aten.empty_like.default, (value,), {"dtype": torch.bool})
    _drawn(engine, aten.bernoulli_.float, generator_of(rank, team), mask, 1 - p)
    kept = engine.run(aten.mul.Tensor, (value, mask), {})
    return engine.run(aten.mul.Tensor, (kept, 0.0 if p == 1 else 1 / (1 - p)), {}), mask
