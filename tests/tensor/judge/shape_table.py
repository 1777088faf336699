"""Operations that look at, choose and join places of tensors: lines of the table."""

from __future__ import annotations

from typing import Final

VIEWS: Final = (
    "{x}.view({shape})", "{x}.reshape({shape})", "{x}.reshape({shape})", "{x}.flatten()", "{x}.t()", "{a}.mT",
    "{a}.transpose({d}, {d2})", "{x}.permute({perm})", "{x}.unsqueeze({d})", "{x}.squeeze()", "{x}.squeeze({d})",
    "{x}.expand({bigger})", "{a}.select({d}, {e})", "{a}.narrow({d}, 0, {c})", "{x}[{slice}]", "{x}[{slice}]",
    "{x}[{slice}]", "{m}.diagonal()", "{x}.view({x}.shape)", "{x}.view(-1)", "{x}.reshape(-1)",
    "{x}.movedim({d}, {d2})",
    "{a}.unfold({d}, {c}, 1)", "{a}.unflatten({d}, (-1, 1))", "{a}.flatten(0, {d})", "{a}.swapaxes({d}, {d2})",
    "{q}.flatten(1)", "{q}.flatten(0, 1)", "{x}.view_as({x})", "{a}.transpose({d}, {d2}).reshape({shape})",
    "{q}.flatten().view({shape})", "{x}.unsqueeze(-1)", "{x}.unsqueeze(0)", "{a}.as_strided((1,), (1,))",
)  # fmt: skip

REORDERED: Final = (
    "{a}.flip({d})", "{a}.roll(1, {d})", "{a}.repeat_interleave(2, {d})", "{a}.tile(2)", "{m}.tril()", "{m}.triu(1)",
    "F.pad({a}, (1, 2))", "F.pad({a}, (1, 1), value=2.0)", "{m}.rot90()", "{a}.diff(dim={d})", "torch.diag_embed({a})",
    "{m}.trace()", "{v}.diag()", "{v}.repeat(3, 1)",
    "torch.cat([{a}, {same}], {d})", "torch.cat([{a}, {a}, {same}], {d})", "torch.stack([{x}, {same}], 0)",
    "torch.stack([{x}, {same}], -1)", "torch.hstack(({a}, {same}))", "torch.vstack(({a}, {same}))",
    "torch.cat([{a}[:1], {a}[1:]], 0)", "{a}.split({c}, {d})", "{a}.chunk(2, {d})", "{a}.chunk(3, {d})",
    "{a}.unbind({d})", "torch.tensor_split({a}, 2, {d})", "{a}.split([1, {a}.shape[0] - 1])",
    "torch.broadcast_tensors({x}, {y})", "{a}.transpose({d}, {d2}).contiguous()",
    "torch.meshgrid({v}, {v2}, indexing='ij')",
    "torch.block_diag({m}, {m})", "torch.outer({v}, {v2})", "torch.kron({v}, {v2})", "torch.cat([{v}, {v2}], 0)",
)  # fmt: skip

INDICES: Final = (
    "{a}.gather({d}, {gx})", "{a}.gather({d}, {gx})", "{a}.scatter({d}, {gx}, 0.5)", "{f}.scatter({d}, {gx}, {like})",
    "{f}.scatter_add({d}, {gx}, {like})", "{f}.scatter_reduce({d}, {gx}, {like}, 'amax')",
    "{f}.scatter_reduce({d}, {gx}, {like}, 'sum')", "{a}.index_select({d}, {ix})", "{a}[{ix}]", "{a}[..., [0]]",
    "{m}[:, [0]]", "{a}[[0, -1]]", "{m}[[0, 0], [0, -1]]", "{a}.take({gx})", "torch.take_along_dim({a}, {gx}, {d})",
    "{a}.index_fill({d}, {ix}, 2.0)", "{f}.index_put(({one},), {f}[:1])",
    "{f}.index_add({d}, {one}, {f}.narrow({d}, 0, 1))",
    "{f}.index_copy({d}, {one}, {f}.narrow({d}, 0, 1))", "{x}.masked_scatter({mask}, {same})",
    "{f}.gather({d}, {f}.argsort(dim={d}, stable=True))", "{a}.select_scatter({a}[0] * 2, 0, -1)",
    "{a}.slice_scatter({a}[:1] * 2, 0, 0, 1)", "torch.isin({i}, {ix})", "{a}[{ix}, ..., 0]", "{a}[None, {ix}]",
    "{f}.index_put(({ix},), {f}[:1].clone(), accumulate=True)", "F.one_hot({i}.abs() % 5, 5)",
    "torch.zeros_like({f}).scatter_({d}, {gx}, 1.0)", "{m}.gather(1, {m}.argsort(dim=1, stable=True)[:1])",
)  # fmt: skip

WAITING: Final = (
    "{f}[{mask}]", "{a}[{rowmask}]", "{b}.nonzero()", "{x}.unique()", "{z}.item()", "bool({z})", "int({z})",
    "float({z})",
    "{f} * {f}.sum().item()", "torch.masked_select({f}, {mask})", "{v}.tolist()", "torch.equal({x}, {same})",
    "torch.unique_consecutive({x})", "torch.unique_consecutive({f}.detach().round())", "{x}.unique(return_counts=True)",
    "torch.where({b})", "{b}.nonzero(as_tuple=True)", "torch.argwhere({x})", "{f}.detach().round().unique()",
    "torch.bincount({i}.abs().flatten())", "torch.where({f} > 0)", "({f} > 0).nonzero()", "torch.allclose({f}, {same})",
)  # fmt: skip
"""Those of which the controller waits for values."""
