"""The metadata of a checkpoint: what it has by name, and where, in the records of `torch.distributed.checkpoint`."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch

from trimesh.tensor.checkpoint.directory import METADATA
from trimesh.tensor.protocol.stored import Stored

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Path_ = tuple[Any, ...]
"""Where a value is in a nested state: keys of dicts, numbers of places in lists."""


@attrs.frozen
class StoredValue:
    """One value of a checkpoint.

    Attributes:
        path: In the state.
        parts: Where it is: of a tensor each part, of anything else one.
        dtype, size: Of a tensor; None for anything else.
    """

    path: Path_
    parts: tuple[Stored, ...]
    dtype: torch.dtype | None = None
    size: tuple[int, ...] | None = None


def flattened(state: Mapping[str, Any]) -> dict[str, tuple[Path_, Any]]:
    """Return each value of a nested state by the name that torch gives it: its path, and itself."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: PLC0415 - takes a second

    values, paths = flatten_state_dict(dict(state))
    return {name: (tuple(paths[name]), value) for name, value in values.items()}


def nested(values: Mapping[Path_, Any]) -> dict[str, Any]:
    """Return the nested state that has values at some paths."""
    from torch.distributed.checkpoint._traverse import set_element  # noqa: PLC0415 - takes a second

    made: dict[str, Any] = {}
    for path, value in values.items():
        set_element(made, path, value)
    return made


def metadata_bytes(entries: Mapping[str, StoredValue]) -> bytes:
    """Return the file that says what a checkpoint has."""
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
    """Return what the checkpoint at a path has; also of one that torch has written.

    Raises:
        ValueError: The file is none of torch's.
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
        raise ValueError(f"the files of a checkpoint are in its directory, got {place.relative_path!r}")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"the files of a checkpoint must be as torch writes them, got {place.transform_descriptors!r}")
    return Stored(place.relative_path, int(place.offset), int(place.length), tuple(start), tuple(size))


_BESIDE: Final = (
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
)
"""What torch's records name beside each other."""


class _Records(pickle.Unpickler):
    """Reads the records of torch's checkpoints, and nothing that would run other code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class that such a file may name."""
        is_record = module in ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if is_record and name.isidentifier() and isinstance(found := super().find_class(module, name), type):
            return found
        if (module, name) in (
            ("torch", "Size"),
            ("collections", "OrderedDict"),
            ("torch.serialization", "_get_layout"),
        ):
            return super().find_class(module, name)
        if module == "pathlib" and name in ("Path", "PosixPath", "PurePosixPath"):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(f"the metadata of a checkpoint has records of torch only, got {module}.{name}")
