"""Values at the controller: what waits, how that ends, and what is refused instead (N2)."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import signal
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.patience import HANG_SECONDS
from tests.program_template import Run

import trimesh
from trimesh import MeshErrorGroup, ProcMesh, ShapeError, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


async def test_values_without_await() -> None:
    """N2."""
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",)) as procs:
        with procs.activate():
            t = torch.arange(6.0).view(2, 3)
            differs = torch.arange(4.0) * own_place(procs)
        check_numbers(t)
        check_text(t, differs)
        check_containers(t)
        check_ranks_that_differ(differs)
        check_shapes_that_follow_from_values(t, differs)
        await check_looks_with_await(t, differs)
        await check_deadline(t)
        await check_threads(procs, t)
        await check_seeds(procs)


def own_place(procs: ProcMesh) -> Any:
    """Return 0 on the first rank and 1 on the second."""
    from trimesh.tensor.controller.team import call_kernel
    from trimesh.tensor.session.opening import team_of

    team = team_of(procs, "for tests:")
    meta = team.engine.shapes.meta((), (), torch.int64, torch.device("cpu"))
    return call_kernel(team, "index", "gpus", outputs=[meta])[0]


def check_numbers(t: Any) -> None:
    assert t.sum().item() == 15.0
    assert t.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (float(t.max()), int(t.max()), bool(t.max()), complex(t.max())) == (5.0, 5, True, 5 + 0j)
    assert ["a", "b", "c"][(t.sum() * 0 + 2).long()] == "c"
    assert (t == t + 0).all()
    assert not (t == t + 1).any()
    assert torch.equal(t, t + 0)
    assert not torch.equal(t, t + 1)
    assert not torch.equal(t, t[0])
    assert torch.allclose(t, t + 1e-9)
    assert not torch.allclose(t, t + 1)
    assert 3.0 in t
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(t)


def check_text(t: Any, differs: Any) -> None:
    assert repr(t) == "<tensor float32[2, 3] on procs{'gpus': 2}>"
    assert str(t) == f"{t!r}, the same on every rank\n{torch.arange(6.0).view(2, 3)}"
    assert str(differs) == f"{differs!r}\n[gpus=0]\ntensor([0., 0., 0., 0.])\n[gpus=1]\ntensor([0., 1., 2., 3.])"
    assert f"{t.sum():.2f} {t.sum()}" == "15.00 15.0"
    assert f"{differs.sum()}" == f"{differs.sum()!r}\n[gpus=0]\n0.0\n[gpus=1]\n6.0"


def check_containers(t: Any) -> None:
    assert (len(t), t.shape, t.ndim, t.numel(), t.dtype, t.device.type) == (2, (2, 3), 2, 6, torch.float32, "cpu")
    assert [row.tolist() for row in t] == [[0, 1, 2], [3, 4, 5]]
    copied, alias = copy.deepcopy(t), copy.copy(t)
    alias += 1
    assert (t.tolist(), copied.tolist()) == ([[1, 2, 3], [4, 5, 6]], [[0, 1, 2], [3, 4, 5]])
    alias -= 1
    with pytest.raises(TypeError, match="change the shape of a mesh tensor"):
        t.clone().resize_(3, 3)
    for refused in (t.numpy, t.data_ptr, t.share_memory_, lambda: pickle.dumps(t), lambda: torch.from_dlpack(t)):
        with pytest.raises(TypeError, match=r"has its values on the ranks, and .* write `await trimesh.fetch\(t\)`"):
            refused()
    changed = t + 0
    changed.data = t[0] * 2
    assert changed.tolist() == [0, 2, 4]
    with pytest.raises(TypeError, match="data of a mesh tensor must be a mesh tensor"):
        changed.data = torch.ones(3)


def check_ranks_that_differ(differs: Any) -> None:
    for asked in (differs.tolist, lambda: differs.sum().item(), lambda: bool(differs.sum() > 3)):
        with pytest.raises(ValueError, match=r"ranks?.*await trimesh.fetch"):
            asked()
    assert torch.equal(differs, differs)
    assert not torch.equal(differs, differs * 0)  # on one rank it is


def check_shapes_that_follow_from_values(t: Any, differs: Any) -> None:
    local = torch.arange(6.0).view(2, 3)
    looks: list[Callable[[Any], Any]] = [
        torch.nonzero,
        lambda x: x[x > 2],
        lambda x: x.masked_select(x > 2),
        lambda x: torch.unique(x, return_inverse=True),
        torch.unique_consecutive,
        lambda x: torch.bincount(x.long().flatten()),
        lambda x: x.flatten().repeat_interleave(x.flatten().long()),
        lambda x: torch.where(x > 2),
    ]
    for look in looks:
        found, expected = look(t), look(local)
        pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else list(zip(found, expected, strict=True))
        for one, other in pairs:
            assert (one.shape, one.dtype, one.tolist()) == (other.shape, other.dtype, other.tolist())
    leaf = t.clone().requires_grad_()
    leaf[leaf > 2].sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(TypeError, match=r"the same on every rank, got nonzero, of sizes \[\(0, 1\)\], \[\(3, 1\)\]"):
        differs.nonzero()


async def check_looks_with_await(t: Any, differs: Any) -> None:
    assert (await trimesh.inspect(differs)).tolist() == [0, 0, 0, 0]
    assert (await trimesh.inspect(differs, gpus=1)).tolist() == [0, 1, 2, 3]
    with pytest.raises(ShapeError):
        await trimesh.inspect(differs, gpus=2)
    for asked in ([t.t(), t.sum(), t[:0], t > 2], [t.t()], [t[1], t.to(torch.bfloat16)]):
        for found, there in zip(await trimesh.fetch(asked), asked, strict=True):
            for one in found.values():
                assert (one.tolist(), one.dtype, one.stride()) == (there.tolist(), there.dtype, there.stride())
    here = torch.ones(1)
    found = await trimesh.fetch({"of the process": here, "there": t[1], "number": 3})
    assert (found["of the process"] is not here, found["number"]) == (True, 3)
    assert await trimesh.show(t) == str(t)
    with pytest.raises(TypeError, match="takes a tensor on a mesh"):
        await trimesh.fetch(torch.ones(2))
    with pytest.raises(TypeError, match="takes a tensor on a mesh"):
        await trimesh.show(torch.ones(2))


async def check_deadline(t: Any) -> None:
    slow = t.new_ones(1500, 1500)
    for _ in range(20):
        slow = slow @ slow / 1500
    with trio.move_on_after(0.02), pytest.raises(trio.TooSlowError):  # noqa: ASYNC100 - no checkpoint is needed for it
        slow.sum().item()
    assert slow[0, 0].item() == pytest.approx(1)  # later it is there


async def check_threads(procs: ProcMesh, t: Any) -> None:
    def elsewhere() -> list[str]:
        texts: list[str] = []
        for refused in (lambda: t + 1, lambda: t.sum().item(), lambda: procs.slice(gpus=0).activate()):
            with pytest.raises(RuntimeError, match=r"another thread.*trio\.from_thread\.run_sync"):
                refused()
        texts.append(repr(trio.from_thread.run_sync(lambda: (t + 1).sum().item())))
        texts.append(type(torch.ones(2)).__qualname__)  # nothing is active in another thread
        return texts

    with procs.activate():
        assert await trio.to_thread.run_sync(elsewhere) == ["21.0", "Tensor"]
    assert threading.current_thread() is threading.main_thread()


async def check_seeds(procs: ProcMesh) -> None:
    def draw() -> Any:
        with procs.activate():
            return torch.rand(3)

    trimesh.manual_seed(7, procs)
    first, second = (await trimesh.fetch(draw())).values()
    assert not torch.equal(first, second)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(second, torch.rand(3, generator=torch.Generator().manual_seed(8)))
    trimesh.manual_seed(7, procs, same=True)
    assert draw().tolist() == first.tolist()
    states = await trimesh.get_rng_state(procs)
    again = draw().tolist()
    trimesh.set_rng_state(states, procs)
    assert draw().tolist() == again
    trimesh.set_rng_state(states.item(gpus=1), procs.slice(gpus=0))
    assert (await trimesh.fetch_shard(draw(), gpus=0)).tolist() == again
    local = torch.Generator().manual_seed(3)
    trimesh.set_rng_state(local.get_state(), procs)
    assert (await trimesh.fetch_shard(draw(), gpus=1)).equal(torch.rand(3, generator=local))
    with pytest.raises(ValueError, match="one state for all ranks or one for each of 2, got 3"):
        trimesh.set_rng_state([states.item(gpus=0)] * 3, procs)


OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.matmul, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.iadd,
    operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.imod, operator.ifloordiv,
]  # fmt: skip


async def test_arguments_that_do_not_belong_together() -> None:
    async with this_host().warm(preload=("torch",)) as host:
        procs = await host.spawn_procs({"gpus": 2}, name="procs")
        others = await host.spawn_procs({"gpus": 2}, name="others")
        first = procs.slice(gpus=0)
        with procs.activate():
            t = torch.ones(2, 2)
        with others.activate():
            other = torch.ones(2, 2)
        with first.activate():
            part = torch.ones(2, 2)
        local = torch.ones(2, 2)
        for apply in OPERATORS:
            for one, two in ((t, local), (local, t), (t, torch.nn.Parameter(local))):
                with pytest.raises(
                    TypeError, match=r"-> (other=)?<local tensor float32\[2, 2\]>,   # a tensor of this"
                ):
                    apply(one, two)
        for one, two in ((t, other), (other, t)):
            with pytest.raises(TypeError, match=r"-> .*# on (procs|others)\{'gpus': 2\}, not on .*to_mesh"):
                one + two
        with pytest.raises(TypeError, match=r"# on other ranks of procs: write t.slice_mesh"):
            t + part
        with pytest.raises(TypeError, match=r"cat\.?\w*\(\n -> \[<tensor .*>, <local tensor"):
            torch.cat([t, local])
        with pytest.raises(TypeError, match="unsupported operand"):
            t + "text"
        assert (t == None) is False  # noqa: E711 - it is what is tested


def test_a_signal_gets_into_a_wait_without_await(run_program: Run, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import logging, os, signal, sys, threading, torch, trimesh, trio
        from trimesh import this_host

        logging.disable()  # a block says what it waits for when its rank is slow to end

        async def main():
            async with this_host().spawn_procs({"gpus": 1}, preload=("torch",)) as procs:
                with procs.activate():
                    t = torch.ones(2)
                t.sum().item()
                never = trimesh.remote(lambda t: signal.pause(), propagate=lambda t: t)
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
                never(t).sum().item()

        try:
            trio.run(main)
        except* KeyboardInterrupt:
            sys.exit(42)
    """)
    (tmp_path / "waits.py").write_text(program)
    done = run_program(tmp_path / "waits.py", cwd=tmp_path, seconds=HANG_SECONDS)
    assert (done.returncode, done.stderr) == (42, "")


async def test_a_death_ends_a_wait_without_await() -> None:
    """N2: with the error of the owner."""
    async with this_host().spawn_procs({"gpus": 2}, preload=("torch",), supervision=trimesh.Isolate()) as procs:
        with procs.activate():
            slow = torch.ones(1500, 1500)
        for _ in range(40):
            slow = slow @ slow / 1500
        pid = procs.statistics().members[1].pid
        timer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(MeshErrorGroup) as caught:
            slow.sum().item()
        timer.join()
        assert trimesh.coords(caught.value) == [{"gpus": 1}]
