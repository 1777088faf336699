"""Files of safetensors: written from a mesh and read on others, as the format says, and what is refused."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

import trimesh
from trimesh import this_host

torch = pytest.importorskip("torch", reason="torch is an extra")

from trimesh.tensor import ParallelPlan, load_safetensors, save_safetensors  # noqa: E402 - after the skip

pytestmark = [pytest.mark.torch]

nn: Any = getattr(torch, "nn")  # noqa: B009 - as a value, since torch may be missing

PRELOAD = ("torch", "torch.distributed.tensor")


def model() -> Any:
    made = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3).to(torch.bfloat16))
    made[0].weight.data = made[0].weight.data.t().contiguous().t()
    return made


def written(path: Path, header: dict[str, Any], data: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.real
async def test_weights_go_from_a_mesh_to_a_file_and_to_meshes_of_other_sizes(tmp_path: Path) -> None:
    here = model()
    path = tmp_path / "model.safetensors"
    async with this_host().spawn_procs({"dp": 2}, preload=PRELOAD) as procs:
        there = model()
        there.load_state_dict(here.state_dict())
        there = trimesh.module_to_mesh(there, procs, ParallelPlan.fully_sharded("dp"))
        await save_safetensors(path, there)
        with pytest.raises(TypeError, match="can have whole tensors"):
            await save_safetensors(tmp_path / "x.safetensors", {"t": procs.rank_tensor("dp")})
    assert os.listdir(tmp_path) == ["model.safetensors"]
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert header["0.weight"] == {"dtype": "F32", "shape": [7, 5], "data_offsets": [0, 140]}
    plain = model()
    await load_safetensors(path, plain)
    assert same(plain.state_dict(), here.state_dict())
    async with this_host().spawn_procs({"a": 3}, preload=PRELOAD) as procs:
        other = trimesh.module_to_mesh(model(), procs, {"0.weight": [None, "a"], "*.bias": ["a"]})
        await load_safetensors(path, other)
        assert await trimesh.placements(other[0].weight) == [None, "a"]
        assert same(await trimesh.fetch(other.state_dict()), here.state_dict())


async def test_files_that_do_not_fit_change_nothing(tmp_path: Path) -> None:
    layer = nn.Linear(2, 1)
    before = {name: one.clone() for name, one in layer.state_dict().items()}
    path, data = tmp_path / "m.safetensors", struct.pack("<2f", 1, 2)
    weight = {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8]}
    written(path, {"__metadata__": {"format": "pt"}, "weight": weight, "more": weight}, data)
    with pytest.raises(KeyError, match=r"without \['bias'\], and with \['more'\] besides"):
        await load_safetensors(path, layer)
    for wrong, text in [
        ({**weight, "shape": [2, 1]}, r"weight must have its size in m\.safetensors, \(2, 1\), got \(1, 2\)"),
        ({**weight, "shape": [1, 3]}, "must fit its bytes, got .* at 0:8"),
        ({**weight, "shape": [-1, -2]}, "must fit its bytes, got .* at 0:8"),
        ({**weight, "data_offsets": [8, 16]}, "must fit its bytes, got .* at 8:16"),
        ({**weight, "data_offsets": [-8, 0]}, "must fit its bytes, got .* at -8:0"),
        ({**weight, "dtype": "F31"}, "got F31"),
        ({**weight, "dtype": 3}, "must be a safetensors file"),
        (7, "must be a safetensors file"),
    ]:
        written(path, {"weight": wrong}, data)
        with pytest.raises(ValueError, match=text):
            await load_safetensors(path, layer, strict=False)
    for whole in (b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 2) + b"[]"):
        path.write_bytes(whole)
        with pytest.raises(ValueError, match="must be a safetensors file"):
            await load_safetensors(path, layer)
    with pytest.raises(ValueError, match="must end in"):
        await load_safetensors(tmp_path / "m.bin", layer)
    assert same(layer.state_dict(), before)
    written(path, {"weight": weight}, data)
    await load_safetensors(path, layer, strict=False)
    assert layer.weight.tolist() == [[1, 2]]
    assert torch.equal(layer.bias, before["bias"])
