"""Metadata of a checkpoint: names and storage of its values, in the records of `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
import trio
from torch import nn

from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.protocol.placement import Stored

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


Path_ = tuple[Any, ...]
"""Path of a value in a nested state: keys of dicts, indices of lists."""


@attrs.frozen
class StoredValue:
    """One value of a checkpoint.

    Attributes:
        path: Path in the state.
        parts: Storage of each part of a tensor; one part for any other value.
        dtype, size: Those of a tensor; None for any other value.
    """

    path: Path_
    parts: tuple[Stored, ...]
    dtype: torch.dtype | None = None
    size: tuple[int, ...] | None = None


def flattened(state: Mapping[str, Any]) -> dict[str, tuple[Path_, Any]]:
    """Flatten a nested state: path and value by the name that torch gives the value."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: PLC0415 - takes a second

    values, paths = flatten_state_dict(dict(state))
    return {name: (tuple(paths[name]), value) for name, value in values.items()}


def nested(values: Mapping[Path_, Any]) -> dict[str, Any]:
    """Build the nested state from values by path."""
    from torch.distributed.checkpoint._traverse import set_element  # noqa: PLC0415 - takes a second

    made: dict[str, Any] = {}
    for path, value in values.items():
        set_element(made, path, value)
    return made


def metadata_bytes(entries: Mapping[str, StoredValue]) -> bytes:
    """Return the content of the metadata file of a checkpoint."""
    from torch.distributed.checkpoint import filesystem, metadata  # noqa: PLC0415 - takes a second

    described: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for name, entry in entries.items():
        if entry.dtype is None or entry.size is None:
            [part] = entry.parts
            described[name] = metadata.BytesStorageMetadata()
            places[metadata.MetadataIndex(name)] = filesystem._StorageInfo(part.file, part.offset, part.length)
            continue
        chunks = [metadata.ChunkStorageMetadata(torch.Size(one.start), torch.Size(one.size)) for one in entry.parts]
        properties = metadata.TensorProperties(dtype=entry.dtype)
        described[name] = metadata.TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
        for index, part in enumerate(entry.parts):
            place = filesystem._StorageInfo(part.file, part.offset, part.length)
            places[metadata.MetadataIndex(name, part.start, index)] = place
    made = metadata.Metadata(
        state_dict_metadata=described,
        planner_data={name: entry.path for name, entry in entries.items()},
        storage_data=places,
        storage_meta=metadata.StorageMeta(),
        version="1.0.0",
    )
    return pickle.dumps(made)


def read_metadata(path: Path) -> dict[str, StoredValue]:
    """Return the values of the checkpoint at a path, by name; also of one that torch has written.

    Raises:
        ValueError: The file is not in torch's format.
    """
    found = _Records(io.BytesIO((path / METADATA).read_bytes())).load()
    try:
        return dict(_entries(found))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path / METADATA)!r} must be the metadata of a checkpoint, got {found!r:.200}"
        ) from error


def _entries(found: Metadata) -> Any:
    from torch.distributed.checkpoint import metadata  # noqa: PLC0415 - takes a second

    for name, one in found.state_dict_metadata.items():
        path = tuple((found.planner_data or {}).get(name) or name.split(".", 1))
        if not isinstance(one, metadata.TensorStorageMetadata):
            yield name, StoredValue(path, (_stored(found.storage_data[metadata.MetadataIndex(name)], (), ()),))
            continue
        parts = [
            _stored(found.storage_data[metadata.MetadataIndex(name, chunk.offsets)], chunk.offsets, chunk.sizes)
            for chunk in one.chunks
        ]
        yield name, StoredValue(path, tuple(parts), one.properties.dtype, tuple(one.size))


def _stored(place: Any, start: Sequence[int], size: Sequence[int]) -> Stored:
    if Path(place.relative_path).name != place.relative_path:
        raise ValueError(f"the files of a checkpoint must be in its directory, got {place.relative_path!r}")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"a checkpoint must be saved without transforms, got {place.transform_descriptors!r}")
    return Stored(place.relative_path, int(place.offset), int(place.length), tuple(start), tuple(size))


_BESIDE: Final = (
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
)
"""Globals that torch's records may name besides its own record classes."""


class _Records(pickle.Unpickler):
    """Unpickler for the records of torch's checkpoints; refuses everything else, as it could run other code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that such a file may name; refuse all others."""
        is_record = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if is_record and name.isidentifier() and isinstance(found := super().find_class(module, name), type):
            return found
        if module == "pathlib._local":  # Python 3.13 writes this; other versions lack the module
            module = "pathlib"
        if (module, name) in _BESIDE:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"the metadata of a checkpoint must have records of torch only, got {module}.{name}")


