"""Every operator of the table lays out what it makes as is believed here without data; in odd layouts, too.

Torch asks for a contiguous copy where a kernel needs one. What is taken for contiguous and is not is read in a wrong
order: wrong numbers without an error. The comparison needs no process.
"""

from __future__ import annotations

from typing import Any

import pytest

import trimesh
from trimesh import this_host
from trimesh.errors import ProtocolError

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.judge.metadata import Beside  # noqa: E402 - after the skip
from tests.tensor.operator_inputs import Inputs, values  # noqa: E402
from tests.tensor.operator_table import CASES  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

from trimesh.tensor.kernels.table import KERNELS  # noqa: E402
from trimesh.tensor.rank import kernel as rank_layout  # noqa: E402
from trimesh.tensor.rank.kernel import define  # noqa: E402

pytestmark = pytest.mark.torch

KNOWN = {
    "aten._linalg_svd.default",  # other strides on other devices; what reads them goes by the strides
    "aten.native_batch_norm.default",  # the statistics of an evaluation, which nothing reads
}


def laid_out(value: Any, layout: str) -> Any:
    """Return the same numbers in another order of memory."""
    if layout == "contiguous" or value.ndim < 2:
        return value.contiguous()
    order = list(range(value.ndim))
    if layout == "reversed":
        order.reverse()
    elif layout == "swapped":
        order[-2:] = order[:-3:-1]
    else:
        order = [0, *order[2:], 1]
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.ndim)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.searchsorted:UserWarning")  # that odd layouts are slow
@pytest.mark.parametrize(
    "layout",
    ["reversed", "channels last", *(pytest.param(one, marks=pytest.mark.stress) for one in ("contiguous", "swapped"))],
)
def test_operators_lay_out_what_they_make_as_is_believed(layout: str) -> None:
    wrong: dict[str, str] = {}
    raised = 0
    for name, case in CASES.items():
        torch.manual_seed(0)
        inputs = Inputs(lambda one: laid_out(one.clone(), layout).detach(), values())
        with Beside() as beside:
            try:
                made = [one for one in pytree.tree_leaves(case(inputs)) if isinstance(one, torch.Tensor)]
                leaves = [one for one in made if one.requires_grad]
                wanted = [one for one in inputs.used if one.requires_grad]
                for gradients in ("contiguous", "reversed") if leaves else ():
                    given = [laid_out((torch.ones_like(one) + one.detach()) / 8, gradients) for one in leaves]
                    torch.autograd.grad(leaves, wanted, given, allow_unused=True, retain_graph=True)
            except RuntimeError:
                raised += 1  # a view of what has other strides
        wrong |= {one: f"{name}: {text}" for one, text in beside.found.items() if one not in KNOWN}
    assert not wrong, "\n".join(wrong.values())
    assert raised <= 4


def test_what_lies_otherwise_is_laid_out_anew() -> None:
    made = torch.arange(6.0).view(2, 3)
    assert rank_layout.laid_out(made, (3, 1)) is made
    assert rank_layout.laid_out(made, ()) is made
    assert rank_layout.laid_out(None, (3, 1)) is None
    assert rank_layout.laid_out(made[:1], (1, 1)).stride() == (3, 1)  # no step is taken
    turned = rank_layout.laid_out(made, (1, 2))
    assert turned.stride() == (1, 2)
    assert torch.equal(turned, made)


@pytest.mark.parametrize("told", [[[3, 1], [1]], [[3, "1"]], [[-1, 1]], [3]])
def test_descriptions_say_of_each_new_tensor_how_it_lies(told: Any) -> None:
    description = ["aten::neg", ["l", ["r"]], ["d"], [0], []]
    device = torch.device("cpu")
    assert define([*description, [[3, 0]]], device, KERNELS).strides == [(3, 0)]
    assert define(description, device, KERNELS).strides == []
    with pytest.raises(ProtocolError, match="the strides of each new tensor"):
        define([*description, told], device, KERNELS)


@pytest.mark.real
async def test_ranks_lay_out_what_their_kernels_lay_out_otherwise() -> None:
    programs = (
        lambda t: torch.linalg.svd(t, full_matrices=False).Vh.contiguous().view(-1),
        lambda t: torch.fft.rfft2(t).abs().contiguous().view(-1),
    )
    here = torch.randn(6, 4)
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        whole, cut = trimesh.replicate(here, procs), trimesh.distribute(here, procs, ["gpus", None])
        for program in programs:
            for there in (whole.local([None, None]), whole, cut):
                found = await trimesh.fetch_shard(program(there), gpus=0)
                assert torch.allclose(found, program(here), atol=1e-5)
