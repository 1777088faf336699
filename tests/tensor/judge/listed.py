"""Short programs that show one behaviour each: where global tensors were seen to go wrong."""

from __future__ import annotations

import re
from typing import Final

from tests.tensor.judge.program import Extent, Input, Place, Program, Step

TWO: Final[Extent] = (("a", 2),)
FOUR: Final[Extent] = (("a", 2), ("b", 2))

ASSIGNS: Final = re.compile(r"[vx]\d+(\[.*\])? .?= ")
"""A line that assigns, and makes no tensor of its own."""


def begin(
    shape: tuple[int, ...],
    *layout: Place,
    dtype: str = "float32",
    kind: str = "quarters",
    grad: bool = False,
    bound: int = 1,
) -> Input:
    """Return an input; `written` names it."""
    return Input("x", shape, dtype, kind, 3, layout, grad, bound)


def written(inputs: list[Input], *code: str, extent: Extent = TWO) -> Program:
    """Return a program of inputs x0, x1, ... and of lines that make v0, v1, ..., or nothing where they assign."""
    named = tuple(
        Input(f"x{number}", one.shape, one.dtype, one.kind, one.seed + number, one.layout, one.needs_grad, one.bound)
        for number, one in enumerate(inputs)
    )
    steps = tuple(Step(line, line, "" if ASSIGNS.match(line) else f"v{number}") for number, line in enumerate(code))
    return Program(1, extent, False, named, steps)


