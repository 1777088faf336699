"""`with mesh.activate():`, in which torch's factories make their tensors on the ranks (rule N1).

Torch's dispatch modes are per thread: a mode entered by one task affects all tasks of the thread. So a thread has one
mode, on its stack while any task has an active mesh, which checks a context variable at each call.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Final
from weakref import ReferenceType, ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from trimesh.actor.proc_mesh import ProcMesh
from trimesh.tensor.controller.team import Team
from trimesh.tensor.controller.tensor import MeshTensor
from trimesh.tensor.controller.upload import upload
from trimesh.tensor.issue.issue import issue


class _Active:
    """An activation of a mesh. It lives as long as any context that holds it, such as that of a child task."""

    __slots__ = ("__weakref__", "is_global", "procs", "team")

    def __init__(self, procs: ProcMesh, team: Team, *, is_global: bool) -> None:
        self.procs = procs
        self.team = team
        self.is_global = is_global


_active: ContextVar[_Active | None] = ContextVar("trimesh_active_mesh", default=None)

_LIFTS: Final = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


def active_team() -> Team | None:
    """Return the team on which the running task makes tensors, or None."""
    active = _active.get()
    return None if active is None else active.team


def active_mesh() -> ProcMesh | None:
    """Return the mesh on which torch's factories make tensors in the running task, or None.

    It is the view of the innermost enclosing `activate()` block; None outside of any, and under `no_mesh()`. A task
    inherits it from the task that started it.

    Blocking: no checkpoint.

    Example:
        >>> with procs.slice(gpus=0).activate():
        ...     assert trimesh.tensor.active_mesh() == procs.slice(gpus=0)
    """
    active = _active.get()
    return None if active is None else active.procs


@contextmanager
def nothing_active() -> Generator[None]:
    """Make torch's factories return ordinary tensors in a block, whatever mesh is active around it."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def no_mesh() -> AbstractContextManager[None]:
    """Return a block in which torch's factories make ordinary tensors, whatever mesh is active around it.

    Example:
        >>> with procs.activate():
        ...     with trimesh.tensor.no_mesh():
        ...         here = torch.zeros(3)
    """
    return nothing_active()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs factories on the ranks of the mesh that the calling task has activated."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if MeshTensor in types:
            return issue(func, args, kwargs or {})
        active = _active.get()
        if active is None:
            return func(*args, **(kwargs or {}))
        team = active.team
        if func in _LIFTS:  # `torch.tensor` has made it from data of this process
            return MeshTensor._above.put_global(args[0], team) if active.is_global else upload(args[0], team)
        if not _is_factory(func):
            return func(*args, **(kwargs or {}))
        make = MeshTensor._above.make_global if active.is_global else issue
        return make(func, args, _on_device(func, kwargs or {}, team), team)


_FACTORIES: Final[dict[Any, bool]] = {}


def _is_factory(func: Any) -> bool:
    found = _FACTORIES.get(func)
    if found is None:
        schema = func._schema
        makes = any("Tensor" in str(one.type) for one in schema.returns)
        takes = any("Tensor" in str(one.type) for one in schema.arguments)
        found = _FACTORIES[func] = makes and not takes
    return found


def _on_device(func: Any, kwargs: dict[str, Any], team: Team) -> dict[str, Any]:
    if kwargs.get("device") is None and any(one.name == "device" for one in func._schema.arguments):
        return {**kwargs, "device": team.engine.device}
    return kwargs


class _Stack(threading.local):
    """Activations in the tasks of a thread, and the dispatch mode, which is on while there are any."""

    def __init__(self) -> None:
        self.living: set[ReferenceType[_Active]] = set()
        self.mode: _Mode | None = None

    def push(self, active: _Active) -> None:
        self.living.add(ref(active, self.living.discard))
        if self.mode is None:
            # Below other modes: each of them pops the topmost mode on exit, which must not be this one.
            above = _pop_until(None)
            self.mode = _Mode()  # type: ignore[no-untyped-call]
            _push_mode(self.mode)
            _push_all(above)

    def sweep(self) -> None:
        """Remove the mode if no task has an active mesh."""
        if self.mode is not None and not self.living:
            above = _pop_until(self.mode)
            self.mode = None
            _push_all(above)

    def clear(self) -> None:
        """Remove the mode even if a mesh is active, as no commands can be issued any more."""
        self.living.clear()
        self.sweep()


def _pop_until(last: _Mode | None) -> list[Any]:
    """Pop the modes above `last` from this thread's stack; return them, topmost first."""
    above: list[Any] = []
    while _get_current_dispatch_mode_stack():
        mode = _pop_mode()
        if mode is last:
            break
        above.append(mode)
    return above


def _push_all(modes: list[Any]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)


activations: Final = _Stack()


class Activation:
    """Context manager that `activate()` returns. Enter and leave it in the same task; it nests.

    A worker thread has a stack of modes of its own, so no mesh is active there, even under a copy of the task's
    context.
    """

    def __init__(self, procs: ProcMesh, team: Team, *, is_global: bool = False) -> None:
        self._procs = procs
        self._team = team
        self._is_global = is_global
        self._tokens: list[Token[_Active | None]] = []

    def __enter__(self) -> None:
        """Start making tensors on the ranks, in this task and in tasks that it starts."""
        active = _Active(self._procs, self._team, is_global=self._is_global)
        self._tokens.append(_active.set(active))
        activations.push(active)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restore the previous state; tasks started in the block keep making tensors on the ranks."""
        _active.reset(self._tokens.pop())
        activations.sweep()
