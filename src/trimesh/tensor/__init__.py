"""The tensor engine: torch on the ranks of a mesh, from one script."""

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "tensors on a mesh need torch, which is not installed here: write `pip install 'trimesh-actors[torch]'`",
        name="torch",
    ) from error

from trimesh.tensor.assembly import assemble as _assemble
from trimesh.tensor.checkpoint.loading import load_checkpoint
from trimesh.tensor.checkpoint.safetensors import load_safetensors, save_safetensors
from trimesh.tensor.checkpoint.saving import save_checkpoint
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.issue.display import inspect, show
from trimesh.tensor.issue.fetching import fetch, fetch_shard
from trimesh.tensor.ops.compiled import compile  # noqa: A004 - as torch's own
from trimesh.tensor.ops.function import RemoteFunction, call_on_shard_and_fetch, remote
from trimesh.tensor.ops.global_tensor import distribute, placements, redistribute, replicate
from trimesh.tensor.ops.gradients import get_rng_state, grad_generator, manual_seed, set_rng_state
from trimesh.tensor.ops.modules import module_to_mesh, optimizer_to_mesh
from trimesh.tensor.ops.movement import slice_mesh, to_mesh
from trimesh.tensor.ops.pipeline import Pipeline
from trimesh.tensor.ops.profiling import Collectives, Fallbacks, Profile, Traffic, fallbacks, profile, traffic
from trimesh.tensor.ops.reduction import broadcast, reduce, reduce_
from trimesh.tensor.ops.references import rdma_buffers, rref
from trimesh.tensor.parallel.explanation import Explanation
from trimesh.tensor.parallel.plan import ParallelPlan
from trimesh.tensor.parallel.schedule import PipelineExplanation
from trimesh.tensor.protocol.messages import RecordingError
from trimesh.tensor.protocol.placement import Placements
from trimesh.tensor.publications.state_publication import Publication, publication
from trimesh.tensor.session.activation import active_mesh, no_mesh
from trimesh.tensor.session.opening import activate
from trimesh.tensor.simulation.device import Device, RankLink, measure_device
from trimesh.tensor.simulation.mesh import LineCost, SimulatedMesh, SimulationReport, simulate

_assemble()

__all__ = [
    "Collectives",
    "Device",
    "Explanation",
    "Fallbacks",
    "LineCost",
    "MeshTensor",
    "ParallelPlan",
    "Pipeline",
    "PipelineExplanation",
    "Placements",
    "Profile",
    "Publication",
    "RankLink",
    "RecordingError",
    "RemoteFunction",
    "SimulatedMesh",
    "SimulationReport",
    "Traffic",
    "activate",
    "active_mesh",
    "broadcast",
    "call_on_shard_and_fetch",
    "compile",
    "distribute",
    "fallbacks",
    "fetch",
    "fetch_shard",
    "get_rng_state",
    "grad_generator",
    "inspect",
    "load_checkpoint",
    "load_safetensors",
    "manual_seed",
    "measure_device",
    "module_to_mesh",
    "no_mesh",
    "optimizer_to_mesh",
    "placements",
    "profile",
    "publication",
    "rdma_buffers",
    "redistribute",
    "reduce",
    "reduce_",
    "remote",
    "replicate",
    "rref",
    "save_checkpoint",
    "save_safetensors",
    "set_rng_state",
    "show",
    "simulate",
    "slice_mesh",
    "to_mesh",
    "traffic",
]
