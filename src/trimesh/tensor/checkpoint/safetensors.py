"""`save_safetensors`, `load_safetensors`: weights of modules in the safetensors format.

A file holds the length of a header in 8 bytes, the header in JSON, and the elements of each tensor in order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, Final

import msgspec
import torch
import trio
from torch import nn

from trimesh import limits
from trimesh._runtime.tasks import in_trio
from trimesh.tensor.checkpoint.loading import CheckpointReading
from trimesh.tensor.checkpoint.metadata import StoredValue, sync_directory
from trimesh.tensor.issue.fetching import fetch
from trimesh.tensor.protocol.placement import RAW_SUFFIX, Stored

_DTYPES: Final = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH: Final = struct.Struct("<Q")
_ALIGNED: Final = 8


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


async def load_safetensors(path: str | os.PathLike[str], module: nn.Module, *, strict: bool = True) -> None:
    """Load the tensors of a file into a module by name, each with the placements of the one that it replaces.

    On a mesh every rank reads its own parts from the file, which all must be able to open; nothing passes through this
    process. Nothing is changed before all of it has been read.

    Args:
        path: The file, `NAME.safetensors`.
        module: A module in this process, or on a mesh.
        strict: Require the same names in file and module. Otherwise names in only one of them are ignored.

    Raises:
        FileNotFoundError: The file does not exist.
        KeyError: With `strict`, names differ.
        MeshErrorGroup: A rank could not read, or a process has ended.
        ValueError: The file is not in the format, or a tensor differs in size.

    Blocking: a checkpoint, cancellable. The ranks briefly hold the old and the new tensors.

    Example:
        >>> await trimesh.tensor.load_safetensors("model.safetensors", model)
    """
    await in_trio(_load)(Path(path), module, strict)


async def _load(path: Path, module: nn.Module, strict: bool) -> None:  # noqa: FBT001 - in_trio passes positions
    entries = await trio.to_thread.run_sync(_entries, path)
    state = module.state_dict()
    if strict and state.keys() != entries.keys():
        missing, others = sorted(state.keys() - entries.keys()), sorted(entries.keys() - state.keys())
        raise KeyError(
            f"file and module must have the same names, got {path.name} without {missing[:8]}, and with {others[:8]} "
            "besides: write strict=False to ignore both"
        )
    found = {name: entries[name] for name in state if name in entries}
    for name, entry in found.items():
        if entry.size != tuple(state[name].size()):
            raise ValueError(f"{name} must have its size in {path.name}, {entry.size}, got {tuple(state[name].size())}")
    reading = CheckpointReading(path.parent, found)
    for name, entry in found.items():
        reading.want(entry, state[name])
    values = await reading.finish()
    module.load_state_dict({name: values[name,] for name in found}, strict=strict)


def _entries(path: Path) -> dict[str, StoredValue]:
    """Return the tensors of a file, by name.

    Raises:
        ValueError: The file is not in the safetensors format.
    """
    if path.suffix != RAW_SUFFIX:
        raise ValueError(f"the name of a safetensors file must end in {RAW_SUFFIX}, got {str(path)!r}")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
        if length > min(size - _LENGTH.size, limits.SAFETENSORS_HEADER_BYTES):
            raise ValueError(f"{path.name} must be a safetensors file, but its header does not fit into it")
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, Any])
            header.pop("__metadata__", None)
            entries = msgspec.convert(header, dict[str, _Entry])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path.name} must be a safetensors file, but its header is malformed: {error}") from error
    begin = _LENGTH.size + length
    return {name: _stored(path, name, entry, begin, size) for name, entry in entries.items()}


def _stored(path: Path, name: str, entry: _Entry, begin: int, size: int) -> StoredValue:
    dtype, (first, end) = _DTYPES.get(entry.dtype), entry.data_offsets
    if dtype is None:
        raise ValueError(f"{name} of {path.name} must be of a dtype among {', '.join(_DTYPES)}, got {entry.dtype}")
    count = 1
    for one in entry.shape:
        count *= one
    fits = all(one >= 0 for one in entry.shape) and first >= 0 and end - first == count * dtype.itemsize
    if not fits or begin + end > size:
        raise ValueError(
            f"{name} of {path.name} must fit its bytes, got {entry.dtype}{list(entry.shape)} at {first}:{end}"
        )
    part = Stored(path.name, begin + first, end - first, (0,) * len(entry.shape), entry.shape)
    return StoredValue((name,), (part,), dtype, entry.shape)


async def save_safetensors(path: str | os.PathLike[str], tensors: nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Write the tensors of a module to a file; tied tensors appear under each of their names.

    Tensors are fetched to this process one at a time. The file appears at `path`, or replaces one there, when all of it
    is on disk.

    Args:
        path: The file, `NAME.safetensors`.
        tensors: A module, or tensors by name; in this process, or global tensors.

    Raises:
        MeshErrorGroup: A tensor could not be computed, or a process has ended.
        TypeError: A tensor is one for each rank, or of a dtype that the format lacks.
        ValueError: The path has another suffix.

    Blocking: a checkpoint, cancellable; concurrent writes to the tensors may or may not be in the file.
    """
    await in_trio(_save)(Path(path), tensors)


async def _save(path: Path, tensors: nn.Module | Mapping[str, torch.Tensor]) -> None:
    if path.suffix != RAW_SUFFIX:
        raise ValueError(f"the name of a safetensors file must end in {RAW_SUFFIX}, got {str(path)!r}")
    named = dict(tensors.state_dict() if isinstance(tensors, nn.Module) else tensors)
    header = _header(named)
    unfinished = path.parent / f".{path.name}.{token_hex(4)}.unfinished"
    try:
        with unfinished.open("xb") as file:
            await trio.to_thread.run_sync(file.write, header)
            for tensor in named.values():
                found = await fetch(tensor) if hasattr(tensor, "_held") else tensor.detach()
                await trio.to_thread.run_sync(_write, file, found)
            await trio.to_thread.run_sync(_sync, file)
        unfinished.replace(path)
        await trio.to_thread.run_sync(sync_directory, path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def _header(named: Mapping[str, Any]) -> bytes:
    at, header = 0, {}
    for name, tensor in named.items():
        meta = getattr(tensor, "_meta", None)
        if tensor.dtype not in _NAMES or (meta is not None and not meta.is_global):
            raise TypeError(
                f"a safetensors file can have whole tensors of {', '.join(_DTYPES)}, got {tensor!r:.100} as {name}"
            )
        end = at + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.size()), "data_offsets": [at, end]}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNED)
    return _LENGTH.pack(len(text)) + text


def _write(file: IO[bytes], tensor: torch.Tensor) -> None:
    if tensor.numel():
        memory = bytearray(tensor.nbytes)
        torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.size()).copy_(tensor)
        file.write(memory)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
