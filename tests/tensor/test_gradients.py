"""Torch's autograd over mesh tensors gives the gradients that it gives here, whatever way it is used."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trimesh.tensor.controller.tensor import MeshTensor  # noqa: E402
from trimesh.tensor.controller.upload import upload  # noqa: E402
from trimesh.tensor.session.activation import active_team  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch]


class Cube(torch.autograd.Function):
    """A derivative of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Any, scale: float) -> Any:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x**3 * scale, x + 1

    @staticmethod
    def backward(ctx: Any, grad: Any, other: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2 * ctx.scale + other, None


def net() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def on_mesh(module: Any, put: Any) -> Any:
    """Return a copy of a module with its parameters on the ranks."""
    moved = copy.deepcopy(module)
    for part in moved.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = nn.Parameter(put(parameter.detach()))
        for name, buffer in list(part._buffers.items()):
            part._buffers[name] = put(buffer)
    return moved


def backward_accumulates(model: Any, x: Any) -> Any:
    for factor in (1.0, 0.5):
        (model(x).square().sum() * factor).backward()
    return [parameter.grad for parameter in model.parameters()]


def higher_order(model: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    [first] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    second = torch.autograd.grad(first.norm(), list(model.parameters()), create_graph=True, allow_unused=True)
    third = torch.autograd.grad(sum(one.square().sum() for one in second if one is not None), x)
    return [first, *second, *third]


def transforms(model: Any, x: Any) -> Any:
    def loss(row: Any) -> Any:
        return model(row).square().sum()

    return [
        torch.func.grad(loss)(x),
        torch.func.jacrev(model)(x[0]),
        torch.vmap(model)(x),
    ]


def tensor_hooks(model: Any, x: Any) -> Any:
    seen = []
    hidden = model[0](x)
    hidden.retain_grad()
    hidden.register_hook(lambda grad: seen.append(grad) or grad * 2)
    model[0].weight.register_hook(lambda grad: grad + 1)
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad * 3))
    model[1:](hidden).sum().backward()
    return [*seen, hidden.grad, *(parameter.grad for parameter in model.parameters())]


def module_hooks(model: Any, x: Any) -> Any:
    seen = []
    model[1].register_forward_hook(lambda module, args, output: output * 1.5)
    model[3].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    model[2].register_full_backward_hook(lambda module, grads, outputs: seen.extend([*grads, *outputs]))
    model(x.requires_grad_()).square().mean().backward()
    return [*seen, x.grad]


