"""Operations that write to tensors, and those of training: lines of the table."""

from __future__ import annotations

from typing import Final

WRITES: Final = (
    "{w}.add_({s})", "{w}.mul_({s})", "{w}.add_({into})", "{w}.mul_({into})", "{w}.sub_({into})", "{w}.div_({num})",
    "{w}.copy_({into})", "{w}.copy_({into})", "{w}.fill_({num})", "{w}.fill_({z})", "{w}.zero_()", "{w}.neg_()",
    "{w}.clamp_(max=0.5)", "{w}.relu_()", "{w}.exp_()", "{w}.tanh_()", "{w}.lerp_({same}, 0.5)",
    "{w}.addcmul_({same}, {same2}, value=2)", "{w}.masked_fill_({mask}, {num})", "{w}.index_fill_({d}, {ix}, 1.0)",
    "{w}.index_add_({d}, {one}, {w}.narrow({d}, 0, 1).clone())",
    "{w}.index_copy_({d}, {one}, {w}.narrow({d}, 0, 1) * 2)",
    "{w}.scatter_({d}, {gx}, 3.0)", "{w}.scatter_add_({d}, {gx}, {like})", "{w}.cumsum_({d})", "{w}.sub_({w}.mean())",
    "{w}.div_({w}.norm() + 1)", "{w}.view(-1)[::3].add_(1)", "{w}.view(-1)[1:4].fill_(0.25)", "{w}.t().add_(1)",
    "{w}.transpose({d}, {d2})[0].sub_(1)", "{w}.mT.mul_(2)", "{w}.select({d}, {e}).fill_({num})",
    "{w}.select({d}, {e}).mul_(3)",
    "{w}.narrow({d}, 0, {c}).zero_()", "{w}[{slice}].mul_(2.0)", "{w}[{slice}].fill_({num})", "{w}[{slice}].add_({s})",
    "{w}.diagonal().mul_(2)", "{w}.tril_()", "{w}.nan_to_num_()", "{w}.detach().add_(1)", "{w}.data.mul_(0.5)",
    "{w}.chunk(2, {d})[-1].mul_(5)", "{w}.unbind({d})[0].add_(1)", "{w}.squeeze().add_(1)", "{w}.unsqueeze(0).mul_(2)",
    "{w}.pow_(2)", "{w}.sqrt_()", "{w}.flatten().sum().add_(1)",
    "{w}.add_({same}, alpha=0.5)", "{w}.put_({one}, {w}.view(-1)[:1] * 2)",
    "{w}.masked_scatter_({mask}, {same}.clone())", "{w}.round_()", "{w}.index_put_(({one},), {w}[:1] + 1)",
    "torch.nn.init.constant_({w}, {num})", "torch.nn.init.ones_({w})", "{w}.fill_diagonal_(2.0)",
    "{w}.renorm_(2, 0, 1.0)",
)  # fmt: skip

ASSIGNMENTS: Final = (
    "{w}[{slice}] = {num}", "{w}[{slice}] = {z}", "{w}[{mask}] = {num}", "{w}[{ix}] = {num}", "{w}[0] = {w}[-1]",
    "{w}[..., 0] = {w}[..., -1]", "{w}[{ix}, ..., 0] = {num}", "{w} += {into}", "{w} *= {s}", "{w}[{slice}] += 1",
    "{w}[{slice}] *= {num}", "{w}[{rowmask}] = {num}", "{w}[{mask}] += 1", "{w}[0] += {w}[-1]", "{w}[:, 0] = {num}",
    "torch._foreach_add_([{w}, {w2}], 1.0)", "torch._foreach_mul_([{w}, {w2}], 0.5)", "torch._foreach_zero_([{w}])",
    "torch._foreach_lerp_([{w}], [{same}], 0.5)", "torch._foreach_add_([{w}], [{same}], alpha=2)",
    "torch._foreach_addcmul_([{w}], [{same}], [{same2}], 0.5)", "torch._foreach_copy_([{w}], [{same}])",
    "torch._foreach_sqrt_([{w}])", "torch._foreach_mul_([{w}], {z})",
)  # fmt: skip
"""Statements: they have no result."""

RESHAPES: Final = (
    "{w}.t_()", "{w}.transpose_({d}, {d2})", "{w}.swapaxes_({d}, {d2})", "{w}.unsqueeze_({d})", "{w}.unsqueeze_(-1)",
    "{w}.squeeze_()", "{w}.squeeze_({d})", "{m}.t_().t_()", "{w}.as_strided_({w}.shape, {w}.stride())",
)  # fmt: skip
"""Statements that change the shape of a tensor in place, of which there may be views."""

