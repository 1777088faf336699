"""The engine of a mesh of processes, made when the first tensor is put there."""

from __future__ import annotations

import attrs
import trio

from trimesh._runtime.life import OwnedProcs, Proc
from trimesh.errors import MeshStopped
from trimesh.tensor.controller import generator_states
from trimesh.tensor.controller.engine import Engine
from trimesh.tensor.controller.shapes import Shapes
from trimesh.tensor.session.activation import clear_activations, sweep_activations
from trimesh.tensor.session.service import open_service


@attrs.define(eq=False)
class _Controlled(trio.abc.Instrument):
    """The engines that one process controls; what was issued in a turn of Trio's loop is sent at its end."""

    proc: Proc
    shapes: Shapes = attrs.field(factory=Shapes)
    engines: dict[int, Engine] = attrs.field(factory=dict[int, Engine])

    def before_io_wait(self, timeout: float) -> None:
        """Send what is left."""
        del timeout
        for engine in self.engines.values():
            engine.flush()
        sweep_activations()
        self.proc.transport.flush()  # it has had its turn before this wait: nothing would wake the ranks

    def closed(self, engine: Engine) -> None:
        """Forget an engine; the last one takes this along."""
        del self.engines[engine.number]
        generator_states.forget(engine)
        if not self.engines:
            clear_activations()
            trio.lowlevel.remove_instrument(self)
            del self.proc.above[_Controlled]


class WithoutProcesses:
    """What stands for the processes of a mesh that has none, and has an engine all the same.

    Attributes:
        engine: Of the mesh.
    """

    engine: Engine


def engine_of(owned: OwnedProcs | WithoutProcesses) -> Engine:
    """Return the engine of a mesh of processes.

    Raises:
        RuntimeError: It is the mesh of this very process, or this is not the thread of its Trio loop.
        MeshStopped: Its block is being left, or was.
    """
    if isinstance(owned, WithoutProcesses):
        return owned.engine
    proc = owned.proc
    if owned.members is None:
        raise RuntimeError(
            "this_proc() is this very process, where torch is used as it is: "
            "write `async with this_host().spawn_procs(...)` and activate that"
        )
    if not trio.lowlevel.in_trio_run():
        raise RuntimeError(
            f"{owned.info.name} is activated in the thread of its Trio loop, got another thread: "
            "call the function that does so by trio.from_thread.run_sync(function)"
        )
    if owned.block is None or owned.is_stopping:
        raise MeshStopped(f"{owned.info.name} computes no more: the block that owns its processes is being left")
    found = _controlled(proc)
    number = owned.whole.mesh
    assert isinstance(number, int)
    engine = found.engines.get(number)
    if engine is None:
        owned.block.check_open()
        engine = found.engines[number] = Engine(
            proc, number, owned, found.shapes, found.engines, found.closed, generator_states.joined
        )
        owned.block.adopt(engine)
        owned.fix_size("tensors lie on its processes (activate), and a team keeps its ranks")
        generator_states.follow(engine)
    return engine


def shapes_of(proc: Proc) -> Shapes:
    return _controlled(proc).shapes


def _controlled(proc: Proc) -> _Controlled:
    found = proc.above.get(_Controlled)
    if found is None:
        service = open_service(proc)
        found = proc.above[_Controlled] = _Controlled(proc, engines=service.engines)
        trio.lowlevel.add_instrument(found)
    assert isinstance(found, _Controlled)
    return found
