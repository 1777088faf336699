"""A recorded function computes what it would compute, and refuses what it cannot replay."""

from __future__ import annotations

import functools

import pytest
import trio

import trimesh
from trimesh import this_host

pytestmark = [pytest.mark.torch, pytest.mark.real]


class _Average:
    """State that each step makes anew from that of the step before."""

    value = None


def _make_step(net, optimizer, average):
    def step(x, y):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        seen = loss.detach()
        average.value = seen if average.value is None else average.value * 0.9 + seen
        return {"loss": loss, "grads": [p.grad for p in net.parameters()], "name": "step"}

    return step


@pytest.mark.daily
async def test_training_step_equals_its_local_twin_in_every_call():
    import torch

    torch.manual_seed(0)
    local = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    remote = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    average, local_average = _Average(), _Average()
    local_step = _make_step(local, optimizer, local_average)
    results = []
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            weights = [torch.nn.Parameter(torch.tensor(p.tolist())) for p in local.parameters()]
        for (module, name), weight in zip(_slots(remote), weights, strict=True):
            module._parameters[name] = weight
        remote_optimizer = torch.optim.SGD(remote.parameters(), lr=0.1, momentum=0.9)
        step = trimesh.compile(_make_step(remote, remote_optimizer, average))
        for number in range(7):
            x, y = torch.randn(5, 8), torch.randn(5, 4)
            expected = local_step(x, y)
            with procs.activate():
                x_there, y_there = torch.tensor(x.tolist()), torch.tensor(y.tolist())
            results.append((step(x_there, y_there), expected["loss"].item()))
            assert step.is_recorded is (number >= 2)
            assert results[-1][0]["name"] == "step"
            assert torch.allclose(await trimesh.fetch_shard(average.value, gpus=1), local_average.value, atol=1e-5)
            grad = await trimesh.fetch_shard(remote[0].weight.grad, gpus=0)  # whoever holds it sees the last one
            assert torch.allclose(grad, local[0].weight.grad, atol=1e-5)
            returned = await trimesh.fetch_shard(results[-1][0]["grads"][2], gpus=1)
            assert torch.allclose(returned, local[2].weight.grad, atol=1e-5)
        for result, expected in results:  # what an earlier call has returned is not written to by later ones
            assert abs(result["loss"].item() - expected) < 1e-5
        for one, other in zip(remote.parameters(), local.parameters(), strict=True):
            assert torch.allclose(await trimesh.fetch_shard(one, gpus=0), other, atol=1e-5)


def _slots(net):
    return [(module, name) for module in net.modules() for name in module._parameters]


@pytest.mark.daily
async def test_aliases_data_and_randomness_are_those_of_a_call():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            state = torch.zeros(4)
            row = state[1:2]  # a view: what is written through it is seen in the whole

        @trimesh.compile
        def step(x):
            table = torch.tensor([1.0, 2.0])  # data of the controller: each call has its own
            table += x
            row.add_(1)
            x.mul_(2)
            return table, torch.rand(3), x

        drawn = []
        with procs.activate():
            for number in range(5):
                x = torch.ones(2)
                table, random, same = step(x)
                assert (await trimesh.fetch_shard(table)).tolist() == [2.0, 3.0]
                assert (await trimesh.fetch_shard(x)).tolist() == [2.0, 2.0]
                assert (await trimesh.fetch_shard(same)).tolist() == [2.0, 2.0]
                same.add_(1)  # the same memory
                assert (await trimesh.fetch_shard(x)).tolist() == [3.0, 3.0]
                drawn.append(tuple((await trimesh.fetch_shard(random)).tolist()))
                assert (await trimesh.fetch_shard(state)).tolist() == [0.0, number + 1.0, 0.0, 0.0]
        assert len(set(drawn)) == 5


