"""How buffers travel where nothing is pickled. `trimesh.rdma` is imported by the first of them."""

from __future__ import annotations

import importlib
from typing import Any

from trimesh._wire.memory.reducers import Sink
from trimesh._wire.typed.kinds import Kind, Source, register_kind


def _take_apart(buffer: Any, _: Sink) -> tuple[Any, ...]:
    fields: tuple[Any, ...] = buffer.__reduce__()[1]
    return fields


def _put_together(_: Source, *fields: Any) -> Any:
    return importlib.import_module("trimesh.rdma.buffers.buffer").rebuild(*fields)


def _put_publication_together(_: Source, *fields: Any) -> Any:
    return importlib.import_module("trimesh.rdma.publications.published").rebuild(*fields)


def register_kinds() -> None:
    """Register the kinds of this module."""
    register_kind(Kind("buffer", "trimesh.rdma.buffers.buffer.RDMABuffer", _take_apart, _put_together))
    register_kind(
        Kind("publication", "trimesh.rdma.publications.published.Published", _take_apart, _put_publication_together)
    )