LISTED: Final[dict[str, Program]] = {
    "checkpoint with dropout draws its mask again": written(
        [begin((8,), "whole", kind="positive", grad=True)],
        "torch.autograd.grad(checkpoint(lambda t: F.dropout(t, 0.5).square(), x0, use_reentrant=False).sum(), x0)",
    ),
    "cumsum along a cut dimension counted from the end": written([begin((2, 4), 1)], "x0.cumsum(-1)"),
    "cumprod along a cut dimension counted from the end": written([begin((2, 4), 1)], "x0.cumprod(-1)"),
    "logcumsumexp along a cut dimension counted from the end": written([begin((2, 4), 1)], "x0.logcumsumexp(-1)"),
    "any over a cut dimension as a number": written([begin((8,), 0, kind="positive")], "(x0 > 0).any()", "v0.float()"),
    "any of rows over a cut dimension, times a number": written(
        [begin((2, 4), 1, kind="positive")], "(x0 > 0).any(1)", "v0 * 2"
    ),
    "new_ones of an output in parts": written(
        [begin((4, 6), 0, 1), begin((6, 3), "whole", 0)], "x0 @ x1", "v0.new_ones(v0.shape)", extent=FOUR
    ),
    "a number added after a tensor without dimensions": written(
        [begin((8,), 0, kind="distinct")], "x0.sum()", "v0 + x0.argmax()", "x0.sum()", "v2 + 3"
    ),
    "a number of Python that changes after a recording": written(
        [begin((4,), 0)], "repeat((lambda c: lambda a: a * c.pop())([3.0, 2.0, 1.0, 1.0, 1.0]), 5, x0)"
    ),
    "a view of a tensor in parts after a read of its base": written(
        [begin((2, 4), 1, kind="positive"), begin((4, 3), 0, kind="positive")],
        "x0 @ x1", "v0.view(-1)", "v0.norm()", "v1.mul_(0.5)",
    ),
    "pieces of a cut tensor in parts, after one of them was read": written(
        [begin((8,), 0, "parts", dtype="float64")],
        "x0.split(1, 0)", "v0[2].squeeze(0)", "v0[7].amin(-1)", "v0[0] + v0[2]", extent=FOUR,
    ),
    "the diagonal of a view that does not begin where its memory does": written(
        [begin((4, 4), 1, kind="distinct")],
        "x0.split([1, 3])[1].fill_diagonal_(2.0)",
        "x0[:, 2:].t().fill_diagonal_(3.0)",
    ),
    "the diagonal of a tall view, wrapped": written(
        [begin((9, 3), 0, kind="distinct")], "x0[1:].fill_diagonal_(2.0, True)", "x0 * 1"
    ),
    "an index out of range in a write through a view that is copied": written(
        [begin((4, 5), 1), begin((2,), "whole", kind="index")], "x0[:, 0].index_put_((x1 + 4,), x0.sum())",
    ),
    "counts in parts along one label, added to a view of some along two": written(
        [begin((2,), "whole", 0), begin((), "parts", "parts", dtype="int64")],
        "x1[...]", "x0.count_nonzero(-1)", "torch.add(v1, v0, alpha=2)", extent=FOUR,
    ),
    "fill_ of a tensor in parts": written([begin((2, 4), 1), begin((4, 3), 0)], "x0 @ x1", "v0.fill_(1.0)"),
    "fill_ of a row of a tensor in parts": written([begin((2, 4), 1), begin((4, 3), 0)], "x0 @ x1", "v0[0].fill_(1.0)"),
    "empty of a tensor in parts, filled": written(
        [begin((2, 4), 1), begin((4, 3), 0)], "x0 @ x1", "v0.new_empty((2, 3)).fill_(1.0)"
    ),
    "constant_ of a tensor in parts": written(
        [begin((2, 4), 1), begin((4, 3), 0)], "x0 @ x1", "torch.nn.init.constant_(v0, 0.5)"
    ),
    "a number divided by a tensor in parts": written(
        [begin((4, 2), 0, kind="positive")], "x0.sum(0)", "torch.div(1.0, v0)"
    ),
    "gather with a smaller index in another cut dimension": written(
        [begin((6, 8), 1, kind="distinct"), begin((4, 5), 1, dtype="int64", kind="index", bound=6)], "x0.gather(0, x1)"
    ),
    "gradient of scatter_add": written(
        [
            begin((6, 8), 0, grad=True), begin((4, 5), 0, dtype="int64", kind="index", bound=5),
            begin((4, 5), 0, grad=True),
        ],
        "x0.scatter_add(1, x1, x2)", "torch.autograd.grad((v0 * ramp(v0)).sum(), (x0, x2))",
    ),
    "a view of a view cut along the last dimension": written(
        [begin((2, 4, 6), 2, kind="distinct")], "x0.flatten()", "v0.view(4, 12)"
    ),
    "gradient through a view of a tensor cut along two dimensions": written(
        [begin((2, 4, 6), 2, 1, kind="distinct", grad=True), begin((2, 4, 6), 2, 1, kind="quarters")],
        "F.mse_loss(x0.flatten(), x1.flatten())", "torch.autograd.grad(v0, x0)", extent=FOUR,
    ),
    "NaN of another rank and max": written([begin((8,), 0, kind="special")], "x0.max()", "x0.amax(0)", "x0.min()"),
    "NaN of another rank and the infinite norm": written(
        [begin((8,), 0, kind="special")], "x0[4:].sub(1)", "x0.norm(inf)"
    ),
    "ids out of range of a table cut by rows": written(
        [begin((4,), "whole", dtype="int64", kind="index", bound=40), begin((8, 4), 0)], "F.embedding(x0, x1)"
    ),
    "the output of a table cut by rows, used twice": written(
        [begin((4,), "whole", dtype="int64", kind="index", bound=8), begin((8, 4), 0)],
        "F.embedding(x0, x1)", "v0 * 2", "v0.pow(2)", "v0 + v0",
    ),
    "counts that are added up": written(
        [begin((8,), 0)], "(x0 > 0).sum()", "(x0 > 1).sum()", "sum([v0, v1])", "1 - v0"
    ),
    "a masked assignment to a tensor cut by columns": written([begin((2, 4), 1)], "x0[x0 > 0] = 2.0"),
    "an assignment to a part of a tensor in parts": written(
        [begin((2, 4), 1), begin((4, 3), 0)], "x0 @ x1", "v0.masked_fill_(v0 > 0, 2.0)", "v0[:, 0].add_(1)"
    ),
    "an uneven reshape over two dimensions": written(
        [begin((6, 4), 0, 0, kind="distinct")], "x0.view(2, 3, 4)", "x0.view(-1)", "x0.reshape(8, 3)", extent=FOUR
    ),
    "squeeze of a tensor whose parts have length 1": written(
        [begin((2, 4), 0)], "x0.squeeze()", "x0.squeeze(0)", "x0.kthvalue(1, -1)[0]", "v2.squeeze()", "x0.cov()"
    ),
    "the largest of each of no rows": written([begin((0, 3), 0)], "x0.norm(inf, -1)"),
    "strides of a number to the power of a transposed tensor": written(
        [begin((3, 4), 1)], "x0.t()", "3 ** v0", "v1.view(-1)"
    ),
    "strides of two tensors that lie otherwise in memory": written(
        [begin((3, 4), 1), begin((4, 3), 0), begin((3,), 0)],
        "x0.t()", "v0 // x1", "torch.logical_and(x1, v0)", "torch.logical_or(x2, v0)",
        "torch.div(v0, x1, rounding_mode='floor')", "torch.copysign(v0, x1)", "torch.logaddexp(x2, v0)",
    ),
    "strides of what batch norm makes": written(
        [begin((3, 4), 1)], "x0.t()", "F.batch_norm(v0, None, None, training=True)", "v1.view(-1)"
    ),
    "a view of a view of a copy, after a write to it and one to the tensor": written(
        [begin((2, 4), 1), begin((2, 4), "whole")],
        "x0.view(-1)", "v0.squeeze(-1)", "v1.permute((0,))", "v2.add_(1)", "x0.sub_(x1)", "v2 * 2",
    ),
    "a view that strides do not allow": written([begin((3, 4), 1)], "x0.t()", "v0.view(-1)"),
    "the smallest of no rows": written([begin((0, 3), 0)], "x0.amin(-2, keepdim=True)"),
    "a slice of a tensor without dimensions": written([begin((3,), 0)], "x0.sum()", "v0[:1]"),
    "the first of no rows": written([begin((0, 3), 1)], "x0.kthvalue(1, 0)"),
    "a tensor of numbers on the way": written(
        [begin((3, 4), 1)], "x0.new_tensor(3.0)", "x0 + v0", "x0.new_tensor([[1, 2], [3, 4]])", "v2 * v0",
        "x0.new_tensor(2, dtype=torch.int64)",
    ),
    "the gradient of a view after its base was written to in a list": written(
        [begin((2,), 0, grad=True)],
        "x0 * 2", "v0.view((1, -1))", "torch._foreach_mul_([v0], 0.5)", "torch._foreach_add_([v0, v0], [x0, x0])",
        "torch.autograd.grad(v1.sum(), x0)",
    ),
    "the second derivative of an infinite norm": written(
        [begin((2, 2), 0, grad=True)],
        "torch.autograd.grad(x0.norm(inf, 1).pow(3).sum(), x0, create_graph=True)[0]",
        "torch.autograd.grad(v0.sum(), x0)",
        "torch.autograd.grad(x0.sgn().add(x0).pow(2).sum(), x0)",
    ),
    "gradients of losses of NaN and infinity": written(
        [begin((8, 2), 1, kind="special", grad=True), begin((8, 2), 1, kind="special")],
        "torch.autograd.grad(F.smooth_l1_loss(x0, x1, beta=0.5), x0)",
        "torch.autograd.grad(F.smooth_l1_loss(x0, x1, reduction='sum'), x0)",
        "torch.autograd.grad(F.soft_margin_loss(x0, x1), x0)",
        "torch.autograd.grad(F.huber_loss(x0, x1), x0)",
        "torch.autograd.grad(F.mse_loss(x0, x1, reduction='none').sum(), x0)",
    ),
    "a list with a tensor and a view of it that was gathered": written(
        [begin((2, 2), 1), begin((2, 2), 1)],
        "x0 * 2", "v0.as_strided((1,), (1,))", "torch._foreach_mul_([v0, v1], 0.5)",
        "torch._foreach_add_([v1, v0, x1], [v0.as_strided((1,), (1,)), x1, v0], alpha=2)",
    ),
    "gradients of the largest and the smallest of all, times infinity": written(
        [begin((8,), 0, grad=True), begin((4, 2), 1, kind="special", grad=True)],
        "x0.max()", "torch.autograd.grad(v0 * inf, x0)", "torch.autograd.grad(x0.min() * -inf, x0)",
        "torch.autograd.grad(-x0.max(), x0)", "(x0 > 0) * v0",
        "x1.max()", "torch.autograd.grad(v5 * inf, x1)", "x0.view(2, 4).t().min()", "torch.autograd.grad(v7 / 0, x0)",
        "torch.autograd.grad(x0.max().pow(2), x0, create_graph=True)[0]", "torch.autograd.grad(v9.sum(), x0)",
    ),
    "strides of what an index chooses behind a new dimension": written(
        [begin((2, 3), 0), begin((2,), "whole", dtype="int64", kind="index", bound=2)],
        "x0.t()", "v0[None, x1]", "v0[None, None, x1]", "x0[None, :, x1]", "v0.add(1)[None, x1]",
        "v0[None, x1, x1]", "v0[x1, None]", "v0[None, x1[:, None]]",
    ),
    "masks that are shifted by a number": written([begin((4, 2), 0, dtype="bool")], "x0 << 1", "x0 >> 1", "1 << x0"),
    "classes of errors of masks that are divided": written([begin((4, 2), 0, dtype="bool")], "x0 // x0"),
    "classes of errors of masks that are divided by a number": written(
        [begin((4, 2), 0, dtype="bool")], "torch.div(x0, True, rounding_mode='floor')"
    ),
    "classes of errors of masks that are shifted": written([begin((4, 2), 0, dtype="bool")], "x0 << x0"),
    "classes of errors of numbers that are shifted": written([begin((4, 2), 0)], "x0 << 1"),
    "classes of errors of fractions of masks": written([begin((4, 2), 0, dtype="bool")], "x0.frac()"),
    "classes of errors of too many places": written(
        [begin((4, 2), 0), begin((2,), "whole", dtype="int64", kind="index", bound=2)], "x0.index_copy(0, x1, x0[:1])"
    ),
    "one of classes that are too few": written(
        [begin((4, 2), 0, dtype="int64", kind="index", bound=5)], "F.one_hot(x0, 5)", "F.one_hot(x0, 2)"
    ),
    "one of classes below 0": written([begin((4, 2), 1, dtype="int64", kind="index", bound=5)], "F.one_hot(x0 - 1)"),
    "one of the classes of nothing": written(
        [begin((4, 2), 1, dtype="int64", kind="index", bound=5)], "F.one_hot(x0[:0])"
    ),
    "writes to what a rank has of an expanded tensor": written(
        [begin((8,), 0)], "x0.expand(3, 8)", "v0[:, 0]", "v1[0].add_(1)", "v1 + 0", "v0[1][3:4].mul_(2)", "x0 * 1",
        "torch.meshgrid(x0, x0, indexing='ij')[1].diagonal()", "v6.as_strided((1,), (1,)).add_(1)", "v6 + v1[0]",
    ),
    "writes to what a rank has of overlapping windows": written(
        [begin((8,), 0), begin((4, 6), 0)],
        "x0.unfold(0, 3, 1)", "v0[1].add_(1)", "v0[2][1:].mul_(2)", "v0[:, 1][2:].sub_(1)", "x0.unfold(0, 3, 1) + v0",
        "x1.unfold(1, 3, 1)", "v5[0, 1].add_(1)", "v5[0][:, 1].mul_(3)", "x1.unfold(1, 3, 1) + v5",
    ),
    "writes to some of what is twice in overlapping windows": written(
        [begin((8,), 0), begin((6, 3), 0, dtype="bool")],
        "x0.unfold(0, 3, 1)", "v0[x1] += 1", "v0 * 1", "v0[x1] = -v0[x1]", "x0 * 1",
    ),
    "how what lacks a dimension of one place makes a result lie": written(
        [begin((2, 1), 0), begin((2, 2), "whole")],
        "x0.unfold(-2, 2, 1)", "torch.sub(x1, v0)", "v0 + x1", "torch.maximum(x1, v0)", "torch.copysign(v0, x1)",
        "torch.addcmul(x1, v0, x1)", "torch.logaddexp(v0, x1)",
    ),
    "the share of the middle one that is no number": written(
        [begin((3, 3), 0, kind="special", grad=True)],
        "torch.autograd.grad(x0.median(), x0)", "torch.autograd.grad(x0.nanmedian() / 0, x0)",
        "torch.autograd.grad(torch.autograd.grad(x0.median().pow(3), x0, create_graph=True)[0].sum(), x0)",
    ),
    "gradients of losses of nothing": written(
        [begin((0, 2), 0, grad=True), begin((0, 2), 0)],
        *(
            f"torch.autograd.grad({loss}.sum(), x0)"
            for loss in (
                "F.mse_loss(x0, x1)", "F.huber_loss(x0, x1)", "F.smooth_l1_loss(x0, x1)",
                "F.soft_margin_loss(x0, x1)", "F.binary_cross_entropy(x0, x1)",
            )
        ),
    ),
    "a row that is taken from the rows": written([begin((4, 2), 0)], "x0.sub_(x0[1])"),
    "the transpose of what is written to": written([begin((4, 4), 0)], "x0.detach().unbind()[0]", "x0.t().add_(v0)"),
    "rows that are added to rows of them": written([begin((4, 2), 0)], "x0[:2].add_(x0[1:3])"),
    "a row that is copied to all": written([begin((4, 2), (0, 1))], "x0.copy_(x0[3])"),
    "an element that is taken from its row": written([begin((4, 2), 0)], "x0.clamp_(min=x0[0, 1])"),
    "rows and columns of what is written to that torch lets be": written(
        [begin((4, 2), 0)], "x0[:2].add_(x0[2:])", "x0[1].add_(x0[1])",
        "x0.add_(x0[:, 1:])", "x0[:1].mul_(x0[1:2])",
    ),
}  # fmt: skip
"""By what they show."""