def checkpoints(model: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    checkpoint(model[:2], x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=True).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def function_of_the_user(model: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    cubed, moved = Cube.apply(x, 0.5)
    (model(cubed).sum() + moved.sum()).backward()
    return [cubed, moved, x.grad]


def without_gradients(model: Any, x: Any) -> Any:
    with torch.no_grad():
        first = model(x)
    with torch.inference_mode():
        second = model(x) @ model[3].weight
    assert not first.requires_grad
    assert second.is_inference()
    detached = model(x).detach()
    assert not detached.requires_grad
    frozen = model[0].weight.requires_grad_(False)
    model(x).sum().backward()
    assert frozen.grad is None
    return [first, second.clone(), detached, model[3].weight.grad]


def through_views(model: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    scratch = x * 2
    scratch[0] = x[1] * x[2]
    scratch[:, 1].mul_(3)
    scratch.view(-1)[::4].add_(x.flatten()[::4])
    rows = scratch.unbind()
    torch.cat([rows[0] * rows[1], rows[2]]).square().sum().backward()
    return [scratch, x.grad]


def clipping(model: Any, x: Any) -> Any:
    model(x).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    return [norm, *(parameter.grad for parameter in model.parameters())]


def parametrized(model: Any, x: Any) -> Any:
    nn.utils.parametrizations.weight_norm(model[0])
    model(x).square().sum().backward()
    return [model[0].weight, *(parameter.grad for parameter in model.parameters())]


def copied_and_converted(model: Any, x: Any) -> Any:
    twin = copy.deepcopy(model)
    assert isinstance(twin[0].weight, nn.Parameter)
    assert twin[0].weight is not model[0].weight
    with torch.no_grad():
        twin[0].weight.zero_()
    twin = twin.double()
    assert twin[0].weight.dtype is torch.float64
    twin(x.double()).square().sum().backward()
    twin[0].bias.data = twin[0].bias.data + 1
    return [model(x), twin(x.double()), *(parameter.grad for parameter in twin.parameters())]


def recurrent(model: Any, x: Any) -> Any:
    del model
    scan = torch.ones_like(x[0])
    total = 0
    for step in range(3):
        scan = torch.tanh(scan * x[step] + step)
        total = total + scan.sum() / (step + 1)
    return [total]


PROGRAMS = [
    backward_accumulates,
    higher_order,
    transforms,
    tensor_hooks,
    module_hooks,
    checkpoints,
    function_of_the_user,
    without_gradients,
    through_views,
    clipping,
    parametrized,
    copied_and_converted,
    recurrent,
]


async def compare(procs: Any, program: Any, model: Any, x: Any, *, is_active: bool = False) -> list[str]:
    """Return what differs between a program run here and on the ranks."""
    with procs.activate():
        team = active_team()
    there_model = on_mesh(model, lambda tensor: upload(tensor, team))
    expected = program(copy.deepcopy(model), x.clone())
    with procs.activate() if is_active else nullcontext():
        there = program(there_model, upload(x, team))
    wrong = []
    for index, (local, one) in enumerate(zip(expected, there, strict=True)):
        if local is None and one is None:
            continue
        assert isinstance(one, MeshTensor), f"{program.__name__} gave {one!r} at {index}"
        wrong += [
            f"{program.__name__} at {index}: {found} is not {local}"
            for found in (await trimesh.fetch(one)).values()
            if not torch.allclose(found, local.detach(), rtol=1e-4, atol=1e-6)
        ]
    return wrong


@pytest.mark.daily
async def test_gradients_on_ranks_equal_those_of_this_process() -> None:
    """No mesh is active, so that what torch makes on the way must find the ranks by itself."""
    torch.manual_seed(1)
    x = torch.randn(4, 5)
    wrong = []
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for program in PROGRAMS:
            wrong += await compare(procs, program, net(), x)
    assert wrong == []


@pytest.mark.daily
async def test_layers_of_torch_train_on_ranks_as_in_this_process() -> None:
    torch.manual_seed(2)
    layers = {
        "attention": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(2, 4, 8)),
        "memory": (nn.LSTM(5, 6, num_layers=2, batch_first=True), torch.randn(2, 3, 5)),
        "gates": (nn.GRU(5, 6), torch.randn(3, 2, 5)),
        "images": (
            nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
            torch.randn(2, 2, 8, 8),
        ),
    }

    def program(layer: Any, x: Any) -> Any:
        result = layer(x)
        result = result[0] if isinstance(result, tuple) else result
        result.square().mean().backward()
        return [result, *(parameter.grad for parameter in layer.parameters()), *layer.buffers()]

    wrong = []
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        for layer, x in layers.values():
            wrong += await compare(procs, program, layer, x, is_active=True)  # some make a first state of zeros
    assert wrong == []


@trimesh.remote
def powers(x: Any, exponent: int) -> Any:
    """Return a power, an integer, and another power."""
    return x**exponent, x.argmax(), x ** (exponent + 1)


# ---- one at a time ---------------------------------------------------------------------------------------------------


def branched(model: Any, x: Any) -> tuple[Any, list[Any]]:
    hidden = model[2](model[1](model[0](x)))
    cubed, moved = Cube.apply(hidden, 0.3)
    parts = (model[3](cubed) + hidden.mean()).unbind(1)
    loss = parts[0].sum() * parts[2].std() + torch.where(moved > 0, moved, 0.0).sum()
    return loss, [*model.parameters(), hidden, x]


@pytest.mark.parametrize("is_backwards", [False, True])
def test_grad_generator_yields_what_autograd_gives(is_backwards: bool) -> None:
    unused = torch.ones(1, requires_grad=True)
    loss, params = branched(net(), torch.randn(4, 5, requires_grad=True))
    params = [*params, unused][:: -1 if is_backwards else 1]
    expected = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)

    found = list(trimesh.grad_generator(loss, params))

    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-6)


