"""Registers lazily imported implementations (tensor, rdma, jobs) with lower layers.

Torch takes seconds to import, and many programs have neither tensors nor buffers: `import trimesh` brings none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trimesh._runtime.services import TENSORS, Handler, known_services
from trimesh._runtime.system import read_sources
from trimesh._wire.memory import Sink
from trimesh._wire.typed.codec import DecodeSource, ValueKind, register_kind
from trimesh.actor.host_mesh import hosts_module
from trimesh.actor.proc_mesh import live_module, tensor_module
from trimesh.actor.started import provide_threads
from trimesh.config import provide

if TYPE_CHECKING:
    from trimesh._runtime.life import Proc


def _load_tensor_service() -> Callable[[Proc], Handler]:
    from trimesh.tensor.session.service import open_service  # noqa: PLC0415

    return open_service


def _mesh_tensors() -> ModuleType:
    from trimesh.tensor.ops import on_mesh  # noqa: PLC0415

    return on_mesh


def _overview_of_runs() -> ModuleType:
    from trimesh.observe import live  # noqa: PLC0415

    return live


def _host_services() -> ModuleType:
    from trimesh.jobs import on_hosts  # noqa: PLC0415

    return on_hosts


def _take_apart(buffer: Any, _: Sink) -> tuple[Any, ...]:
    fields: tuple[Any, ...] = buffer.__reduce__()[1]
    return fields


def _put_buffer_together(_: DecodeSource, *fields: Any) -> Any:
    from trimesh.rdma.buffers.buffer import rebuild  # noqa: PLC0415

    return rebuild(*fields)


def _put_publication_together(_: DecodeSource, *fields: Any) -> Any:
    from trimesh.rdma.publications.published import rebuild  # noqa: PLC0415

    return rebuild(*fields)


def _run_from_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    from trimesh.blocking.from_thread import run  # noqa: PLC0415

    return run(function, *args, **kwargs)


def assemble() -> None:
    """Register the implementations; `trimesh` calls this when it is imported."""
    provide(read_sources)
    provide_threads(_run_from_thread)
    known_services[TENSORS] = _load_tensor_service
    tensor_module.load = _mesh_tensors
    hosts_module.load = _host_services
    live_module.load = _overview_of_runs
    register_kind(ValueKind("buffer", "trimesh.rdma.buffers.buffer.RDMABuffer", _take_apart, _put_buffer_together))
    register_kind(
        ValueKind(
            "publication", "trimesh.rdma.publications.published.Published", _take_apart, _put_publication_together
        )
    )
