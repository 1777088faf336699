"""Programs that use torch's operators, for the comparison of what they compute on the ranks and here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as torch's own documents call it
from tests.tensor.network_table import IN_PLACE, NETWORKS, PRODUCTS
from tests.tensor.operator_inputs import Inputs

Case = Callable[[Inputs], Any]

POINTWISE: dict[str, Case] = {
    "add": lambda t: torch.add(t.a, t.row, alpha=2),
    "sub": lambda t: t.a - t.column,
    "rsub": lambda t: 3 - t.a,
    "mul": lambda t: t.a * t.scalar * 2.5,
    "div": lambda t: t.a / t.positive,
    "div_mode": lambda t: torch.div(t.a, t.positive, rounding_mode="floor"),
    "floor_divide": lambda t: t.whole // t.other_whole,
    "remainder": lambda t: (t.a % 0.7, t.whole % t.other_whole),
    "fmod": lambda t: torch.fmod(t.a, t.positive),
    "pow": lambda t: (t.positive**t.a, t.a**3, 2.0**t.a),
    "addcmul": lambda t: torch.addcmul(t.a, t.b, t.c, value=0.3),
    "addcdiv": lambda t: torch.addcdiv(t.a, t.b, t.positive, value=0.3),
    "lerp": lambda t: (torch.lerp(t.a, t.b, 0.3), torch.lerp(t.a, t.b, t.share)),
    "neg": lambda t: -t.a,
    "abs": lambda t: t.a.abs(),
    "sign": lambda t: (t.a.sign(), t.complex.sgn()),
    "exp": lambda t: (t.a.exp(), t.a.exp2(), t.a.expm1()),
    "log": lambda t: (t.positive.log(), t.positive.log2(), t.positive.log10(), t.positive.log1p()),
    "sqrt": lambda t: (t.positive.sqrt(), t.positive.rsqrt(), t.positive.reciprocal(), t.a.square()),
    "trigonometric": lambda t: (t.a.sin(), t.a.cos(), t.inside.tan(), t.inside.asin(), t.inside.acos(), t.a.atan()),
    "hyperbolic": lambda t: (
        t.a.sinh(),
        t.a.cosh(),
        t.a.tanh(),
        t.a.asinh(),
        (t.positive + 1).acosh(),
        t.inside.atanh(),
    ),
    "atan2": lambda t: torch.atan2(t.a, t.b),
    "hypot": lambda t: torch.hypot(t.a, t.b),
    "error": lambda t: (t.a.erf(), t.a.erfc(), t.inside.erfinv()),
    "gamma": lambda t: (t.positive.lgamma(), t.positive.digamma(), torch.polygamma(1, t.positive)),
    "logit": lambda t: (t.share.logit(), torch.special.entr(t.share)),
    "bessel": lambda t: (torch.i0(t.a), torch.special.i1(t.a), torch.special.i0e(t.a)),
    "sinc": lambda t: torch.sinc(t.a),
    "round": lambda t: (t.a.round(), t.a.floor(), t.a.ceil(), t.a.trunc(), t.a.frac(), t.a.round(decimals=1)),
    "clamp": lambda t: (t.a.clamp(-0.5, 0.5), t.a.clamp(min=t.row), t.a.clamp_min(0.1), t.a.clamp_max(0.2)),
    "maximum": lambda t: (torch.maximum(t.a, t.b), torch.minimum(t.a, t.b), torch.fmax(t.a, t.b), torch.fmin(t.a, t.b)),
    "compare": lambda t: (t.a < t.b, t.a <= 0.1, t.a > t.b, t.a >= t.b, t.a == t.a, t.whole != t.other_whole),
    "logical": lambda t: (
        torch.logical_and(t.mask, t.other_mask),
        torch.logical_or(t.mask, t.other_mask),
        ~t.mask,
        torch.logical_xor(t.mask, t.other_mask),
        torch.logical_not(t.a),
    ),
    "bitwise": lambda t: (
        t.whole & t.other_whole,
        t.whole | 3,
        t.whole ^ t.other_whole,
        ~t.whole,
        t.whole << 2,
        t.whole >> t.other_whole,
    ),
    "integer": lambda t: (torch.gcd(t.whole, t.other_whole), torch.lcm(t.whole, t.other_whole)),
    "finite": lambda t: (t.a.isnan(), (t.a / 0).isinf(), t.a.isfinite(), (t.a / 0).isposinf(), (t.a / 0).nan_to_num()),
    "isclose": lambda t: torch.isclose(t.a, t.a + 1e-9),
    "where": lambda t: (torch.where(t.mask, t.a, t.b), torch.where(t.mask, t.a, 0.0), torch.where(t.mask, 1.0, t.a)),
    "masked_fill": lambda t: (t.a.masked_fill(t.mask, 0.5), t.a.masked_fill(t.mask, t.scalar)),
    "copysign": lambda t: (
        torch.copysign(t.a, t.b.detach()),
        torch.signbit(t.a),
        torch.heaviside(t.a.detach(), t.b.detach()),
        torch.xlogy(t.a, t.positive),
    ),
    "logaddexp": lambda t: (torch.logaddexp(t.a, t.b), torch.logaddexp2(t.a, t.b)),
    "ldexp": lambda t: (torch.ldexp(t.a, t.other_whole), torch.nextafter(t.a, t.b).detach(), torch.deg2rad(t.a)),
}

REDUCTIONS: dict[str, Case] = {
    "sum": lambda t: (t.a.sum(), t.a.sum(0), t.a.sum((0, 1), keepdim=True), t.whole.sum(1), t.mask.sum()),
    "mean": lambda t: (t.a.mean(), t.a.mean(1, keepdim=True), t.whole.mean(0, dtype=torch.float64)),
    "prod": lambda t: (t.a.prod(), t.a.prod(1)),
    "var": lambda t: (
        t.a.var(),
        t.a.var(0, correction=0),
        t.a.std(1),
        *torch.var_mean(t.a, 0),
        *torch.std_mean(t.a, 1),
    ),
    "extremes": lambda t: (
        t.a.max(),
        t.a.min(),
        *t.a.max(1),
        *t.a.min(0),
        t.a.amax(0),
        t.a.amin(1),
        *t.a.detach().aminmax(dim=1),
    ),
    "argmax": lambda t: (t.a.argmax(), t.a.argmin(1), t.a.argmax(0, keepdim=True)),
    "median": lambda t: (t.a.median(), *t.a.median(1), *t.whole.mode(1), *t.a.kthvalue(2, 1), t.a.nanmedian()),
    "quantile": lambda t: (t.a.quantile(0.3), t.a.quantile(0.5, dim=1)),
    "any": lambda t: (t.mask.any(), t.mask.all(1), t.mask.any(0), t.mask.all()),
    "logsumexp": lambda t: (t.a.logsumexp(1), t.a.nansum(0), t.a.nanmean(1), torch.count_nonzero(t.whole, 1)),
    "norms": lambda t: (
        t.a.norm(),
        t.a.norm(1, dim=0),
        torch.linalg.vector_norm(t.a, 3, dim=1),
        torch.linalg.matrix_norm(t.square),
        torch.dist(t.a, t.b),
        F.normalize(t.a),
    ),
    "cumulative": lambda t: (
        t.a.cumsum(1),
        t.a.cumprod(0),
        *t.a.cummax(1),
        *t.a.cummin(0),
        t.a.logcumsumexp(1),
        t.whole.cumsum(0),
    ),
    "diff": lambda t: (t.a.diff(), torch.trapezoid(t.a, dim=1), torch.cov(t.a), torch.corrcoef(t.a)),
    "histogram": lambda t: (t.a.detach().histc(3), torch.histc(t.a.detach(), 4, -1.0, 1.0)),
    "softmax": lambda t: (t.a.softmax(1), t.a.log_softmax(0), F.softmin(t.a, 1)),
    "sort": lambda t: (*t.a.sort(1, descending=True), *t.a.topk(2, 1), t.a.argsort(0), *torch.msort(t.a)),
    "search": lambda t: (
        torch.searchsorted(t.row.detach().sort().values, t.a.detach()),
        torch.bucketize(t.a.detach(), t.row.detach().sort().values),
    ),
    "isin": lambda t: torch.isin(t.whole, t.rows),
    "unfold": lambda t: (t.signal.unfold(2, 3, 2), torch.renorm(t.a, 2, 0, 1.0), torch.cdist(t.a, t.b), F.pdist(t.a)),
}

SHAPES: dict[str, Case] = {
    "view": lambda t: (
        t.a.view(2, 10),
        t.a.reshape(-1),
        t.a.t().reshape(20),
        t.a.flatten(),
        t.batch.flatten(1),
        t.a.unflatten(1, (5, 1)),
    ),
    "permute": lambda t: (
        t.batch.permute(2, 0, 1),
        t.batch.transpose(0, 2),
        t.a.t(),
        t.a.mT,
        torch.movedim(t.batch, 0, 2),
    ),
    "squeeze": lambda t: (t.column.squeeze(), t.column.squeeze(1), t.a.unsqueeze(1), t.volume.squeeze((0, 1))),
    "expand": lambda t: (
        t.column.expand(4, 5),
        t.row.repeat(3, 1),
        torch.tile(t.row, (2,)),
        t.row.expand_as(t.a),
        t.row.repeat_interleave(2),
    ),
    "cat": lambda t: (
        torch.cat([t.a, t.b]),
        torch.stack([t.a, t.b], 1),
        torch.hstack((t.a, t.b)),
        torch.vstack((t.a, t.row)),
        torch.dstack((t.a, t.b)),
    ),
    "split": lambda t: (
        *t.a.split(2),
        *t.a.chunk(2, 1),
        *t.a.split([1, 3]),
        *t.a.unbind(),
        *torch.tensor_split(t.a, 3, 1),
    ),
    "select": lambda t: (
        t.a[1],
        t.a[:, 2],
        t.a[-1, 1],
        t.a[1:3, ::2],
        t.a[..., None],
        t.a.select(0, 1),
        t.a.narrow(1, 1, 2),
    ),
    "index": lambda t: (t.a[[0, 2]], t.a[t.rows], t.a[[0, 1], [2, 3]], t.a[:, [1]], t.a[t.rows, 1:3], t.a[None, [0]]),
    "gather": lambda t: (
        t.a.gather(1, t.places),
        t.a.index_select(0, t.rows),
        t.a.take(t.places),
        torch.take_along_dim(t.a, t.places, 1),
    ),
    "scatter": lambda t: (
        t.a.scatter(1, t.places[:, :1], 0.5),
        t.a.scatter(1, t.places, t.b),
        t.a.scatter_add(1, t.places, t.b),
        t.a.scatter_reduce(1, t.places, t.b, "amax"),
    ),
    "index_put": lambda t: (
        t.a.index_put((t.rows,), t.b[:3]),
        t.a.index_put((t.rows,), t.row, accumulate=True),
        t.a.index_add(0, t.rows, t.b[:3]),
        t.a.index_copy(0, t.rows, t.b[:3]),
        t.a.index_fill(0, t.rows, 2.0),
    ),
    "scatter_views": lambda t: (
        torch.select_scatter(t.a, t.row, 0, 1),
        torch.slice_scatter(t.a, t.b[:2], 0, 1, 3),
        torch.diagonal_scatter(t.square, t.row),
    ),
    "masked": lambda t: (t.a.masked_scatter(t.mask, t.b), torch.where(t.mask, t.a, t.a.detach())),
    "flip": lambda t: (t.a.flip(0), t.a.roll(1, 1), t.a.rot90(), t.a.fliplr(), t.a.flipud()),
    "triangle": lambda t: (
        t.square.tril(),
        t.square.triu(1),
        t.square.diagonal(),
        t.row.diag_embed(),
        torch.diag(t.row),
        t.square.trace(),
        torch.block_diag(t.a, t.b),
    ),
    "vander": lambda t: (t.square.tril(-1).sum(), torch.vander(t.row.detach())),
    "padding": lambda t: (
        F.pad(t.a, (1, 2)),
        F.pad(t.image, (1, 1, 1, 1), "reflect"),
        F.pad(t.signal, (2, 1), "replicate"),
        F.pad(t.image, (1, 1, 1, 1), "circular"),
    ),
    "as_strided": lambda t: (
        t.a.as_strided((2, 3), (5, 1)),
        t.a.contiguous(),
        t.a.t().contiguous(),
        t.a.clone(memory_format=torch.contiguous_format),
    ),
    "broadcast": lambda t: (
        *torch.broadcast_tensors(t.row, t.column),
        *torch.meshgrid(t.row, t.channel, indexing="ij"),
        torch.cartesian_prod(t.row, t.channel),
    ),
    "pixels": lambda t: (F.pixel_shuffle(t.image, 2), F.pixel_unshuffle(t.image, 2), F.channel_shuffle(t.image, 2)),
    "memory": lambda t: (
        t.image.to(memory_format=torch.channels_last).contiguous(),
        t.image.contiguous(memory_format=torch.channels_last) * 2,
    ),
}

FACTORIES: dict[str, Case] = {
    "like": lambda t: (
        torch.zeros_like(t.a),
        torch.ones_like(t.a),
        torch.full_like(t.a, 2),
        t.a.new_zeros(3),
        t.a.new_full((2,), 1.5),
        t.a.new_ones(2, 2),
    ),
    "zeros": lambda t: (
        torch.zeros(2, 3) + t.scalar,
        torch.ones(3, dtype=torch.int32),
        torch.full((2,), 7),
        torch.eye(3),
        torch.eye(2, 3),
    ),
    "ranges": lambda t: (
        torch.arange(5),
        torch.arange(1.0, 2.0, 0.25),
        torch.linspace(0, 1, 5),
        torch.logspace(0, 1, 3),
    ),
    "windows": lambda t: (
        torch.hann_window(6),
        torch.hamming_window(6),
        torch.bartlett_window(5),
        torch.kaiser_window(5),
    ),
    "data": lambda t: (
        torch.tensor([1.0, 2.0]),
        torch.tensor(3),
        torch.as_tensor([[True]]),
        torch.scalar_tensor(2.0),
        torch.tensor([1 + 2j]),
    ),
    "indices": lambda t: (torch.tril_indices(3, 3), torch.triu_indices(3, 4), F.one_hot(t.classes, 5)),
}

DTYPES: dict[str, Case] = {
    "conversions": lambda t: (
        t.a.double(),
        t.a.to(torch.bfloat16),
        t.a.half().float(),
        t.a.detach().long(),
        t.whole.float(),
        t.mask.int(),
        t.bytes.bool(),
    ),
    "promotion": lambda t: (
        t.whole + t.a,
        t.whole / 2,
        t.mask + 1,
        t.bytes + t.whole,
        t.whole * 2.0,
        t.whole + t.scalar.double(),
    ),
    "view_dtype": lambda t: (t.a.detach().view(torch.int32), t.whole.view(torch.float64)),
    "complex": lambda t: (
        t.complex * 2j,
        t.complex.conj() * t.complex,
        t.complex.real,
        t.complex.imag,
        t.complex.abs(),
        t.complex.angle(),
        torch.view_as_real(t.complex),
        torch.polar(t.positive, t.a),
        torch.complex(t.a, t.b),
        t.complex.conj().imag,
        t.complex.mH,
    ),
    "fourier": lambda t: (
        torch.fft.fft(t.a),
        torch.fft.rfft(t.a),
        torch.fft.irfft(t.complex),
        torch.fft.fft2(t.a),
        torch.fft.ifft(t.complex),
        torch.fft.fftshift(t.a),
        torch.fft.hfft(t.complex),
    ),
    "bfloat16": lambda t: (t.a.bfloat16() + t.b.bfloat16(), t.a.bfloat16() @ t.long.bfloat16()),
    "quantiles_of_integers": lambda t: (
        t.whole.max(),
        t.whole.sort(1).values,
        t.whole.prod(1),
        t.whole.argmax(1),
        t.whole @ t.other_whole.T,
    ),
}

CASES: dict[str, Case] = {
    f"{group}: {name}": case
    for group, cases in {
        "pointwise": POINTWISE,
        "reductions": REDUCTIONS,
        "shapes": SHAPES,
        "factories": FACTORIES,
        "dtypes": DTYPES,
        "products": PRODUCTS,
        "networks": NETWORKS,
        "in place": IN_PLACE,
    }.items()
    for name, case in cases.items()
}