def test_grad_generator_yields_the_dtypes_and_sizes_of_the_parameters() -> None:
    """Promoted and broadcast operands, real ones of complex results; a Function with arguments and outputs without."""
    seen: list[Any] = []

    class Parts(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, name: str, scale: Any, x: Any) -> Any:
            return x * 2, x.double().repeat(2), x * 3

        @staticmethod
        def backward(_: Any, first: Any, second: Any, third: Any) -> Any:
            seen.append([(one.dtype, tuple(one.size()), one.any().item()) for one in (first, second)])
            return None, None, third * 3

    half, single, double = (torch.randn(3, dtype=dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64))
    column = torch.randn(3, 1)
    params = [one.requires_grad_() for one in (half, single, double, column)]
    product = (half * single) * (double + column)  # of two dimensions
    turned = torch.polar(single, single.detach()) * double
    roots = [
        product.sum(),
        turned.abs().sum(),
        (turned * (1 + 2j)).real.sum(),
        Parts.apply("parts", torch.ones(1), single)[2].sum(),
    ]
    expected = torch.autograd.grad(roots, params, retain_graph=True)

    found = list(trimesh.grad_generator(roots, params))

    for one, other in zip(found, expected, strict=True):
        assert one is not None
        assert (one.dtype, one.size()) == (other.dtype, other.size())
        torch.testing.assert_close(one, other)
    assert seen == [[(torch.float32, (3,), False), (torch.float64, (6,), False)]] * 2


def test_grad_generator_computes_no_more_than_was_asked_for() -> None:
    executed = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, name: str) -> Any:
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            executed.append(ctx.name)
            return grad, None

    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    value = torch.ones(2)
    for index, weight in enumerate(weights):
        value = Noted.apply(value * weight, f"layer {index}")
    gradients = trimesh.grad_generator(value.sum(), weights[::-1])

    history = []
    for grad in gradients:
        assert torch.equal(grad, torch.ones(2))
        history.append(list(executed))

    assert history == [["layer 2"], ["layer 2", "layer 1"], ["layer 2", "layer 1", "layer 0"]]


def test_grad_generator_takes_gradients_of_roots_and_runs_hooks_of_parameters() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(lambda grad: grad * 10)
    roots = [weight * 2, (weight * 3).sum()]

    [found] = trimesh.grad_generator(roots, [weight], [torch.tensor([1.0, 2.0, 3.0]), None])

    assert found.tolist() == [50.0, 70.0, 90.0]


def test_grad_generator_refuses_what_has_no_gradient() -> None:
    weight = torch.ones(3, requires_grad=True)

    with pytest.raises(RuntimeError, match=r"one element .* got \(3,\): write grad_generator\(loss.sum\(\), params\)"):
        next(trimesh.grad_generator(weight * 2, [weight]))
    with pytest.raises(RuntimeError, match="require gradients"):
        next(trimesh.grad_generator(weight.sum(), [torch.ones(3)]))


async def test_grad_generator_walks_through_remote_functions() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            weight = torch.tensor([1.0, 3.0]).requires_grad_()
            squared, _, unused = powers(weight, 2)
            [found] = trimesh.grad_generator(squared.sum(), [weight])
        assert [one.tolist() for one in (await trimesh.fetch(found)).values()] == [[2.0, 6.0]] * 2
        assert unused.requires_grad


