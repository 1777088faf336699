"""Operations beside those of torch on tensors: ways over the mesh, derivatives as functions, other dtypes by rule."""

from __future__ import annotations

from typing import Final

CROSSINGS: Final = (
    "through({x}.detach())", "rejoined({x}.detach())", "doubled({free})", "reduced({held}.detach(), {label})",
    "spread({x}.detach(), {label})", "moved({x}.detach())", "laid({a}.detach(), {cuts})",
    "torch.autograd.grad((through({leaf}) * ramp({leaf})).sum(), {leaf})",
    "torch.autograd.grad((rejoined({leaf}) * through({leaf})).sum(), {leaf})",
    "torch.autograd.grad((moved({leaf}) * ramp({leaf})).sum(), {leaf})",
    "torch.autograd.grad((laid({leaf}, {cuts}) * {leaf}).sum(), {leaf})",
)  # fmt: skip
"""Ways of a global tensor: to functions on the ranks and back, to a tensor on each rank and back, to other layouts.

Their gradients are row-major, where those of a copy of torch's may be expanded: each is computed with before it shows.
"""

TRANSFORMED: Final = (
    "cubed({f})", "cubed({g})", "torch.autograd.grad(cubed({leaf}).sum(), {leaf})",
    "torch.autograd.grad(torch.autograd.grad(cubed({leaf}).sum(), {leaf}, create_graph=True)[0].sum(), {leaf})",
    "torch.func.grad(lambda t: (t * t).sum())({f}.detach())",
    "torch.func.grad(lambda t: (t * {same}.detach()).square().sum())({f}.detach())",
    "torch.func.grad_and_value(lambda t: t.pow(3).mean())({f}.detach())",
    "torch.func.vmap(lambda row: row * 2 + row.sum())({m})", "torch.func.vmap(lambda row: row.cumsum(0))({m}.detach())",
    "torch.func.vmap(lambda row: row.softmax(0), in_dims=1)({m})",
    "torch.func.jvp(lambda t: t.square() + t, ({f}.detach(),), ({same}.detach(),))",
    "torch.func.vjp(lambda t: t * t.sum(), {f}.detach())[1]({same}.detach())",
    "torch.func.jacrev(lambda t: t * t.sum())({v}.detach())", "torch.func.jacfwd(lambda t: t.pow(2))({v}.detach())",
    "torch.func.vmap(torch.func.grad(lambda row: (row * row).sum()))({m}.detach())",
    "autocast(torch.matmul, {m}, {right})", "autocast(F.linear, {m}, {linear})",
    "autocast(lambda t, u: (t @ u) * 2, {m}, {right})", "autocast(lambda t: t.sum() * 2 + t, {f})",
)  # fmt: skip
"""Derivatives and batches as functions of functions; products of bfloat16 where autocast chooses so, which stay that: a
product in parts is rounded in each, and a result of more digits would show it."""
