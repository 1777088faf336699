"""Global tensors compute what torch computes here, however they lie: cut, whole, or in parts of a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio
from tests.rows import rows

torch = pytest.importorskip("torch", reason="torch is an extra")

import trimesh  # noqa: E402 - after the skip
from trimesh import this_host  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]

Put = Callable[[Any], Any]
WHOLE = torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sin()
HOLED = WHOLE.clone().index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(float("nan"), dtype=torch.float64))
ODD = torch.arange(105.0, dtype=torch.float64).reshape(5, 3, 7).cos()
IMAGE = torch.arange(144.0, dtype=torch.float64).reshape(4, 6, 3, 2).sin()
PLACES = torch.tensor([[3, 0, 2], [1, 1, 0]])


def _after_reading(base: Any, view: Any) -> Any:
    base.norm()
    base.mul_(2)
    return view + base.reshape(view.shape)


def _filled(tensor: Any) -> Any:
    tensor[:, 0].fill_(7)
    tensor[1] += 1
    return tensor


def _masked(tensor: Any) -> Any:
    tensor[tensor > 0] = 2.0
    return tensor


def _written_views(tensor: Any) -> Any:
    view = tensor.view(-1)[2:9]
    tensor.norm()
    view.zero_()
    return tensor, view + 1


def _history(tensor: Any) -> Any:
    return (tensor.sum() + tensor.argmax(), tensor.sum() + 3, tensor.sum() - tensor.max(), tensor.sum() - 2.0)


def _resized(image: Any) -> Any:
    resized = partial(torch.nn.functional.interpolate, image, scale_factor=2)
    return resized() + resized(mode="nearest-exact") * resized(mode="bilinear") + resized(mode="bicubic")


def _gradient(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(tensor: Any) -> Any:
        leaf = tensor.detach().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
        return grad

    return run


CASES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "along the last dimension": (WHOLE, lambda t: (t.cumsum(-1), t.cumprod(-1), t.logcumsumexp(-1), t.sort(-1)[0])),
    "any and all are one, not one a rank": (WHOLE, lambda t: ((t > 0).any().float(), (t > -2).all(0).double().mean())),
    "new tensors like one in parts": (WHOLE, lambda t: (t.new_ones(4, 6), t.new_full((2,), 3.0), t * 0 + 1)),
    "a copy with other strides": (WHOLE, lambda t: t.new_empty_strided((4, 6), (1, 4)).copy_(t)),
    "gradients of resized images": (IMAGE, _gradient(_resized)),
    "a number after a tensor without dimensions": (WHOLE, _history),
    "a view hears that its base is added up": (WHOLE, lambda t: _after_reading(t, t.view(24))),
    "writes to parts of a sum": (WHOLE, _filled),
    "writes by a mask": (WHOLE, _masked),
    "writes to views": (WHOLE, _written_views),
    "a number by parts of a sum": (WHOLE, lambda t: (torch.div(1.0, t.sum()), 2 - t, t.reciprocal(), t / 4, t * 0.5)),
    "lists of tensors": (WHOLE, lambda t: (torch._foreach_add([t, t], 1.0), torch._foreach_reciprocal([t]))),
    "fewer places than the tensor has": (WHOLE, lambda t: torch.gather(t, 0, _like(PLACES, t))),
    "sums of fewer places": (WHOLE, lambda t: torch.zeros_like(t).scatter_add(0, _like(PLACES, t), t)),
    "gradients of places": (WHOLE, _gradient(lambda t: torch.gather(t, 0, _like(PLACES, t)))),
    "views of views": (WHOLE, lambda t: (t.flatten().view(2, 12).view(6, 4), t.view(4, 2, 3).mT.flatten())),
    "views of unequal parts": (ODD, lambda t: (t.view(15, 7) * 2, t.flatten().view(21, 5), t.view(5, 21).sum(0))),
    "gradients of views": (ODD, _gradient(lambda t: t.flatten().view(21, 5) @ t.flatten().view(5, 21))),
    "a lost number": (HOLED, lambda t: (t.max(), t.amin(0), t.norm(float("inf")), t.max(1)[0], t.argmax(1))),
    "means of unequal parts": (ODD, lambda t: (t.mean(), t.mean((0, 2)), t.var(), t.std(-1), t.logsumexp(0))),
    "whole numbers stay so": (WHOLE, lambda t: ((t > 0).sum() + (t < 0).sum(), sum([(t > 0).sum(), (t > 1).sum()]))),
    "infinite parts of a sum": (WHOLE, lambda t: (t.sum(0) / 0, t.sum(0) * float("inf"))),
    "rows and columns": (WHOLE, lambda t: (t[[2, 0]], t[:, [5, 1, 1]], t[1], t[-1, ::2], t.unbind(1)[3], t.diagonal())),
}  # fmt: skip


def _like(places: Any, tensor: Any) -> Any:
    """Return places beside a tensor: on its mesh, whole."""
    mesh = _MESH.get(id(tensor.__class__)) if type(tensor) is not torch.Tensor else None
    return places if mesh is None else trimesh.distribute(places, mesh, [None, next(iter(mesh.extent))])


_MESH: dict[int, Any] = {}


def _ways(procs: Any, labels: list[str]) -> dict[str, Put]:
    def cut(*cuts: Any) -> Put:
        return lambda tensor: trimesh.distribute(tensor.clone(), procs, [*cuts, *[None] * (tensor.ndim - len(cuts))])

    def parts(tensor: Any) -> Any:
        shares = torch.stack([tensor * 0.25, tensor * 0.25, tensor * 0.5])
        return trimesh.distribute(shares, procs, [labels[0], *[None] * tensor.ndim]).sum(0)

    found = {
        "whole": cut(), "rows": cut(labels[0]), "columns": cut(None, labels[0]), "parts": parts,
    }  # fmt: skip
    if len(labels) > 1:
        found |= {"both": cut(*labels), "twice": cut(tuple(labels)), "across": cut(labels[1], labels[0])}
    return found


async def _everything() -> dict[tuple[str, str], Any]:
    outcomes: dict[tuple[str, str], Any] = {}
    for extent in ({"a": 2}, {"a": 2, "b": 2}):
        async with this_host().spawn_procs(extent, preload=("torch", "torch.distributed.tensor")) as procs:
            _MESH[id(trimesh.tensor.MeshTensor)] = procs
            for way, put in _ways(procs, list(extent)).items():
                for name, (tensor, program) in CASES.items():
                    try:
                        found = await trimesh.fetch(program(put(tensor)))
                    except Exception as error:  # noqa: BLE001 - each case fails by itself
                        found = error
                    outcomes[name, f"{way} of {len(extent)}"] = found
    return outcomes


@pytest.fixture(scope="module")
def everything() -> Any:
    """All cases on two meshes."""
    return trio.run(_everything)


@rows("name", CASES)
def test_programs_compute_the_same_however_tensors_lie(everything: Any, name: str) -> None:
    tensor, program = CASES[name]
    expected = program(tensor.clone())
    ways = [way for case, way in everything if case == name]
    assert len(ways) == 11
    for way in ways:
        found = everything[name, way]
        if isinstance(found, Exception):
            raise found
        torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text, way=way: f"{way}: {text}")


def test_an_operator_without_a_rule_is_counted_by_name() -> None:
    async def main() -> None:
        async with this_host().spawn_procs({"a": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
            t = trimesh.distribute(torch.eye(4) + 1, procs, ["a", None])
            assert await trimesh.tensor.fallbacks(procs) == {}
            torch.testing.assert_close(await trimesh.fetch(torch.linalg.det(t)), torch.linalg.det(torch.eye(4) + 1))
            found = await trimesh.tensor.fallbacks(procs)
            assert found == {"aten::_linalg_det": 1}
            assert found.operators == 1

    trio.run(main)


def test_rows_that_a_table_does_not_have_are_an_index_error() -> None:
    async def main() -> None:
        async with this_host().spawn_procs({"a": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
            for cuts in (["a", None], [None, "a"]):
                table = trimesh.distribute(torch.eye(6), procs, cuts)
                found = torch.nn.functional.embedding(trimesh.replicate(torch.tensor([5, 6]), procs), table)
                with pytest.raises(trimesh.MeshErrorGroup) as caught:
                    await trimesh.fetch(found)
                assert caught.value.split(IndexError)[1] is None

    trio.run(main)


def test_local_is_what_lies_there() -> None:
    async def main() -> None:
        async with this_host().spawn_procs({"a": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
            t = trimesh.distribute(torch.arange(6.0), procs, ["a"])
            assert (await trimesh.fetch_shard(t.local(), a=1)).tolist() == [3, 4, 5]
            whole = trimesh.redistribute(t, None).local([None])
            assert (await trimesh.fetch_shard(whole, a=1)).tolist() == [0, 1, 2, 3, 4, 5]
            with pytest.raises(trimesh.MeshErrorGroup) as caught:
                await trimesh.fetch(t.local([None]))
            assert "cut along 'a' in dimension 0: write trimesh.redistribute" in str(caught.value.exceptions[0])
            assert (await trimesh.fetch_shard(t.sum().local(), a=1)).item() == 15

    trio.run(main)
