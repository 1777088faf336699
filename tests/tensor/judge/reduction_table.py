"""Operations that bring many elements together: lines of the table."""

from __future__ import annotations

from typing import Final

REDUCTIONS: Final = (
    "{x}.sum()", "{x}.sum({ds})", "{x}.sum({ds}, keepdim={k})", "{f}.mean()", "{f}.mean({ds})",
    "{f}.mean({ds}, keepdim={k})", "{n}.max()", "{n}.min()", "{n}.amax({ds})", "{n}.amin({ds}, keepdim={k})",
    "{n}.max({d})", "{n}.min({d}, keepdim={k})", "{x}.any()", "{x}.any({d})", "{x}.all()", "{x}.all({d})",
    "{b}.any({d}, keepdim={k})", "{product}.prod()", "{product}.prod({d})", "{n}.argmax()", "{n}.argmin({d})",
    "{n}.argmax({d}, keepdim={k})", "{f}.norm()", "{f}.norm(1, {d})", "{f}.norm(inf)", "{f}.norm(inf, {d})",
    "torch.linalg.vector_norm({f}, 2, {ds})", "{f}.var()", "{f}.var({ds})", "{f}.std({d})",
    "{f}.var({d}, correction=0)",
    "{x}.count_nonzero()", "{x}.count_nonzero({d})", "{f}.nansum({d})", "{f}.nanmean({d})", "{f}.logsumexp({ds})",
    "{f}.median()", "{f}.aminmax(dim={d})", "torch.var_mean({f}, {ds})", "torch.dist({f}, {same})",
    "{x}.sum({ds}, dtype=torch.float64)", "{b}.sum()", "{b}.sum({d})", "{b}.float().mean()", "({f} > 0).any().float()",
    "({f} > 0).sum() + 1", "0 + ({f} > 0).sum()", "({f} > 0).sum({d}).float()", "({f} > 0).any({d}) * 2",
)  # fmt: skip

# `torch.trapezoid` of no rows makes zeros of this process, as docs/reference/tensor-limits.md says.
CUMULATIVE: Final = (
    "{x}.cumsum({d})", "{n}.cumsum({d})", "{product}.cumprod({d})", "{f}.logcumsumexp({d})", "{n}.cummax({d})",
    "{n}.cummin({d})",
    "{f}.softmax({d})", "{f}.softmax({d})", "{f}.log_softmax({d})", "F.softmin({f}, {d})", "F.normalize({f}, dim={d})",
    "{x}.sort({d}, stable=True)", "{f}.sort({d}, descending=True, stable=True)", "{x}.argsort(dim={d}, stable=True)",
    "{a}.topk(1, {d})[0]", "{f}.sort({d})[0]", "{f}.kthvalue(1, {d})[0]",
    "{f}.median({d})[0]", "{f}.quantile(0.5, dim={d})", "torch.trapezoid({held}, dim={d})", "{f}.renorm(2, {d}, 1.0)",
    "{f}.msort()", "F.glu({f}, {d})", "{m}.cov()",
)  # fmt: skip

PRODUCTS: Final = (
    "{m} @ {right}", "{m} @ {right}", "{m} @ {m}.t()", "{m}.t() @ {m}", "torch.mm({m}, {right})", "{q} @ {right}",
    "torch.matmul({m}, {right})", "{v} @ {right}", "{v}.dot({v})", "torch.einsum('ij,ij->i', {m}, {same})",
    "torch.bmm({q}, {q}.mT)", "F.linear({f}, {linear})", "F.linear({m}, {linear}, {linear}[:, 0])",
    "torch.addmm({m}.t() @ {m}, {m}.t(), {m})", "torch.einsum('ij,kj->ik', {m}, {m})", "torch.mv({m}, {last})",
    "{m}.matmul({last})", "torch.cdist({m}, {same})", "{q}.sum(0) @ {right}", "torch.inner({v}, {v})",
    "torch.tensordot({m}, {m}, dims=([0], [0]))", "torch.linalg.matrix_norm({m})", "{m} @ {right} + {num}",
)  # fmt: skip

NETWORKS: Final = (
    "F.layer_norm({a}.double(), ({a}.shape[-1],))", "F.layer_norm({m}, {last}.shape, {last})",
    "F.rms_norm({f}, {f}.shape[-1:])",
    "F.embedding({i}, {table})", "F.embedding({i}, {table})",
    "F.embedding({i}, {table}) * 2 + F.embedding({i}, {table})",
    "F.mse_loss({f}, {same})", "F.l1_loss({f}, {same})", "F.cross_entropy({m}, {classes})",
    "F.smooth_l1_loss({f}, {same})",
    "F.cross_entropy({m}, {classes}, ignore_index=0)", "F.nll_loss({m}.log_softmax(1), {classes}, reduction='sum')",
    "F.binary_cross_entropy_with_logits({f}, {same}.sigmoid())", "F.kl_div({m}.log_softmax(1), {same}.softmax(1))",
    "F.scaled_dot_product_attention({q}, {q}, {q})", "F.scaled_dot_product_attention({q}, {q}, {q}, is_causal=True)",
    "F.conv1d({q}, {filters})", "F.conv1d({q}, {filters}, padding=1)", "F.avg_pool1d({q}, 2)", "F.max_pool1d({q}, 2)",
    "F.batch_norm({m}, None, None, training=True)", "F.group_norm({q}, 1)", "F.cosine_similarity({f}, {same}, dim=-1)",
    "F.interpolate({q}, scale_factor=2.0)", "F.huber_loss({f}, {same})", "F.mse_loss({f}, {same}, reduction='sum')",
    "F.adaptive_avg_pool1d({q}, 1)",
)  # fmt: skip
