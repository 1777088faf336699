"""`save_checkpoint`: writes the state of a training, each rank its own parts."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
import trio
from torch import nn

from trimesh._runtime.tasks import in_trio
from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.checkpoint.metadata import (
    METADATA,
    Path_,
    StoredValue,
    flattened,
    metadata_bytes,
    new_directory,
    parameter_names,
    state_by_name,
    write_synced,
)
from trimesh.tensor.controller.engine import RankRequest, answers
from trimesh.tensor.controller.shapes import WRITTEN
from trimesh.tensor.controller.team import Team, call_kernel
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.ops.gradients import get_rng_state
from trimesh.tensor.protocol.placement import Stored

GENERATORS = "generators"
"""Key of the states of random generators."""


async def save_checkpoint(path: str | os.PathLike[str], state: Mapping[str, Any], mesh: ProcMesh | None = None) -> None:
    """Write the state of a training to a directory, so that the training can be resumed.

    Every rank writes its own parts of global tensors to a file there, so all ranks and this process must share the file
    system. The format is that of `torch.distributed.checkpoint`, whose functions read it, with the names of
    `module.state_dict()` and, for optimizers, of `torch.distributed.checkpoint.state_dict`. Tensors have their values
    after all operations issued before; other values are captured at the call.

    The directory appears at `path` when all of it is on disk. After a failure or a crash nothing is there, at most a
    directory `.NAME.*.unfinished` beside it.

    Args:
        path: The directory to create.
        state: By name: modules; optimizers, together with the modules of their parameters; other objects with
            `state_dict()` (learning rate schedules); tensors, numbers, strings, lists and dicts. Names without dots.
        mesh: If given, its random generators and torch's in this process are saved, too.

    Raises:
        FileExistsError: `path` exists.
        MeshErrorGroup: A tensor could not be computed, a rank could not write, or a process has ended.
        TypeError: A value is neither a tensor nor readable by `torch.load(weights_only=True)`; or it is a tensor with
            one on each rank, which a mesh of another size could not load.
        ValueError: An optimizer has parameters of no module in `state`.

    Blocking: a checkpoint, cancellable; the ranks write before they execute operations issued later.

    Example:
        >>> await trimesh.tensor.save_checkpoint("run/10", {"model": model, "optimizer": optimizer, "step": 10}, procs)
    """
    await in_trio(_save)(Path(path), state, mesh)


async def _save(path: Path, state: Mapping[str, Any], mesh: ProcMesh | None) -> None:
    async with new_directory(path) as directory:
        taken = _Taken(flattened(values_of(state)), directory)
        try:
            if mesh is not None:
                states = list((await get_rng_state(mesh)).values())
                own = {"ranks": torch.stack(states), "controller": torch.get_rng_state().clone()}
                taken.take(flattened({GENERATORS: own}))
            await taken.finish()
        finally:
            taken.forget()


def values_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dicts and values of the arguments of `save_checkpoint`."""
    names = parameter_names({key: one for key, one in state.items() if isinstance(one, nn.Module)})
    found: dict[str, Any] = {}
    for key, one in state.items():
        if not isinstance(key, str) or "." in key or key == GENERATORS:
            raise ValueError(f"names in a checkpoint must be without dots, and not {GENERATORS!r}, got {key!r}")
        if isinstance(one, torch.optim.Optimizer):
            found[key] = state_by_name(key, one, names)
        else:
            found[key] = one.state_dict() if hasattr(one, "state_dict") else one
    return found


@attrs.define(eq=False)
class _Group:
    """Tensors that the ranks of one team write."""

    names: list[str]
    tensors: list[MeshTensor]
    request: RankRequest


class _Taken:
    """A checkpoint being written: captured values of this process, and the requests to the ranks."""

    def __init__(self, values: Mapping[str, tuple[Path_, Any]], directory: Path) -> None:
        self._directory = directory
        self._entries: dict[str, StoredValue] = {}
        self._own: dict[str, bytes] = {}
        self._same: dict[str, str] = {}
        self._groups: list[_Group] = []
        self.take(values)
        first = 1  # 0 is this process
        for team, named in self._by_team(values).items():
            self._groups.append(_ask(team, named, directory, first))
            first += len(team.peers)

    def take(self, values: Mapping[str, tuple[Path_, Any]]) -> None:
        for name, (path, value) in values.items():
            if isinstance(value, MeshTensor):
                continue
            is_tensor = isinstance(value, torch.Tensor)
            size = tuple(value.size()) if is_tensor else None
            self._entries[name] = StoredValue(path, (), value.dtype if is_tensor else None, size)
            self._own[name] = _saved(name, value)

    def _by_team(self, values: Mapping[str, tuple[Path_, Any]]) -> dict[Team, dict[str, MeshTensor]]:
        """Group the tensors on meshes by team, each tensor once."""
        found: dict[Team, dict[str, MeshTensor]] = {}
        first: dict[int, str] = {}
        for name, (path, value) in values.items():
            if not isinstance(value, MeshTensor):
                continue
            if not value._meta.is_global:
                raise TypeError(
                    f"tensors of a checkpoint must be global, so that a mesh of any size can load them, got {value!r} "
                    f"as {name!r}: write t.to_global([...])"
                )
            self._entries[name] = StoredValue(path, (), value.dtype, tuple(value.size()))
            # A state has several names for a shared parameter, and a new object for each.
            self._same[name] = first.setdefault(value._held.ref, name)
            if self._same[name] == name:
                found.setdefault(value._held.team, {})[name] = value
        return found

    async def finish(self) -> None:
        """Wait for the ranks, then write the values of this process and the metadata."""
        parts: dict[str, list[Stored]] = {}
        for group in self._groups:
            for _, written in sorted((await answers(group.request)).items()):
                for index, file, offset, length, start, size in written:
                    stored = Stored(file, offset, length, tuple(start), tuple(size))
                    parts.setdefault(group.names[index], []).append(stored)
        await trio.to_thread.run_sync(self._write, parts)

    def _write(self, parts: dict[str, list[Stored]]) -> None:
        file = "__0_0.distcp"
        for name, (offset, length) in write_synced(self._directory / file, self._own).items():
            size = self._entries[name].size or ()
            parts[name] = [Stored(file, offset, length, (0,) * len(size), size)]
        entries = {
            name: attrs.evolve(entry, parts=tuple(parts.get(self._same.get(name, name), ())))
            for name, entry in self._entries.items()
        }
        write_synced(self._directory / METADATA, metadata_bytes(entries))

    def forget(self) -> None:
        """Stop waiting for the ranks."""
        for group in self._groups:
            group.request.team.engine.forget(group.request)


def _ask(team: Team, named: Mapping[str, MeshTensor], directory: Path, first: int) -> _Group:
    tensors: list[Any] = [one.detach() for one in named.values()]
    path = memoryview(str(directory.absolute()).encode())
    request = team.engine.ask(
        team,
        range(len(team.peers)),
        lambda number: call_kernel(team, "write_parts", tensors, path, first, number),
        WRITTEN,
    )
    return _Group(list(named), tensors, request)


def _saved(name: str, value: Any) -> bytes:
    """Return the bytes of a value of this process, which can be loaded without running code."""
    file = io.BytesIO()
    torch.save(value.detach().clone() if isinstance(value, torch.Tensor) else value, file)
    data = file.getvalue()
    if not isinstance(value, torch.Tensor | int | float | str | bool | None):
        try:
            torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            raise TypeError(
                f"a checkpoint can have tensors, numbers, strings, lists and dicts of them, got {value!r:.80} as "
                f"{name!r}: give an object whose state_dict() has only those"
            ) from error
    return data
