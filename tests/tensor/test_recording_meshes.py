"""Recorded functions that compute on several meshes, on views with ranks in common, in the stages of a pipeline."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra")


from tests.tensor.counting import commands_run, count_commands  # noqa: E402

import trimesh  # noqa: E402 - after the skip
from trimesh import MeshErrorGroup, ProcMesh, RecordingError, this_host  # noqa: E402
from trimesh.tensor import Pipeline, simulate  # noqa: E402 - after the skip

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing


class _Average:
    """State that each step makes anew from that of the step before, on all ranks."""

    value: Any = None

    def add(self, seen: Any) -> None:
        self.value = seen if self.value is None else self.value * 0.5 + seen


def linear(module: Any, mesh: ProcMesh) -> Any:
    """Return a layer with the numbers of another one, on a mesh."""
    made = nn.Linear(module.in_features, module.out_features)
    with mesh.activate():
        for name, parameter in module.named_parameters():
            setattr(made, name, nn.Parameter(torch.tensor(parameter.tolist())))
    return made


def on(mesh: ProcMesh, tensor: Any) -> Any:
    with mesh.activate():
        return torch.tensor(tensor.tolist())


@pytest.mark.real
async def test_a_step_on_two_meshes_and_their_views_equals_its_local_twin_in_every_call() -> None:
    torch.manual_seed(0)
    local = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.9)
    local_average, local_total = _Average(), 0.0
    async with (
        this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as one,
        this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as two,
    ):
        part = two.slice(gpus=0)
        first, last = linear(local[0], one), linear(local[2], part)
        remote_optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1, momentum=0.9)
        average, total = _Average(), on(two, torch.zeros(()))

        @trimesh.compile
        def step(x: Any, y: Any, factor: Any) -> dict[str, Any]:
            remote_optimizer.zero_grad()
            hidden = first(x).tanh().to_mesh(part)
            loss = ((last(hidden) - y) ** 2).mean()
            loss.backward()
            remote_optimizer.step()
            seen = loss.detach().to_mesh(two)  # from one rank of a view to all
            average.add(seen)
            total.add_(seen * factor)
            return {"loss": loss, "total": total.slice_mesh(gpus=1), "hidden": hidden.to_mesh(one)}

        results = []
        for number in range(6):
            x, y = torch.randn(3, 4), torch.randn(3, 2)
            optimizer.zero_grad()
            hidden = local[1](local[0](x))
            loss = ((local[2](hidden) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            local_average.add(loss.item())
            local_total += 2 * loss.item()
            found = step(on(one, x), on(part, y), on(two, torch.tensor(2.0)))
            assert step.is_recorded is (number >= 2)
            assert torch.allclose(await trimesh.fetch_shard(found["hidden"]), hidden, atol=1e-5)
            assert torch.allclose(await trimesh.fetch_shard(first.weight.grad), local[0].weight.grad, atol=1e-5)
            assert abs(average.value.item() - local_average.value) < 1e-4
            assert abs(found["total"].item() - local_total) < 1e-4
            results.append((found["loss"], loss.item()))
        for there, here in results:  # what an earlier call has returned is not written to by later ones
            assert abs(there.item() - here) < 1e-5
        assert torch.allclose(await trimesh.fetch_shard(last.weight), local[2].weight, atol=1e-5)


@pytest.mark.real
async def test_what_fails_in_a_replay_fails_on_other_meshes_and_in_that_call_alone() -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        left, right = procs.slice(gpus=0), procs.slice(gpus=1)

        @trimesh.compile
        def inverse(x: Any) -> Any:
            return torch.linalg.inv(x).to_mesh(right) * 2

        with left.activate():
            good, bad = torch.eye(2), torch.zeros(2, 2)
        for _ in range(3):
            assert inverse(good).sum().item() == 4
        failed, after = inverse(bad), inverse(good)
        with pytest.raises(MeshErrorGroup, match="could not be") as caught:
            await trimesh.fetch(failed)
        assert caught.group_contains(torch.linalg.LinAlgError)
        assert after.sum().item() == 4

        places = itertools.cycle([0, 1])
        everywhere = good.to_mesh(procs)
        for function, text in (
            (lambda x: x.slice_mesh(gpus=next(places)) + 1, r"same on procs\{.* and then on procs\{"),
            (lambda x: x.reshape(4 // (next(places) + 1), -1) + 1, "aten::view of another kind"),
        ):
            elsewhere = trimesh.compile(function)
            elsewhere(everywhere)
            with pytest.raises(RecordingError, match=text):
                elsewhere(everywhere)
                elsewhere(everywhere)
        inverse.reset()
        assert inverse(good).sum().item() == 4


def recorded_step(mesh: ProcMesh, modules: list[Any], schedule: Any) -> tuple[Pipeline, Any]:
    """Return a pipeline, and one step of it with its optimizers, which is recorded."""
    pipeline = Pipeline(modules, mesh, "pp", microbatches=4, schedule=schedule)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in pipeline.stages]

    @trimesh.compile
    def step(batches: list[Any], goals: list[Any]) -> Any:
        loss = pipeline.step(batches, goals, nn.functional.mse_loss)
        pipeline.clip_grad_norm_(0.5)
        for one in optimizers:
            one.step()
            one.zero_grad()
        return loss

    def cut(x: Any, y: Any) -> tuple[list[Any], list[Any]]:
        return [pipeline.put(0, one) for one in x.chunk(4)], [pipeline.put(-1, one) for one in y.chunk(4)]

    return pipeline, (step, cut)


@pytest.mark.real
async def test_a_recorded_pipeline_trains_as_plain_torch_does() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(8, 8) for _ in range(4)]
    twin = nn.Sequential(*copy.deepcopy(modules))
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    ran: list[int] = []
    async with this_host().spawn_procs(
        {"pp": 2}, preload=("torch", "torch.distributed.tensor"), setup=count_commands
    ) as procs:
        pipeline, (step, cut) = recorded_step(procs, modules, "interleaved")
        for number in range(5):
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            loss = step(*cut(x, y))
            expected = nn.functional.mse_loss(twin(x), y)
            expected.backward()
            nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            other.step()
            other.zero_grad()
            assert step.is_recorded is (number >= 2)
            assert abs(loss.item() - expected.item()) < 1e-5
            ran.append(max(await commands_run(procs)))
        assert ran[4] < ran[3] / 2, "ranks run what they have learnt of the parts of the first replay"
        assert torch.allclose(await trimesh.fetch(pipeline.stages[3].weight), twin[3].weight, atol=1e-5)
        with pytest.raises(ValueError, match="4 micro-batches and as many goals, got 1 and 1"):
            pipeline.step([x], [y], nn.functional.mse_loss)
        with pytest.raises(TypeError, match="got one of each"):
            pipeline.step([x], y, nn.functional.mse_loss)


def test_a_simulated_replay_does_what_the_call_did() -> None:
    with simulate({"pp": 2}) as mesh:
        _, (step, cut) = recorded_step(mesh, [nn.Linear(8, 8) for _ in range(2)], "1f1b")
        given = cut(torch.zeros(8, 8), torch.zeros(8, 8))
        seen = []
        for _ in range(5):
            mesh.begin_anew()
            kept = step(*given)
            report = mesh.report()
            seen.append((report.operators, report.moved_bytes, report.operations))
            del kept
        assert step.is_recorded
        assert seen[-1] == seen[-2] == seen[1]
        assert mesh.report().commands < 100  # parts of two views, not operations