OLDER_VIEWS: Final = tuple(
    "(lambda b={leaf} * 2: (lambda v: "
    f"({change}, torch.autograd.grad((v * ramp(v)).sum(), {{leaf}})[0])[1])({view}))()"
    for view in ("b.select({d}, {e})", "b.narrow({d}, 0, {c})", "b.transpose({d}, {d2})", "b.view(-1)")
    for change in (
        "b.transpose_({d}, {d2})",
        "b.unsqueeze_({d})",
        "(b.transpose_({d}, {d2}), v.mul_(3))",
        "(v.unsqueeze_(0), v.mul_(3))",
        "(v.unsqueeze_(0), b.mul_(3))",
        "v.unsqueeze_(-1)",
    )
)
"""Gradients through views that are older than a change of shape in place."""

GRADIENTS: Final = (
    "torch.autograd.grad(({g} * ramp({g})).sum(), {leaf}, allow_unused=True)",
    "torch.autograd.grad(({g} * ramp({g})).sum(), {leaf}, allow_unused=True)",
    "torch.autograd.grad({g}.sum(), {leaf}, allow_unused=True)",
    "torch.autograd.grad({g}.mean(), {leaf}, allow_unused=True)",
    "torch.autograd.grad(({g} * {g}).sum(), {leaf}, allow_unused=True, retain_graph=True)",
    "torch.autograd.grad({g}.square().mean() + {g}.sum(), {leaf}, allow_unused=True)",
    "torch.autograd.grad(checkpoint(lambda t: F.dropout(t * {leaf}, 0.5), {leaf}, use_reentrant=False).sum(), {leaf})",
    "torch.autograd.grad(checkpoint(lambda t: F.dropout(t, 0.5).square(), {leaf}, use_reentrant=False).sum(), {leaf})",
    "torch.autograd.grad(checkpoint(lambda t: t.tanh() * t.sum(), {leaf}, use_reentrant=False).sum(), {leaf})",
    "torch.autograd.grad(torch.autograd.grad({g}.pow(3).sum(), {leaf}, create_graph=True)[0].sum(), {leaf})",
    "torch.autograd.grad(F.dropout({g}, 0.5).sum(), {leaf}, allow_unused=True)",
    "torch.autograd.grad(torch.autograd.grad({g}.square().sum(-1).sum(), {leaf}, create_graph=True)[0].sum(), {leaf})",
    "torch.autograd.grad(torch.autograd.grad({g}.tanh().sum(), {leaf}, create_graph=True)[0].square().sum(), {leaf})",
    "torch.autograd.grad(torch.autograd.grad({g}.square().mean().exp(), {leaf}, create_graph=True)[0].sum(), {leaf})",
)  # fmt: skip

BACKWARDS: Final = (
    "({g} * ramp({g})).sum().backward()", "{g}.sum().backward(retain_graph=True)", "({g} * {g}).mean().backward()",
    "({leaf} * ramp({leaf})).sum().backward()",
)  # fmt: skip
"""Statements that leave gradients at the leaves."""

TRAINING: Final = (
    "(lambda o: (({leaf} * ramp({leaf})).sum().backward(), o.step()))(torch.optim.SGD([{leaf}], lr=0.5))",
    "(lambda o: (({leaf} * {leaf}).sum().backward(), o.step()))(torch.optim.SGD([{leaf}], lr=0.25, momentum=0.5))",
    "(lambda o: (({leaf} * ramp({leaf})).sum().backward(), o.step()))(torch.optim.AdamW([{leaf}], lr=0.125))",
    "(({leaf} * ramp({leaf})).sum().backward(), torch.nn.utils.clip_grad_norm_([{leaf}], 0.5))",
    "(({leaf} * ramp({leaf})).sum().backward(), torch.nn.utils.clip_grad_norm_([{leaf}], 0.5, float('inf')))",
)  # fmt: skip
"""Statements that end in gradients and new weights."""

RECORDED: Final = (
    "repeat(lambda a: a * 2 + 1, 5, {f}.detach())", "repeat(lambda a: a.sum(0), 5, {f}.detach())",
    "repeat(lambda a, b: (a - b).square().mean(), 5, {f}.detach(), {same}.detach())",
    "repeat(lambda a: a.softmax(-1), 5, {f}.detach())", "repeat(lambda a: {w}.detach().add_(a), 5, {same}.detach())",
)  # fmt: skip
