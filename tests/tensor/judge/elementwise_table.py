"""Operations on each element: lines of the table; `operands` says what fills their places."""

from __future__ import annotations

from typing import Final

POINTWISE: Final = (
    "-{n}", "{n}.abs()", "{f}.exp()", "{f}.tanh()", "{f}.relu()", "{f}.sigmoid()", "{f}.sin()", "{f}.sqrt()",
    "{f}.square()", "{f}.log1p()", "{f}.nan_to_num()", "{f}.round()", "{f}.floor()", "{f}.frac()", "{f}.sign()",
    "{f}.clamp(-1.0, 0.75)", "{f}.clamp(max={num})", "{n}.clamp(min={s})", "{f}.isnan()", "{f}.isfinite()",
    "{f}.reciprocal()", "{f}.erf()", "F.gelu({f})", "F.silu({f})", "F.elu({f})", "F.softplus({f})",
    "F.leaky_relu({f}, 0.25)", "F.hardtanh({f})", "{x}.clone()", "{x}.detach()", "{x}.contiguous()",
    "{f}.pow(2)", "{f} ** 3", "{f}.trunc()", "{x}.logical_not()", "{f}.expm1()", "{f}.cos()", "{f}.rsqrt()",
)  # fmt: skip

BINARY: Final = (
    "{n} + {y}", "{n} - {y}", "{x} * {y}", "{n} / {y}", "torch.maximum({n}, {y})", "torch.minimum({n}, {y})",
    "torch.add({n}, {y}, alpha=2)", "torch.where({mask}, {x}, {y})", "torch.lerp({f}, {same}, 0.25)",
    "torch.addcmul({f}, {same}, {same2}, value=0.5)", "torch.addcdiv({f}, {same}, {same2}, value=0.5)",
    "torch.fmax({f}, {y})", "torch.atan2({f} + 0.0, {same} + 0.0)", "torch.hypot({f}, {same})",
    "torch.logaddexp({f}, {same})", "torch.copysign({f}, {same}.nan_to_num() + 0.0)", "{i} // {y}", "{i} % {y}",
    "{i} & {y}", "{b} | {y}", "{b} ^ {y}", "torch.where({b}, {y}, {y2})", "{f}.masked_fill({mask}, {num})",
    "torch.sub({f}, {y}, alpha=0.5)", "torch.floor_divide({n}, {y})", "torch.fmod({f}, {y})",
)  # fmt: skip

SCALARS: Final = (
    "{x} + {s}", "{s} + {x}", "{n} - {s}", "{s} - {n}", "{x} * {s}", "{s} * {x}", "{n} / {s}", "{s} / {n}",
    "torch.div({num}, {n})", "torch.add({num}, {n})", "torch.mul({num}, {n})", "torch.sub({num}, {n})",
    "torch.rsub({n}, {num})", "{n} ** {s}", "{num} ** {f}", "{n} // {s}", "{n} % {s}",
    "torch.where({mask}, {f}, {s})", "torch.where({mask}, {num}, {f})", "torch.where({mask}, {num}, {num2})",
    "{f}.masked_fill({mask}, {s})", "torch.add({f}, {s}, alpha=2)", "torch.maximum({f}, {z})",
    "{f}.clamp(min={z})", "torch.lerp({f}, {same}, {z})", "torch.div({n}, {s}, rounding_mode='floor')",
    "{z} + {z2}", "{z} * {z2}", "{z} / {z2}", "{z} - 2.0", "{z} + 3", "1 - {z}", "{z} * 2", "{z} / 2", "2 / {z}",
    "sum([{z}, {z2}])", "{z}.expand(3) * 2", "{z}.view(1)", "{z}.view(1).expand(3).sum()",
)  # fmt: skip

COMPARISONS: Final = (
    "{x} == {y}", "{x} != {y}", "{n} < {y}", "{n} >= {y}", "{n} > {s}", "{n} <= {s}", "{x} == {s}", "{x} != {s}",
    "{s} < {n}", "torch.isclose({f}, {same})", "torch.logical_and({x}, {y})", "torch.logical_xor({x}, {y})",
    "~{b}", "{b} & {mask}", "{b}.float()", "{b}.long() * 3", "{b} * 2", "{b} / 2", "{b} + {b2}", "{b} & True",
)  # fmt: skip

CASTS: Final = (
    "{x}.to({dtype})", "{x}.double()", "{x}.float()", "{x}.bfloat16()", "{x}.long()", "{x}.bool()", "{x}.int()",
    "{x}.type_as({y})", "{x}.to({dtype}, copy=True)", "{f}.double() + {f2}", "{n} * {n2}.sum()",
)  # fmt: skip

FACTORIES: Final = (
    "torch.zeros_like({x})", "torch.ones_like({x})", "torch.full_like({f}, {num})",
    "torch.empty_like({f}).fill_({num})",
    "{x}.new_zeros({x}.shape)", "{x}.new_ones({x}.shape)", "{f}.new_full({f}.shape, {num})", "{f}.new_ones(3)",
    "{f}.new_full((2, 3), 1.5)", "{f}.new_tensor(3.0)", "{f} + {f}.new_ones({f}.shape)",
    "{f}.new_empty({f}.shape).fill_({num})", "torch.zeros_like({f}, dtype=torch.int64)", "{f}.new_zeros(2, 4).sum(0)",
    "torch.ones_like({f}) * {f}", "torch.zeros_like({f}) + {f}",
)  # fmt: skip

MAKING: Final = (
    "torch.zeros(2, 3)", "torch.ones(4, dtype=torch.float64)", "torch.arange(6.0)", "torch.eye(3)",
    "torch.full((2,), 7)",
    "torch.linspace(0, 1, 5)", "torch.tensor([1.0, 2.0, 4.0])", "torch.rand(2, 3)", "torch.randn(4)",
    "torch.randint(0, 5, (3,))", "torch.triu(torch.ones(4, 4))", "torch.randperm(5)", "torch.tensor(2.5)",
)  # fmt: skip
"""Where each rank has tensors of its own: tensors made of nothing."""

RANDOM: Final = (
    "F.dropout({f}, 0.5)", "F.dropout({f}, 0.25)", "torch.rand_like({f})", "torch.randn_like({f})",
    "torch.randint_like({f}, 5)", "torch.bernoulli({f}.sigmoid())", "{f}.clone().normal_()", "{f}.clone().uniform_()",
    "F.dropout({f}, 0.5, training=False)", "{f}.clone().bernoulli_(0.5)", "torch.empty_like({f}).exponential_()",
    "F.dropout1d({q}, 0.5)", "F.alpha_dropout({f}, 0.5)", "{f} + torch.rand_like({f})",
)  # fmt: skip