async def test_what_cannot_be_replayed_is_refused():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.ones(2, 3)

        def looks(x):
            return x * x.sum().item()

        def counts(x, calls=[]):  # noqa: B006 - a state of Python
            calls.append(None)
            return x * float(len(calls))

        def grows(x, calls=[]):  # noqa: B006
            calls.append(None)
            for _ in calls:
                x = x + x
            return x

        def chooses(x):
            return x[x > 0].sum()

        for function, text in (
            (
                looks,
                r"must not read values.*a value of what aten::sum returns, at .*test_recording\.py:\d+ in .*looks",
            ),
            (chooses, r"the size of what aten::index.Tensor returns, at .*test_recording\.py:\d+ in .*chooses"),
            (counts, "with 2.0 and then 3.0"),
            (grows, "and then aten::add"),
        ):
            recorded = trimesh.compile(function)
            recorded(x)
            with pytest.raises(trimesh.RecordingError, match=text):  # in the second call or in the third
                recorded(x)
                recorded(x)

        doubled = trimesh.compile(lambda x, factor: x * factor)
        for _ in range(4):
            assert doubled(x, 2.0).sum().item() == 12.0
        with pytest.raises(trimesh.RecordingError, match=r"float32\[2, 3\].*float32\[3\]"):
            doubled(x[0], 2.0)
        with pytest.raises(trimesh.RecordingError, match=r"float32\[2, 3\] on .*float32\[2, 3\] with strides \[1, 2\]"):
            doubled(x.t().contiguous().t(), 2.0)
        with pytest.raises(trimesh.RecordingError, match=r"2\.0.*3\.0"):
            doubled(x, 3.0)
        doubled.reset()
        for _ in range(4):
            assert doubled(x, 3.0).sum().item() == 18.0


class _Scaled:
    """What has a number among its attributes."""

    factor = 1.0

    def __init__(self):
        self.factor = 2.0

    def step(self, x):
        return _halved(x) * self.factor


_SETTINGS = {"divisor": 2.0}


def _halved(x):
    return x / _SETTINGS["divisor"]


async def test_a_number_around_the_function_that_changes_is_refused_not_ignored():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.ones(2)

        numbers = [3.0, 2.0, 1.0, 1.0, 1.0]
        popped = trimesh.compile(lambda x: x * numbers.pop())
        popped(x)
        popped(x)
        with pytest.raises(
            trimesh.RecordingError, match=r"numbers was \[3\.0, 2\.0, 1\.0\] before a call and \[3\.0, 2\.0\]"
        ):
            popped(x)

        scale = 2.0
        scaled = trimesh.compile(lambda x: sum(one * scale for one in (x,)))
        owner = _Scaled()
        method = trimesh.compile(owner.step)
        partly = trimesh.compile(functools.partial(torch.mul, other=scale))
        for _ in range(4):
            assert scaled(x).sum().item() == 4.0
            assert method(x).sum().item() == 2.0
            assert partly(x).sum().item() == 4.0
        scale = 3.0
        with pytest.raises(trimesh.RecordingError, match=r"recorded with scale=2\.0, and it is 3\.0 now"):
            scaled(x)
        scaled.reset()
        for _ in range(4):
            assert scaled(x).sum().item() == 6.0
        owner.factor = 5.0
        with pytest.raises(trimesh.RecordingError, match=r"self\.factor=2\.0, and it is 5\.0 now"):
            method(x)
        owner.factor = 2.0
        assert method(x).sum().item() == 2.0
        _SETTINGS["divisor"] = 4.0  # of a function that it calls
        try:
            with pytest.raises(trimesh.RecordingError, match="_SETTINGS"):
                method(x)
        finally:
            _SETTINGS["divisor"] = 2.0


_STEPS = {"size": 1.0}


@trimesh.compile
def _advanced(x):
    return x + _STEPS["size"]


async def test_libraries_leave_out_checks_of_values():
    import torch

    def step(x):
        if not torch.compiler.is_compiling() and (x < 0).any():
            raise ValueError("a check as libraries have them")
        return x + 1

    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.tensor([1.0, 2.0])
        compiled = trimesh.compile(step)
        for _ in range(4):
            assert compiled(x).tolist() == [2, 3]
    assert not torch.compiler.is_compiling()


