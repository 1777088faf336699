"""Programs of products, layers and changes in place, for the comparison of operators: see `operator_table`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documents call it
from tests.tensor.operator_inputs import Inputs

Case = Callable[[Inputs], Any]

PRODUCTS: dict[str, Case] = {
    "matmul": lambda t: (
        t.a @ t.long,
        t.a @ t.row,
        t.row @ t.long,
        t.batch @ t.batch2,
        t.batch @ t.a,
        torch.dot(t.row, t.other_row),
    ),
    "mm": lambda t: (
        torch.mm(t.a, t.long),
        torch.mv(t.a, t.row),
        torch.bmm(t.batch, t.batch2),
        torch.outer(t.row, t.channel),
    ),
    "addmm": lambda t: (
        torch.addmm(t.bias6[:3], t.a, t.long, beta=0.5, alpha=2),
        torch.addmv(t.channel, t.a, t.row),
        torch.addbmm(t.a[:3, :5], t.batch, t.batch2),
        torch.baddbmm(t.scalar.expand(2, 3, 5), t.batch, t.batch2),
        torch.addr(t.a, t.channel, t.row),
    ),
    "einsum": lambda t: (
        torch.einsum("ij,kj->ik", t.a, t.b),
        torch.einsum("bij,bjk->bik", t.batch, t.batch2),
        torch.einsum("ii", t.square),
    ),
    "tensordot": lambda t: (
        torch.tensordot(t.a, t.b, dims=2),
        torch.kron(t.a, t.long),
        torch.cross(t.a[:, :3], t.b[:, :3], dim=1),
        torch.inner(t.a, t.b),
    ),
    "linear": lambda t: (
        F.linear(t.a, t.long.T),
        F.linear(t.a, t.long.T, t.bias6[:3]),
        F.bilinear(t.a, t.b, t.batch2[:, :, :1].expand(2, 4, 5)[:1].expand(1, 4, 5)[:, :1].expand(1, 5, 5)),
    ),
    "chain": lambda t: (
        torch.linalg.multi_dot([t.a, t.square, t.long]),
        torch.matrix_power(t.square, 3),
        torch.matrix_exp(t.square * 0.1),
    ),
    "factorizations": lambda t: (
        torch.linalg.cholesky(t.definite),
        *torch.linalg.qr(t.long),
        torch.linalg.svdvals(t.long),
        torch.linalg.eigvalsh(t.definite),
        *torch.linalg.lu_factor(t.definite),
        torch.linalg.svd(t.long, full_matrices=False).S,
    ),
    "solving": lambda t: (
        torch.linalg.solve(t.definite, t.long),
        torch.linalg.inv(t.definite),
        torch.linalg.det(t.definite),
        *torch.linalg.slogdet(t.definite),
        torch.logdet(t.definite),
        torch.linalg.pinv(t.long),
        torch.cholesky_solve(t.long, torch.linalg.cholesky(t.definite)),
        torch.linalg.solve_triangular(t.definite.tril(), t.long, upper=False),
        torch.linalg.matrix_rank(t.definite.detach()),
    ),
}

NETWORKS: dict[str, Case] = {
    "rectified": lambda t: (
        t.a.relu(),
        F.leaky_relu(t.a),
        F.elu(t.a),
        F.selu(t.a),
        F.celu(t.a),
        F.relu6(t.a),
        F.prelu(t.a, t.scalar.reshape(1)),
        F.threshold(t.a, 0.1, 0.2),
    ),
    "smooth": lambda t: (
        F.gelu(t.a),
        F.gelu(t.a, approximate="tanh"),
        F.silu(t.a),
        F.mish(t.a),
        F.softplus(t.a),
        F.softsign(t.a),
        t.a.sigmoid(),
        F.logsigmoid(t.a),
        F.tanhshrink(t.a),
    ),
    "hard": lambda t: (
        F.hardtanh(t.a),
        F.hardswish(t.a),
        F.hardsigmoid(t.a),
        F.hardshrink(t.a),
        F.softshrink(t.a),
        F.glu(t.image),
    ),
    "convolutions": lambda t: (
        F.conv1d(t.signal, t.filters1),
        F.conv2d(t.image, t.filters, t.bias6, stride=2, padding=1),
        F.conv3d(t.volume, t.filters3),
        F.conv2d(t.image, t.filters, dilation=2),
        F.conv_transpose2d(t.image, t.up_filters, stride=2),
        F.conv2d(t.image, t.filters[:4, :1], groups=4),
        F.unfold(t.image, 3),
        F.fold(F.unfold(t.image, 2, stride=2), (8, 8), 2, stride=2),
    ),
    "pooling": lambda t: (
        F.max_pool2d(t.image, 2),
        *F.max_pool2d(t.image, 3, 1, 1, return_indices=True),
        F.avg_pool2d(t.image, 2),
        F.adaptive_avg_pool2d(t.image, 3),
        F.adaptive_max_pool2d(t.image, 3),
        F.max_pool1d(t.signal, 2),
        F.avg_pool1d(t.signal, 2),
        F.lp_pool2d(t.image.abs() + 0.1, 2, 2),
        F.max_pool3d(t.volume, 2),
        F.avg_pool3d(t.volume, 2),
        F.adaptive_avg_pool1d(t.signal, 3),
    ),
    "resampling": lambda t: (
        F.interpolate(t.image, scale_factor=2),
        F.interpolate(t.image, size=(5, 5), mode="bilinear"),
        F.interpolate(t.image, size=(5, 5), mode="bicubic"),
        F.interpolate(t.signal, size=7, mode="linear"),
        F.grid_sample(t.image, t.image[:, :2, :4, :4].permute(0, 2, 3, 1).tanh(), align_corners=False),
        F.affine_grid(t.batch[:, :2, :3], [2, 1, 3, 3], align_corners=False),
    ),
    "norms_of_layers": lambda t: (
        F.layer_norm(t.a, (5,), t.row, t.other_row),
        F.group_norm(t.image, 2, t.channel, t.channel),
        F.instance_norm(t.image),
        F.rms_norm(t.a, (5,)),
        F.local_response_norm(t.image, 2),
        F.batch_norm(t.image, t.channel.detach().clone(), t.channel.detach().abs() + 1, training=True),
        F.batch_norm(t.image, t.channel.detach(), t.channel.detach().abs() + 1),
    ),
    "attention": lambda t: (
        F.scaled_dot_product_attention(t.query, t.key, t.value),
        F.scaled_dot_product_attention(t.query, t.key, t.value, is_causal=True),
        F.scaled_dot_product_attention(t.query, t.key, t.value, attn_mask=t.query[0, 0, :, :6] > 0.0),
    ),
    "embedding": lambda t: (
        F.embedding(t.words, t.table),
        F.embedding(t.words, t.table, padding_idx=3),
        F.embedding_bag(t.words.flatten(), t.table, t.rows),
    ),
    "distances": lambda t: (
        F.cosine_similarity(t.a, t.b),
        F.pairwise_distance(t.a, t.b),
        F.triplet_margin_loss(t.a, t.b, t.c),
    ),
    "losses": lambda t: (
        F.mse_loss(t.a, t.b),
        F.l1_loss(t.a, t.b),
        F.smooth_l1_loss(t.a, t.b),
        F.huber_loss(t.a, t.b),
        F.binary_cross_entropy(t.share, t.mask.float()),
        F.binary_cross_entropy_with_logits(t.a, t.share),
        F.kl_div(t.a.log_softmax(1), t.b.softmax(1), reduction="batchmean"),
        F.poisson_nll_loss(t.a, t.positive),
        F.gaussian_nll_loss(t.a, t.b, t.positive),
        F.soft_margin_loss(t.a, t.b.sign().detach()),
    ),
    "class_losses": lambda t: (
        F.cross_entropy(t.logits, t.classes),
        F.cross_entropy(t.logits, t.classes, label_smoothing=0.1, ignore_index=2),
        F.nll_loss(t.logits.log_softmax(1), t.classes),
        F.multi_margin_loss(t.logits, t.classes),
        F.multilabel_soft_margin_loss(t.a, t.mask.float()),
        F.hinge_embedding_loss(t.a, t.mask * 2 - 1),
        F.cosine_embedding_loss(t.a, t.b, torch.ones_like(t.places[:, 0])),
        F.margin_ranking_loss(t.a, t.b, t.mask * 2 - 1),
    ),
    "cells": lambda t: (
        torch.nn.utils.parameters_to_vector([t.a, t.row]),
        torch.logsumexp(t.batch, (1, 2)),
        t.batch.cumsum(-1).tanh(),
    ),
}


def _in_place(*changes: Callable[[torch.Tensor, Inputs], Any]) -> Case:
    """Return a case in which each change is made to a copy of `a`."""

    def run(t: Inputs) -> Any:
        results = []
        for change in changes:
            copy = t.a.clone()
            change(copy, t)
            results.append(copy)
        return results

    return run


def _set(copy: torch.Tensor, place: Any, value: Any) -> None:
    copy[place] = value


IN_PLACE: dict[str, Case] = {
    "arithmetic_": _in_place(
        lambda x, t: x.add_(t.b),
        lambda x, t: x.mul_(2).sub_(t.row),
        lambda x, t: x.div_(t.positive),
        lambda x, t: x.addcmul_(t.b, t.c),
        lambda x, t: x.addcdiv_(t.b, t.positive),
        lambda x, t: x.neg_().exp_(),
        lambda x, t: x.clamp_(-0.3, 0.3),
        lambda x, t: x.sigmoid_(),
        lambda x, t: x.lerp_(t.b, 0.2),
        lambda x, t: x.pow_(2),
    ),
    "assignment_": _in_place(
        lambda x, t: x.copy_(t.row),
        lambda x, t: x.zero_(),
        lambda x, t: x.fill_(2.5),
        lambda x, t: x.masked_fill_(t.mask, 0),
        lambda x, t: x.fill_diagonal_(1.0),
        lambda x, t: x.relu_(),
    ),
    "items_": _in_place(
        lambda x, t: _set(x, 1, t.row),
        lambda x, t: _set(x, (slice(None), 2), 0.0),
        lambda x, t: _set(x, t.mask, -1.0),
        lambda x, t: _set(x, [0, 2], t.b[:2]),
        lambda x, t: _set(x, (t.rows, 1), 3.0),
        lambda x, t: _set(x, (..., 0), t.channel),
    ),
    "indices_": _in_place(
        lambda x, t: x.index_add_(0, t.rows, t.b[:3]),
        lambda x, t: x.scatter_(1, t.places[:, :1], 1.0),
        lambda x, t: x.scatter_add_(1, t.places, t.b),
        lambda x, t: x.index_copy_(0, t.rows, t.b[:3]),
        lambda x, t: x.index_fill_(1, t.rows, 0.0),
        lambda x, t: x.masked_scatter_(t.mask, t.b),
    ),
    "through_views_": _in_place(
        lambda x, t: x[0].mul_(3),
        lambda x, t: x.view(-1)[::3].zero_(),
        lambda x, t: x.t()[1].add_(t.channel),
        lambda x, t: x[:, 1:3].copy_(t.b[:, 1:3]),
        lambda x, t: x.narrow(0, 1, 2).neg_(),
        lambda x, t: x.diagonal().fill_(0.0),
    ),
    "shapes_": lambda t: (
        t.a.clone().unsqueeze_(0),
        t.column.clone().squeeze_(1) * t.channel,
        t.a.clone().t_() @ t.b,
        t.batch.clone().transpose_(0, 2) * 2,
        t.column.clone().squeeze_(),
        t.a.clone().swapaxes_(0, 1),
    ),
    "out": lambda t: (
        torch.add(t.a.detach(), t.b.detach(), out=torch.empty_like(t.a)),
        torch.mm(t.a.detach(), t.long.detach(), out=torch.empty(4, 3)),
        torch.sum(t.a.detach(), 0, out=torch.empty(5)),
        *torch.max(t.a.detach(), 1, out=(torch.empty(4), torch.empty(4, dtype=torch.int64))),
    ),
    "foreach": lambda t: (
        *torch._foreach_add([t.a, t.b], 1.0),
        *torch._foreach_mul([t.a, t.b], [t.c, t.c]),
        *torch._foreach_norm([t.a, t.b]),
        *torch._foreach_sqrt([t.positive]),
        *torch._foreach_addcdiv([t.a], [t.b], [t.positive], 0.5),
    ),
}
