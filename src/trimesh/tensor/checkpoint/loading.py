"""`load_checkpoint`: reads a checkpoint onto a mesh of any size."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from torch import nn

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.checkpoint.metadata import (
    Path_,
    StoredValue,
    check_is_there,
    is_on_mesh,
    load_by_name,
    nested,
    parameter_names,
    parameters_by_name,
    read_metadata,
)
from trimesh.tensor.checkpoint.saving import GENERATORS
from trimesh.tensor.controller.engine import answers
from trimesh.tensor.controller.shapes import READ
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.global_tensor import global_meta
from trimesh.tensor.ops.gradients import get_rng_state, set_rng_state
from trimesh.tensor.protocol.placement import Box, Wanted, read_box


async def load_checkpoint(
    path: str | os.PathLike[str], state: Mapping[str, Any], mesh: ProcMesh | None = None
) -> dict[str, Any]:
    """Load a checkpoint of `save_checkpoint` or `torch.distributed.checkpoint`, on a mesh of any size.

    Every rank reads the parts that it needs, whatever the placements at saving. Nothing is changed before all of it has
    been read.

    Args:
        path: The directory.
        state: By name in the checkpoint: modules, optimizers and other objects with `load_state_dict()`, which receive
            the values under that name, each tensor with the placements of the one that it replaces; or None for values
            to return. Other names in the checkpoint are ignored. An optimizer must belong to a module in `state`.
        mesh: If given, its random generators and torch's in this process are restored. On a mesh of another size only
            the generators of global tensors are; those of the ranks stay.

    Returns:
        For each None the value in the checkpoint: tensors, numbers, strings, lists and dicts of them.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        KeyError: A name of `state`, or a tensor of a module, is missing in the checkpoint.
        MeshErrorGroup: A rank could not read, or a process has ended.
        ValueError: A tensor differs in size, an optimizer in its groups; or the files are damaged.

    Blocking: a checkpoint, cancellable. The ranks briefly hold the old and the new tensors of modules.

    Example:
        >>> rest = await trimesh.tensor.load_checkpoint("run/10", {"model": model, "step": None}, procs)
        >>> rest["step"]
        10
    """
    found: dict[str, Any] = await in_trio(_load)(Path(path), state, mesh)
    return found


async def _load(path: Path, state: Mapping[str, Any], mesh: ProcMesh | None) -> dict[str, Any]:
    check_is_there(path)
    reading = CheckpointReading(path, await trio.to_thread.run_sync(read_metadata, path))
    names = parameter_names({key: one for key, one in state.items() if isinstance(one, nn.Module)})
    for key, one in state.items():
        if isinstance(one, nn.Module):
            reading.want_module(key, one)
        elif isinstance(one, torch.optim.Optimizer):
            reading.want_optimizer(key, one, names)
        else:
            reading.want_all(key)
    if mesh is not None:
        reading.want_all(GENERATORS)
    values = await reading.finish()
    returned: dict[str, Any] = {}
    for key, one in state.items():
        if isinstance(one, nn.Module):
            one.load_state_dict({path[1]: value for path, value in values.items() if path[0] == key})
            continue
        found = nested({path: value for path, value in values.items() if path[0] == key})[key]
        if isinstance(one, torch.optim.Optimizer):
            load_by_name(key, one, found, names)
        elif one is None:
            returned[key] = found
        else:
            one.load_state_dict(found)
    if mesh is not None:
        await _set_generators(values, mesh)
    return returned


async def _set_generators(values: Mapping[Path_, Any], mesh: ProcMesh) -> None:
    states = list(values[GENERATORS, "ranks"])
    torch.set_rng_state(values[GENERATORS, "controller"])
    now = list((await get_rng_state(mesh)).values())
    if len(now) != len(states):  # ranks keep their own generators; those of global tensors are restored
        length = states[0].numel() // 2  # first the rank's own generator, then that of global tensors
        states = [torch.cat([one[:length], states[0][length:]]) for one in now]
    set_rng_state(states, mesh)


class CheckpointReading:
    """One load of a checkpoint: the values wanted, in this process or on meshes."""

    def __init__(self, path: Path, entries: Mapping[str, StoredValue]) -> None:
        self._path = path
        self._entries = {entry.path: entry for entry in entries.values()}
        self._here: list[StoredValue] = []
        self._there: list[tuple[StoredValue, MeshTensor]] = []

    def want_module(self, key: str, module: nn.Module) -> None:
        state = module.state_dict()
        missing = [name for name in state if (key, name) not in self._entries]
        if missing:
            raise KeyError(f"the checkpoint at {str(self._path)!r} must have all of {key!r}: {missing} are missing")
        for name, target in state.items():
            entry = self._entries[key, name]
            if isinstance(target, torch.Tensor) and entry.size != tuple(target.size()):
                raise ValueError(
                    f"{key}.{name} must have its size in the checkpoint, {entry.size}, got {tuple(target.size())}"
                )
            self.want(entry, target)

    def want_optimizer(self, key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        missing = [one.size() for group in optimizer.param_groups for one in group["params"] if id(one) not in names]
        if missing:
            raise ValueError(
                f"an optimizer must be loaded with the modules of its parameters, got {key!r} with parameters of sizes "
                f"{[tuple(size) for size in missing[:4]]} that are in none: add their modules to `state`"
            )
        parameters = parameters_by_name(optimizer, names)
        for entry in self._under(key):
            like = None
            if entry.path[1] == "state":
                name, kept = entry.path[2:4]
                parameter, group = parameters.get(name, (None, {}))
                size = entry.size
                if size is not None and is_on_mesh(kept, size, parameter, group):
                    like = parameter if size == tuple(parameter.size()) else parameter.detach().new_zeros(size)
            self.want(entry, like)

    def want_all(self, key: str) -> None:
        for entry in self._under(key):
            self.want(entry, None)

    def _under(self, key: str) -> list[StoredValue]:
        found = [entry for path, entry in self._entries.items() if path[0] == key]
        if not found:
            some = sorted({str(path[0]) for path in self._entries})
            raise KeyError(f"the checkpoint at {str(self._path)!r} has no {key!r}, it has {some}")
        return found

    def want(self, entry: StoredValue, like: Any) -> None:
        """Add a value to be read; onto a mesh if `like` is a tensor there."""
        if isinstance(like, MeshTensor):
            bare: Any = like.detach()
            self._there.append((entry, bare))
        else:
            self._here.append(entry)

    async def finish(self) -> dict[Path_, Any]:
        """Read all values and return them by path; waits until the ranks have read theirs."""
        values: dict[Path_, Any] = {}
        groups: dict[Team, list[tuple[StoredValue, MeshTensor]]] = {}
        for entry, like in self._there:
            groups.setdefault(like._held.team, []).append((entry, like))
        requests = []
        for team, group in groups.items():
            made: list[MeshTensor] = []
            requests.append(team.engine.ask(team, range(len(team.peers)), self._issuing(team, group, made), READ))
            values.update({entry.path: one for (entry, _), one in zip(group, made, strict=True)})
        try:
            for request in requests:
                await answers(request)
        finally:
            for request in requests:  # also those after a failed one
                request.team.engine.forget(request)
        values.update(await trio.to_thread.run_sync(self._read_here))
        return values

    def _issuing(
        self, team: Any, group: list[tuple[StoredValue, MeshTensor]], made: list[MeshTensor]
    ) -> Callable[[int], Any]:
        wanted = Wanted(str(self._path.absolute()), [list(entry.parts) for entry, _ in group])
        dtypes = tuple(entry.dtype for entry, _ in group)
        metas = [global_meta(team, like._meta.size, entry.dtype or like.dtype) for entry, like in group]
        data = memoryview(msgspec.msgpack.encode(wanted))
        likes = [like for _, like in group]
        return lambda number: made.extend(call_kernel(team, "read_parts", data, dtypes, likes, number, outputs=metas))

    def _read_here(self) -> dict[Path_, Any]:
        return {entry.path: _value(self._path, entry) for entry in self._here}


def _value(directory: Path, entry: StoredValue) -> Any:
    if entry.dtype is not None and entry.size is not None:
        return read_box(directory, entry.parts, Box.of_all(entry.size), entry.dtype)
    [part] = entry.parts
    with (directory / part.file).open("rb") as file:
        file.seek(part.offset)
        return torch.load(io.BytesIO(file.read(part.length)), weights_only=True)