@pytest.mark.daily
async def test_compiled_function_calls_another_in_a_loop():
    import torch

    def loop(x):
        for _ in range(3):
            x = _advanced(x)
        return x

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.zeros(2, requires_grad=True)
        advanced = trimesh.compile(loop)
        for _ in range(5):
            assert (await trimesh.fetch_shard(advanced(x).detach())).tolist() == [3.0, 3.0]
        assert advanced.is_recorded
        for _ in range(4):  # by itself it is recorded as if the loop had not been there
            assert (await trimesh.fetch_shard(_advanced(x).detach())).tolist() == [1.0, 1.0]
        assert _advanced.is_recorded
        gradient = trimesh.compile(lambda x: torch.autograd.grad(_advanced(x).pow(2).sum(), x)[0])
        for _ in range(5):
            assert (await trimesh.fetch_shard(gradient(x))).tolist() == [2.0, 2.0]
        _STEPS["size"] = 2.0  # read by the function that it calls
        try:
            with pytest.raises(trimesh.RecordingError, match="_STEPS"):
                advanced(x)
        finally:
            _STEPS["size"] = 1.0
            _advanced.reset()


async def test_compiled_functions_of_other_modules_are_part_of_the_recording():
    import torch

    library = {"__name__": "library", "STEP": 1.0}
    exec("def advance(x): return x + STEP", library)
    advance = trimesh.compile(library["advance"])
    inner = trimesh.compile(lambda x: advance(advance(x)))
    outer = trimesh.compile(lambda x: inner(x) * 2)
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            x = torch.zeros(2)
        alone = [advance(x) for _ in range(4)]
        for _ in range(5):
            assert (await trimesh.fetch_shard(outer(x))).tolist() == [4.0, 4.0]
        assert (outer.is_recorded, advance.is_recorded, inner.is_recorded) == (True, True, False)
        assert (await trimesh.fetch_shard(alone[3])).tolist() == [1.0, 1.0]
        library["STEP"] = 2.0
        for recorded in (advance, outer):
            with pytest.raises(trimesh.RecordingError, match=r"STEP=1\.0, and it is 2\.0 now"):
                recorded(x)


async def test_a_failure_within_a_replay_names_the_line_of_the_replay_and_poisons_its_results_only():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            table, good, bad = torch.arange(4.0), torch.tensor([1, 2]), torch.tensor([1, 9])
        pick = trimesh.compile(lambda index: (table[index], index + 1))
        for _ in range(3):
            pick(good)
        assert pick.is_recorded
        picked, more = pick(bad)
        with pytest.RaisesGroup(IndexError) as caught:
            await trimesh.fetch(picked)
        assert any("test_recording.py" in note for note in caught.value.exceptions[0].__notes__)
        assert (await trimesh.fetch_shard(more)).tolist() == [2, 10]
        again, _ = pick(good)
        assert (await trimesh.fetch_shard(again)).tolist() == [1.0, 2.0]
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("way", ["fused", "foreach", "capturable"])
async def test_optimizers_are_recorded_with_their_state(kind, way):
    import torch

    torch.manual_seed(0)
    local, remote = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    optimizer = getattr(torch.optim, kind)(local.parameters(), lr=0.01)

    def make(net, optimizer):
        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        with procs.activate():
            for name, parameter in list(local.named_parameters()):
                remote._parameters[name] = torch.nn.Parameter(torch.tensor(parameter.tolist()))
        remote_optimizer = getattr(torch.optim, kind)(remote.parameters(), lr=0.01, **{way: True})
        local_step, step = make(local, optimizer), trimesh.compile(make(remote, remote_optimizer))
        for _ in range(6):
            x = torch.randn(5, 8)
            with procs.activate():  # where optimizers make their counters
                there = step(torch.tensor(x.tolist()))
            assert abs(there.item() - local_step(x).item()) < 1e-5
        assert step.is_recorded


async def test_a_module_in_another_mode_is_refused_not_replayed():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        module = trimesh.module_to_mesh(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.9)), procs)
        step = trimesh.compile(lambda x: module(x).sum())
        x = trimesh.replicate(torch.ones(3, 2), procs)
        for _ in range(4):
            step(x)
        module.eval()
        with pytest.raises(trimesh.RecordingError, match=r"in train\(\), and it is in the other mode now"):
            step(x)


async def test_a_schedule_of_a_number_is_refused_not_ignored():
    import torch

    async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
        module = trimesh.module_to_mesh(torch.nn.Linear(2, 1), procs)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)

        @trimesh.compile
        def step(x):
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss

        x = trimesh.replicate(torch.ones(3, 2), procs)
        for _ in range(4):
            step(x)
            schedule.step()
        with pytest.raises(trimesh.RecordingError, match=r"recorded with lr=0.5 of SGD, and it is 0.05"):
            step(x)
