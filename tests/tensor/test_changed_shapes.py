"""Gradients of views whose base, or which themselves, were changed in shape in place: torch's, or refused in words."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is an extra")


import trimesh  # noqa: E402 - after the skip
from trimesh import this_host  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.real]

CHANGES: dict[str, Any] = {
    "t_": lambda t: t.t_(),
    "t_ twice": lambda t: t.t_().t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "as_strided_": lambda t: t.as_strided_((2, 2), (1, 3), 1),
    "data": lambda t: setattr(t, "data", t.detach().t()),
}
VIEWS: dict[str, Any] = {
    "row": lambda b: b[0],
    "turned": lambda b: b.t(),
    "row of rows": lambda b: b[1:][0],
}
LATER: dict[str, Any] = {
    "nothing": lambda _b, _v: None,
    "a write to the view": lambda _b, v: v.mul_(3),
    "a write to the base": lambda b, _v: b.mul_(3),
}
REFUSED = "gradients follow a view only|view size is not compatible|expects a tensor with|out of (bounds|range)"


def gradient(x: Any, change: Any, view: Any, later: Any, changed: str, learns: bool) -> Any:
    base = x * 1
    viewed = view(base)
    with torch.set_grad_enabled(learns):
        change(base if changed == "base" else viewed)
    later(base, viewed)
    loss = (viewed * viewed.detach()).sum() * 2 + (base * base.detach()).sum()  # other weights for each place
    return torch.autograd.grad(loss, x)[0]


def attempt(*case: Any) -> Any:
    try:
        return gradient(*case)
    except (RuntimeError, IndexError) as error:
        return error


async def test_gradients_of_views_of_what_changed_its_shape_are_those_of_torch_or_refused() -> None:
    whole = torch.arange(9.0).reshape(3, 3) + 1
    outcomes: Counter[str] = Counter()
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        with procs.activate():
            of_each_rank = torch.tensor(whole.tolist()).requires_grad_()
        parts = trimesh.distribute(whole, procs, ["dp", None]).requires_grad_()
        found: list[tuple[str, Any, Any]] = []
        for names in itertools.product(CHANGES, VIEWS, LATER, ("base", "view"), (True, False)):
            if names[0] == "as_strided_" and names[3] == "view":
                continue  # of a view that is a copy on the ranks it is an error of theirs
            case = CHANGES[names[0]], VIEWS[names[1]], LATER[names[2]], *names[3:]
            wanted = attempt(whole.clone().requires_grad_(), *case)
            for x in (of_each_rank, parts):
                made = attempt(x, *case)
                if isinstance(made, Exception):
                    if not isinstance(wanted, Exception):
                        outcomes["refused"] += 1
                        assert re.search(REFUSED, str(made)), (names, made)
                else:
                    assert not isinstance(wanted, Exception), names
                    found.append((repr(names), wanted, made))
        values = await trimesh.fetch([made for *_, made in found])
        for (names, wanted, made), value in zip(found, values, strict=True):
            assert torch.equal(value if made._meta.is_global else value.item(dp=1), wanted), names
            outcomes["right"] += 1
    assert min(outcomes["right"], outcomes["refused"]) > 100, outcomes


@pytest.mark.daily
async def test_views_that_were_changed_in_place_are_used_as_ever_until_their_memory_is_written_to() -> None:
    async with this_host().spawn_procs({"dp": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.arange(6.0).reshape(2, 3).requires_grad_()
        base = x * 1
        row = base[0].unsqueeze_(0)
        (row * 2 + base[:, 2:]).sum().backward()
        assert (await trimesh.fetch_shard(x.grad)).tolist() == [[4, 4, 7], [0, 0, 3]]
        with torch.no_grad():
            assert (await trimesh.fetch_shard(row.mul_(2) + 1)).tolist() == [[1, 3, 5]]
        with pytest.raises(RuntimeError, match=r"got aten::add.Tensor of <tensor float32\[1, 3\].*base = base.t\(\)"):
            row + 1
        assert (await trimesh.fetch_shard(row)).tolist() == [[0, 2, 4]]  # its values are not refused


async def test_other_memory_in_place_is_refused() -> None:
    async with this_host().spawn_procs({"dp": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.zeros(2, 3)
        with pytest.raises(TypeError, match=r"set_ of <tensor float32\[2, 3\] on .*tensor.data = other"):
            x.set_(x.clone())