# ---- optimizer state by parameter names, as in `torch.distributed.checkpoint` ----------------------------------------


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the name of each parameter in the first module that has it, by the parameter's `id`."""
    found: dict[int, str] = {}
    for module in modules.values():
        for name, parameter in module.named_parameters():
            found.setdefault(id(parameter), name)
    return found


def state_by_name(key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the state of an optimizer, keyed by parameter names instead of numbers.

    Raises:
        ValueError: A parameter is in no module that is saved, or two have one name.
    """
    groups = []
    every: list[str] = []
    for group in optimizer.param_groups:
        missing = [tuple(one.size()) for one in group["params"] if id(one) not in names]
        if missing:
            raise ValueError(
                f"an optimizer must be saved with the modules of its parameters, got {key!r} with parameters of sizes "
                f"{missing[:4]} that are in none: add their modules to `state`"
            )
        own = [names[id(one)] for one in group["params"]]
        every += own
        groups.append({**{name: value for name, value in group.items() if name != "params"}, "params": own})
    if len(set(every)) != len(every):
        raise ValueError(f"parameters of one optimizer must have different names, got some names twice in {key!r}")
    kept = {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
    return {"state": kept, "param_groups": groups}


def parameters_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    return {names[id(one)]: (one, group) for group in optimizer.param_groups for one in group["params"]}


_COUNTED: Final = frozenset({"step", "eta", "mu", "mu_product"})
"""Scalar states that torch's optimizers keep in this process, unless they are fused or capturable."""


def is_on_mesh(name: str, size: tuple[int, ...], parameter: Any, group: Mapping[str, Any]) -> bool:
    """Return whether an optimizer keeps its state `name` of a parameter on the parameter's mesh."""
    if not isinstance(parameter, MeshTensor):
        return False
    return bool(size) or name not in _COUNTED or bool(group.get("fused") or group.get("capturable"))


def load_by_name(
    key: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Load the result of `state_by_name` into an optimizer.

    Raises:
        ValueError: Its groups have other parameters.
    """
    wanted = [[names[id(one)] for one in group["params"]] for group in optimizer.param_groups]
    found = [list(group["params"]) for group in state["param_groups"]]
    if [sorted(one) for one in wanted] != [sorted(one) for one in found]:
        raise ValueError(
            f"an optimizer must have the groups of parameters that it was saved with, got {wanted} for {key!r} and "
            f"{found} in the checkpoint"
        )
    numbers = {name: number for number, name in enumerate(name for group in wanted for name in group)}
    groups = []
    for group, own in zip(state["param_groups"], wanted, strict=True):
        groups.append({**group, "params": [numbers[name] for name in own]})
    kept = {numbers[name]: value for name, value in state.get("state", {}).items()}
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


# ---- the directory of a checkpoint: appears only when all of it is on disk -------------------------------------------

METADATA = ".metadata"
"""Name of torch's metadata file in the directory of a checkpoint."""


@asynccontextmanager
async def new_directory(path: Path) -> AsyncGenerator[Path]:
    """Create the directory of a checkpoint under a temporary name; rename it to `path` at the end of the block.

    Yields:
        The empty directory. Writers must sync their files in it to disk.

    Raises:
        FileExistsError: `path` exists.
    """
    unfinished = _begin(path)
    try:
        yield unfinished
        with trio.CancelScope(shield=True):  # milliseconds; a cancel would leave the rename half done
            await trio.to_thread.run_sync(_finish, unfinished, path)
    except BaseException:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(lambda: shutil.rmtree(unfinished, ignore_errors=True))
        raise


def _begin(path: Path) -> Path:
    if path.exists():
        raise FileExistsError(f"a checkpoint must be saved to a path that does not exist, got {str(path)!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{token_hex(4)}.unfinished"
    unfinished.mkdir()
    return unfinished


def _finish(unfinished: Path, path: Path) -> None:
    sync_directory(unfinished)
    unfinished.rename(path)  # fails if a checkpoint was created there meanwhile
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Sync the names in a directory to disk."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_synced(path: Path, parts: Mapping[str, bytes] | bytes) -> dict[str, tuple[int, int]]:
    """Write bytes, or several named ones in sequence, synced to disk; return offset and length of each."""
    places: dict[str, tuple[int, int]] = {}
    with path.open("wb") as file:
        for name, data in ({"": parts} if isinstance(parts, bytes) else parts).items():
            places[name] = file.tell(), len(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return places


def check_is_there(path: Path) -> None:
    """Raise unless there is a checkpoint at a path.

    Raises:
        FileNotFoundError: No checkpoint is there.
    """
    if not (path / METADATA).is_file():
        raise FileNotFoundError(f"there is no checkpoint at {str(path)!r}: it has no file {METADATA!r}")
