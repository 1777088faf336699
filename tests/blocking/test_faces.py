"""What `trimesh.blocking` has of the handles of `trimesh`."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import HANG_SECONDS

import trimesh
import trimesh.blocking as tb
from trimesh import ConnectError, service
from trimesh.actor.actor_mesh import ActorMesh
from trimesh.blocking import service as blocking_service
from trimesh.rdma import RDMABuffer

CLASSES: dict[type[Any], tuple[type[Any], set[str]]] = {
    tb.ActorMesh: (ActorMesh, set()),
    tb.Endpoint: (trimesh.Endpoint, set()),
    tb.HostMesh: (trimesh.HostMesh, set()),
    tb.Port: (trimesh.Port, {"aclose", "holding"}),
    tb.ProcMesh: (
        trimesh.ProcMesh,
        {"activate", "device_mesh", "owned_view", "process_group", "rank_tensor", "run"},  # tensors have no such form
    ),
    tb.RDMABuffer: (RDMABuffer, {"aclose", "check_read", "check_write", "handle", "move", "own_memory"}),
    tb.Receiver: (trimesh.Receiver, {"aclose"}),
    blocking_service.Pool: (service.Pool, set()),
    blocking_service.PoolSession: (service.PoolSession, {"moves"}),
    blocking_service.ReplayBuffer: (service.ReplayBuffer, set()),
    blocking_service.Slots: (service.Slots, set()),
    blocking_service.Store: (service.Store, set()),
}
"""The class of `trimesh` that each stands for, and what it does not have of that."""


def public(cls: type[Any]) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


def test_a_face_has_each_public_name_of_its_handle() -> None:
    missing = {face: public(handle) - public(face) for face, (handle, _) in CLASSES.items()}
    assert missing == {face: left_out for face, (_, left_out) in CLASSES.items()}


def test_derived_methods_have_signature_and_docstring_of_those_of_the_handle() -> None:
    assert inspect.signature(tb.HostMesh.spawn_procs) == inspect.signature(trimesh.HostMesh.spawn_procs)
    assert "hosts.run([" in (tb.HostMesh.run.__doc__ or "")
    for face in CLASSES:
        for name, method in inspect.getmembers(face, inspect.isfunction):
            doc = method.__doc__ or ""
            assert name.startswith("_") or (doc and "await " not in doc and "async " not in doc), method


def test_an_attribute_of_a_handle_cannot_be_set() -> None:
    host: Any = tb.this_host()
    with pytest.raises(AttributeError, match="cannot be set"):
        host.extent = trimesh.Extent()


def test_an_object_that_is_being_made_has_no_private_name() -> None:
    """As copies and debuggers ask for."""
    for face in (tb.ActorMesh, blocking_service.Pool):
        with pytest.raises(AttributeError, match="_inner"):
            face.__new__(face)._inner  # noqa: B018


def test_a_mesh_that_is_being_made_was_not_forgotten() -> None:
    """M1: as after an error of its arguments."""
    tb.Spawning.__new__(tb.Spawning)


def test_names_that_a_blocking_mesh_lacks() -> None:
    """K06: those of tensors say what to write."""
    procs = tb.this_proc()
    with pytest.raises(AttributeError, match=r"no 'activate': write trimesh\.blocking\.run\(function, procs\)"):
        procs.activate  # noqa: B018
    with pytest.raises(AttributeError, match="'ProcMesh' object has no attribute 'nothing'"):
        procs.nothing  # noqa: B018
    with pytest.raises(TypeError, match="current_view takes a mesh of processes or of actors, got 3"):
        tb.current_view(3)


def test_an_endpoint_is_made_once() -> None:
    with tb.this_proc().spawning("own", Named) as own:
        assert own.thread_name.call_one() == "trimesh.blocking"
        assert own.thread_name is own.thread_name


def test_functions_are_mapped_and_submitted() -> None:
    """M12, K06: in a thread, unless it is told otherwise; a generator of items is closed with the block."""
    notes: list[str] = []

    def items() -> Generator[int, None, None]:
        try:
            yield from range(1_000)
        finally:
            notes.append("closed")

    with tb.this_proc().spawning("own", Named):
        kept = items()
        with tb.this_proc().map(abs, kept) as results:
            assert next(iter(results)) == (0, 0)
        assert notes == ["closed"]
        for thread, is_trio in ((True, False), (False, True)):
            name = tb.this_proc().submit(thread_name, thread=thread).result(HANG_SECONDS)
            assert (name == "trimesh.blocking") is is_trio
        assert tb.this_proc().submit(thread_name).result(HANG_SECONDS) != "trimesh.blocking"


def test_pool_is_open_inside_the_block_of_its_mesh() -> None:
    """K06: also if that stays open until `close`."""
    spawning = tb.this_proc().spawning("own", Named)
    with blocking_service.open_pool(spawning.open()) as pool:
        assert pool.thread_name() == "trimesh.blocking"
        with pytest.raises(RuntimeError, match="close first what was opened inside: the pool of"):
            spawning.close()
    spawning.close()


def test_program_has_a_name_and_files_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W3, K06: while the block of each is open."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = tmp_path / "trimesh" / "own"
    with tb.log_to(tmp_path / "metrics"), tb.this_proc().spawning("own", Named) as own:
        with tb.publish_as("own", own):
            assert name.exists()
            with pytest.raises(ConnectError, match="is published by this program itself"), tb.connect("own", Named):
                pass
        assert not name.exists()
    assert (tmp_path / "metrics" / "metrics.jsonl").exists()


def thread_name() -> str:
    return threading.current_thread().name


class Named(trimesh.Actor):
    @trimesh.endpoint
    async def thread_name(self) -> str:
        return thread_name()


def test_the_face_of_a_face_is_itself() -> None:
    slots = blocking_service.Slots.__new__(blocking_service.Slots)
    assert blocking_service.face(slots) is slots
    host = tb.this_host()
    assert tb.face(host) is host
