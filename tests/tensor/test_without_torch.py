"""What is said where torch is wanting: at the controller, and in a process of the mesh."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

import trimesh
from trimesh import MeshErrorGroup, this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

pytestmark = [pytest.mark.real, pytest.mark.torch]


def forget_torch() -> None:
    """Make `import torch` fail in this process, as where it is not installed."""
    import sys

    sys.modules["torch"] = None  # type: ignore[assignment]


@pytest.mark.executed("a copy has imported torch")
async def test_a_process_without_torch_cannot_hold_tensors() -> None:
    async with this_host().spawn_procs({"gpus": 2}, setup=forget_torch) as procs:
        with procs.activate():
            t = torch.ones(3)
        with pytest.raises(MeshErrorGroup) as caught:
            await trimesh.fetch(t)
        for error in trimesh.leaves(caught.value):
            assert "a process of procs cannot hold tensors: ModuleNotFoundError" in str(error)
            assert "torch" in str(error)
        with pytest.raises(trimesh.MeshError, match="cannot hold tensors"):
            t + 1
        with pytest.raises(trimesh.MeshError, match="cannot hold tensors"):
            procs.activate()


def test_a_controller_without_torch_says_what_to_install() -> None:
    program = textwrap.dedent("""
        import logging, sys, trio, trimesh

        logging.disable()  # a block says what it waits for when its processes are slow to end
        sys.modules["torch"] = None

        async def main():
            async with trimesh.this_host().spawn_procs({"gpus": 1}) as procs:
                for use in (procs.activate, lambda: trimesh.fetch):
                    try:
                        use()
                    except (ImportError, AttributeError) as error:
                        print(error)

        trio.run(main)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("need torch, which is not installed here: write `pip install ") == 2
