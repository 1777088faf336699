"""Checkpoints: trainings that go on, on meshes of other sizes and after a kill, as plain torch without a break."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

import trimesh
from trimesh import Actor, FailFast, MeshErrorGroup, ProcMesh, endpoint, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from tests.tensor.gpt import GPT, LENGTH, VOCABULARY, optimizer_of  # noqa: E402 - after the skip

from trimesh.tensor import ParallelPlan, load_checkpoint, save_checkpoint  # noqa: E402

pytestmark = [pytest.mark.real, pytest.mark.torch, pytest.mark.timeout(600)]  # a minute beside much other load

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")
STEPS, SAVED = 4, 2
COLUMNS, ROWS = ["*.q", "*.k", "*.v", "*.gate", "*.up", "*embed"], ["*.out", "*.down"]


def names(path: Path) -> list[str]:
    """Return what is in a directory, but for what a failure may leave there."""
    return sorted(one.name for one in path.iterdir() if not one.match(".*.unfinished"))


class Training:
    """A GPT with dropout, its optimizer, schedule and running average, here or on a mesh."""

    def __init__(self, mesh: ProcMesh | None = None, plan: ParallelPlan | None = None, inputs: Any = None) -> None:
        torch.manual_seed(0)
        self.mesh, self.inputs = mesh, inputs
        self.model: Any = nn.Sequential(GPT(layers=2), nn.Dropout(0.1))
        if mesh is not None:
            trimesh.module_to_mesh(self.model, mesh, plan)
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.optimizer = optimizer_of(self.model)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 3))
        self.done = 0
        self.losses: list[Any] = []
        if mesh is None:
            torch.manual_seed(7)
        else:
            trimesh.manual_seed(7, mesh)

    def put(self, tensor: Any) -> Any:
        return tensor if self.mesh is None else trimesh.distribute(tensor, self.mesh, self.inputs)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.done)
            text, goal = torch.randint(0, VOCABULARY, (2, 8, LENGTH), generator=generator)
            loss = nn.functional.cross_entropy(self.model(self.put(text)).flatten(0, 1), self.put(goal).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.average.update_parameters(self.model)
            self.losses.append(loss.detach())
            self.done += 1

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "average": self.average,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "done": self.done,
        }

    async def save(self, path: Path) -> None:
        await save_checkpoint(path, self.state(), self.mesh)

    async def load(self, path: Path) -> None:
        rest = await load_checkpoint(path, {**self.state(), "done": None}, self.mesh)
        self.done = rest["done"]

    async def values(self) -> tuple[Any, dict[str, Any]]:
        state = {**self.model.state_dict(), **{f"average.{k}": v for k, v in self.average.state_dict().items()}}
        if self.mesh is None:
            return torch.stack(self.losses), state
        return torch.stack(await trimesh.fetch(self.losses)), await trimesh.fetch(state)


def check_equal(found: tuple[Any, dict[str, Any]], twin: tuple[Any, dict[str, Any]], first: int = 0) -> None:
    assert torch.allclose(found[0], twin[0][first:], atol=1e-5)
    for name, value in twin[1].items():
        assert torch.allclose(found[1][name], value, atol=1e-5), name


@pytest.fixture(scope="module")
def unbroken() -> Training:
    """All steps by plain torch, at one go."""
    training = Training()
    training.run(STEPS)
    return training


async def test_a_training_goes_on_on_a_mesh_of_another_size(unbroken: Training, tmp_path: Path) -> None:
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        training = Training(procs, ParallelPlan.fully_sharded("dp"), ["dp", None])
        training.run(SAVED)
        await training.save(tmp_path / "saved")
        training.run(STEPS - SAVED)
        twin = await unbroken.values()
        check_equal(await training.values(), twin)
    assert names(tmp_path) == ["saved"]

    async with this_host().spawn_procs({"dp": 2, "tp": 2}, preload=PRELOAD) as procs:
        plan = ParallelPlan.tensor("tp", columns=COLUMNS, rows=ROWS) | ParallelPlan.fully_sharded("dp")
        training = Training(procs, plan, ["dp", None])
        await training.load(tmp_path / "saved")
        assert (training.done, training.schedule.last_epoch) == (SAVED, SAVED)
        weight: Any = training.model[0].blocks[0].mlp.up.weight
        assert await trimesh.placements(weight) == ["tp", "dp"]
        assert await trimesh.placements(training.optimizer.state[weight]["exp_avg"]) == ["tp", "dp"]
        training.run(STEPS - SAVED)
        check_equal(await training.values(), twin, SAVED)


class Process(Actor):
    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def test_a_training_goes_on_after_a_rank_was_killed(unbroken: Training, tmp_path: Path) -> None:
    plan, saved = ParallelPlan.fully_sharded("gpus"), tmp_path / "saved"
    with pytest.raises(BaseExceptionGroup) as caught:
        async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD, supervision=FailFast()) as procs:
            pids = await (await procs.spawn("processes", Process)).pid.call()
            training = Training(procs, plan, ["gpus", None])
            training.run(SAVED)
            await training.save(saved)
            training.run(1)
            os.kill(pids.item(gpus=1), signal.SIGKILL)
            await training.save(tmp_path / "never")
    assert caught.value.subgroup(trimesh.ProcDied) is not None
    assert names(tmp_path) == ["saved"]

    async with this_host().spawn_procs({"gpus": 1}, preload=PRELOAD) as procs:
        training = Training(procs, plan, ["gpus", None])
        await training.load(saved)
        training.run(STEPS - SAVED)
        check_equal(await training.values(), await unbroken.values(), SAVED)


@pytest.mark.daily
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of a process alone
async def test_torch_reads_checkpoints_and_writes_them(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    here = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2, bias=False))
    twin = copy.deepcopy(here)
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        model = trimesh.module_to_mesh(here, procs, {"0.*": None, "1.weight": [None, "gpus"]})
        optimizer = torch.optim.Adam(model.parameters())
        model(trimesh.replicate(torch.ones(4, 5), procs)).sum().backward()
        optimizer.step()
        extra = {"place": 3, "texts": ["a", "b"], "tensors": [torch.arange(3), {"b": torch.ones(2, 2)}]}
        await save_checkpoint(tmp_path / "ours", {"model": model, "optimizer": optimizer, "extra": extra})
        expected = await trimesh.fetch(model.state_dict())
        moments = await trimesh.fetch([optimizer.state[one]["exp_avg"] for one in model.parameters()])

        other = torch.optim.Adam(twin.parameters())
        twin(torch.zeros(4, 5)).sum().backward()
        other.step()
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model_state, optimizer_state = get_state_dict(twin, other)
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "extra": {"place": 0, "tensors": [torch.zeros(3).long(), {"b": torch.zeros(2, 2)}]},
        }
        dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
        set_state_dict(twin, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert all(torch.equal(value, expected[name]) for name, value in twin.state_dict().items())
        found = [other.state[one]["exp_avg"] for one in twin.parameters()]
        assert all(torch.equal(one, moment) for one, moment in zip(found, moments, strict=True))
        assert state["extra"]["place"] == 3
        assert torch.equal(state["extra"]["tensors"][0], torch.arange(3))

        with torch.no_grad():
            twin[1].weight.fill_(7.0)
        model_state, optimizer_state = get_state_dict(twin, other)
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state, "extra": extra}, checkpoint_id=tmp_path / "torch's"
        )
        rest = await load_checkpoint(tmp_path / "torch's", {"model": model, "optimizer": optimizer, "extra": None})
        assert model[1].weight.sum().item() == 7 * 6
        assert await trimesh.placements(model[1].weight) == [None, "gpus"]
        assert (rest["extra"]["place"], rest["extra"]["texts"]) == (3, ["a", "b"])
        assert torch.equal(rest["extra"]["tensors"][1]["b"], torch.ones(2, 2))


@pytest.mark.daily
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of a process alone
async def test_checkpoint_that_torch_wrote_on_python_3_13_is_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"some": {"ones": torch.ones(2)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    path = tmp_path / "saved" / ".metadata"
    written = pickle.dumps(pickle.loads(path.read_bytes()), 2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"cpathlib._local\nPosixPath\n" in written
    path.write_bytes(written)
    found = await load_checkpoint(tmp_path / "saved", {"some": None})
    assert torch.equal(found["some"]["ones"], torch.ones(2))


async def check_what_cannot_be_saved(procs: ProcMesh, path: Path) -> None:
    (path / "there").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="a path that does not exist"):
        await save_checkpoint(path / "there", {"a": 1})
    with pytest.raises(TypeError, match=r"as 'a\.b': give an object"):
        await save_checkpoint(path / "new", {"a": {"b": Path()}})
    with pytest.raises(ValueError, match="without dots"):
        await save_checkpoint(path / "new", {"a.b": 1})
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"parameters of sizes \[\(2,\)\] that are in none"):
        await save_checkpoint(path / "new", {"optimizer": torch.optim.SGD([weight])})
    with procs.activate():
        mine = torch.ones(2)
    with pytest.raises(TypeError, match=r"write t\.to_global"):
        await save_checkpoint(path / "new", {"mine": mine})
    good = trimesh.distribute(torch.arange(7.0), procs, ["gpus"])
    bad = torch.linalg.cholesky(trimesh.replicate(-torch.eye(2), procs))
    with pytest.raises(MeshErrorGroup) as caught:
        await save_checkpoint(path / "new", {"good": good, "bad": bad})
    assert caught.value.subgroup(torch.linalg.LinAlgError) is not None
    assert names(path) == ["there"]
    await save_checkpoint(path / "new", {"good": good, "empty": trimesh.distribute(torch.ones(0, 2), procs)})
    rest = await load_checkpoint(path / "new", {"good": None, "empty": None})
    assert torch.equal(rest["good"], torch.arange(7.0))
    assert rest["empty"].size() == (0, 2)


async def check_what_cannot_be_loaded(procs: ProcMesh, path: Path) -> None:
    model: Any = trimesh.module_to_mesh(nn.Linear(4, 2), procs, {"weight": ["gpus", None]})
    await save_checkpoint(path / "saved", {"model": model})
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        await load_checkpoint(path / "none", {"model": model})
    with pytest.raises(KeyError, match=r"has no 'other', it has \['model'\]"):
        await load_checkpoint(path / "saved", {"other": None})
    with pytest.raises(KeyError, match=r"\['extra'\] are missing"):
        extended = nn.Linear(4, 2)
        extended.register_buffer("extra", torch.ones(1))
        await load_checkpoint(path / "saved", {"model": extended})
    with pytest.raises(ValueError, match=r"model\.weight must have its size in the checkpoint, \(2, 4\), got \(2, 3\)"):
        await load_checkpoint(path / "saved", {"model": nn.Linear(3, 2)})
    before = model.bias.sum().item()
    with torch.no_grad():
        model.bias.add_(1)
    for file in (path / "saved").glob("__[12]_0.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(MeshErrorGroup):
        await load_checkpoint(path / "saved", {"model": model})
    assert abs(model.bias.sum().item() - before - 2) < 1e-5
    (path / "saved" / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"records of torch only, got builtins\.print"):
        await load_checkpoint(path / "saved", {"model": model})


async def test_errors_leave_everything_as_it_was(tmp_path: Path) -> None:
    async with this_host().spawn_procs({"gpus": 2}, preload=PRELOAD) as procs:
        await check_what_cannot_be_saved(procs, tmp_path / "saving")
        await check_what_cannot_be_loaded(procs, tmp_path / "loading")