async def test_grad_generator_walks_through_two_meshes() -> None:
    torch.manual_seed(4)
    x = torch.randn(4, 5, requires_grad=True)
    loss, params = branched(net(), x)
    expected = torch.autograd.grad(loss, params)
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        first, second = procs.slice(gpus=0), procs.slice(gpus=1)
        with first.activate():
            here = active_team()
        with second.activate():
            there = active_team()
        model = on_mesh(net(), lambda tensor: upload(tensor, here))
        model[3] = on_mesh(net(), lambda tensor: upload(tensor, there))[3]

        start = upload(x.detach(), here).requires_grad_()
        hidden = model[2](model[1](model[0](start)))
        cubed, moved = Cube.apply(hidden.to_mesh(second), 0.3)
        parts = (model[3](cubed) + hidden.to_mesh(second).mean()).unbind(1)
        total = parts[0].sum() * parts[2].std() + torch.where(moved > 0, moved, 0.0).sum()
        found = [
            await trimesh.fetch_shard(one)
            for one in trimesh.grad_generator(total, [*model.parameters(), hidden, start])
        ]

    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


ZEROS: dict[str, Any] = {
    "normal of means": lambda x: torch.normal(x, 1.0) + x * 0,
    "normal of deviations": lambda x: torch.normal(0.0, x.abs()),
    "normal of both": lambda x: torch.normal(x, x.abs()) - torch.normal(x, x.abs()),
    "sgn": torch.sgn,
    "sgn in place": lambda x: (x * 2).sgn_(),
    "copysign": lambda x: torch.copysign(x.detach(), x),
    "nextafter": lambda x: torch.nextafter(x, x + 1),
    "repeated no times": lambda x: x.repeat(0),
}


@pytest.mark.daily
async def test_gradients_that_are_zeros_are_on_the_ranks() -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        with procs.activate():
            of_each_rank = torch.ones(6)
        for x in (of_each_rank, trimesh.distribute(torch.ones(6), procs, ["dp"])):
            for name, function in ZEROS.items():
                leaf = x.clone().requires_grad_()
                optimizer = torch.optim.SGD([leaf], 0.1, momentum=0.9)
                for _ in range(2):
                    function(leaf * 1 if name == "sgn" else leaf).sum().backward()
                    optimizer.step()
                grad, *_ = torch.autograd.grad(function(leaf).sum(), leaf)
                assert type(leaf.grad) is type(grad) is MeshTensor, name
                one = torch.ones(6, requires_grad=True)
                expected, *_ = torch.autograd.grad(function(one).sum(), one)
                found = await trimesh.fetch(grad)
                assert torch.equal(found if grad._meta.is_global else found.item(dp=0), expected), name


async def test_gradients_of_batch_norms_that_write_their_statistics() -> None:
    torch.manual_seed(2)
    given = [torch.randn(4, 3), torch.rand(3) + 1, torch.randn(3), torch.zeros(3), torch.ones(3)]
    normed = {
        "legit": lambda *args: torch.ops.aten._native_batch_norm_legit(*args, True, 0.1, 1e-5)[0],
        "with update": lambda *args: torch.ops.aten._batch_norm_with_update(*args, 0.1, 1e-5)[0],
        "of torch's front door": lambda x, w, b, m, v: nn.functional.batch_norm(x, m, v, w, b, training=True),
    }

    def gradients(function: Any, args: Any) -> Any:
        for one in args[:3]:
            one.requires_grad_()
        grads = torch.autograd.grad(function(*args).pow(2).sum(), args[:3])
        return [*grads, *args[3:]]

    async with this_host().spawn_procs({"dp": 2}, preload=("torch", "torch.distributed.tensor")) as procs:
        for name, function in normed.items():
            expected = gradients(function, [one.clone() for one in given])
            for layout in (["dp", None], [None, None]):
                there = [
                    trimesh.distribute(one, procs, layout[: one.ndim] if one.ndim > 1 else [None]) for one in given
                ]
                found = await trimesh.fetch(gradients(function, there))
                for one, other in zip(found, expected, strict=True):
                    assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), (name, layout)
