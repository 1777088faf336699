"""Tensors on a mesh: what one operation costs, and one recorded training step beside the same one in plain torch."""

from __future__ import annotations

import time
from typing import Any

from bench.scale import Metric, Samples, Scale

RANKS = 2

METRICS = [
    Metric("issue", "tensor operation, issued (2 ranks)", "us", goals=(100,)),
    Metric("done", "tensor operation, issued and executed", "us", goals=(166,)),
    Metric("bytes", "bytes to each rank for one operation", "B"),
    Metric("eager", "training step of a small transformer, eager", "ms"),
    Metric("recorded", "the same, recorded", "ms"),
    Metric("plain", "the same in the worker, by plain torch", "ms"),
    Metric("ratio", "recorded / plain", "x", goals=(1.3,)),
]


LACKS = dict.fromkeys(("ray", "xoscar"), "it has no tensors on a mesh")


def make_step(torch: Any) -> tuple[Any, Any]:
    """Return a small transformer and the function that trains it by one batch."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True),
        torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True),
        torch.nn.Linear(64, 64),
    )

    def step(x: Any, y: Any) -> Any:
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
        return loss

    return net, step


async def trimesh_side(scale: Scale) -> Samples:
    import torch
    import trio

    import trimesh
    from bench.workloads.tensor_actor import PlainTorch
    from trimesh import this_host

    found: Samples = {metric.name: [] for metric in METRICS}
    operations, steps = scale.calls, max(5, scale.calls // 20)
    async with this_host().spawn_procs({"procs": RANKS}, preload=("torch",)) as procs:
        with procs.activate():
            one = torch.ones(4, 4)
        value = one * one
        value.sum().item()
        for _ in range(5):
            before = _bytes_sent(procs)
            start = time.perf_counter()
            for _ in range(operations):
                value = value * one
            issued = time.perf_counter() - start
            value.sum().item()
            done = time.perf_counter() - start
            found["issue"].append(issued / operations * 1e6)
            found["done"].append(done / operations * 1e6)
            found["bytes"].append((_bytes_sent(procs) - before) / operations / RANKS)
            await trio.lowlevel.checkpoint()
        first = procs.slice(procs=0)
        net, step = make_step(torch)
        with first.activate():
            x, y = torch.rand(8, 32, 64), torch.rand(8, 32, 64)
            for module in net.modules():
                for name, parameter in list(module._parameters.items()):  # noqa: SLF001 - the way to exchange one
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(torch.tensor(parameter.tolist()))  # noqa: SLF001
        recorded = trimesh.compile(step)
        for _ in range(4):
            loss = recorded(x, y)
        loss.item()
        plain = await first.spawn("plain", PlainTorch)
        await plain.run.call_one(steps)
        for _ in range(5):
            for name, function in (("eager", step), ("recorded", recorded)):
                start = time.perf_counter()
                for _ in range(steps):
                    loss = function(x, y)
                loss.item()
                found[name].append((time.perf_counter() - start) / steps * 1e3)
            found["plain"].append(await plain.run.call_one(steps))
            found["ratio"].append(found["recorded"][-1] / found["plain"][-1])
    return found


def _bytes_sent(procs: Any) -> int:
    return sum(member.link.bytes_sent for member in procs.statistics().members if member.link is not None)


async def monarch_side(scale: Scale) -> Samples:
    import monarch
    import torch
    from monarch.actor import this_host

    found: Samples = {"issue": [], "done": []}
    operations = max(20, scale.calls // 4)
    procs = this_host().spawn_procs(per_host={"gpus": RANKS})  # it looks for this name
    with procs.activate():
        one = torch.ones(4, 4)
        value = one * one
        monarch.fetch_shard(value.sum(), gpus=0).result()
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(operations):
                value = value * one
            issued = time.perf_counter() - start
            monarch.fetch_shard(value.sum(), gpus=0).result()
            done = time.perf_counter() - start
            found["issue"].append(issued / operations * 1e6)
            found["done"].append(done / operations * 1e6)
    return found
