"""The `Proc` of the user's own program: created by the first block, closed by the last.

It runs as a system task of Trio because blocks of sibling tasks share it: handles made in one can be given to actors
of another. When no block is open, it is closed with its transport and all descriptors.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING

import trio

from trimesh._runtime.actors.agent import run_with_agent
from trimesh._runtime.actors.context import set_proc_of_run, set_proc_of_task
from trimesh._runtime.life.current import find_proc
from trimesh._runtime.life.family import Family, Preload
from trimesh._runtime.life.proc import Proc
from trimesh._runtime.spawner.client import Siblings
from trimesh._runtime.system.linux import refusals
from trimesh._runtime.tasks.interrupt import heed_sigterm, ignore_sigterm, interrupt_blocks, run_to_end
from trimesh.config import Settings, reread
from trimesh.context_managers import asynccontextmanager
from trimesh.errors import SpawnError, TrimeshInternalError, leaves
from trimesh.ids import ID_MAX, ProcId
from trimesh.shape.extent import Extent

if TYPE_CHECKING:
    from trimesh._runtime.control import ControlSocket
    from trimesh._runtime.flight_feed import FlightRecord
    from trimesh._runtime.peers.host import Host
    from trimesh._runtime.spawner.spawner_process import SpawnerProcess
    from trimesh._transport.native.transport import NativeTransport


class _Controller:
    """The running `Proc` of this Trio run, and its users.

    Shielded: Trio cancels system tasks when the main task ends, while blocks of other system tasks, which are left
    only then, still need it.
    """

    def __init__(
        self,
        proc: Proc,
        transport: NativeTransport,
        control: ControlSocket | None,
        spawner: SpawnerProcess | None,
        settings: Settings,
    ) -> None:
        self.proc = proc
        self.control = control
        self.family = Family(proc, self._open_host)
        self.family.siblings = Siblings()
        self._transport = transport
        self._spawner = spawner
        self._token = trio.lowlevel.current_trio_token()
        self.users = 0
        self.scope: trio.CancelScope = trio.CancelScope(shield=True)
        self.ready = trio.Event()
        self.closed = trio.Event()
        self.error: BaseException | None = None
        self.left_by: BaseException | None = None
        self.record: FlightRecord | None = None
        self._settings = settings
        self.leases: list[_Lease] = []
        if control is not None:
            control.on_stop = self.interrupt

    async def run(self) -> None:
        """Serve until released. Must not raise: it is a system task."""
        set_proc_of_task(self.proc)
        try:
            with self.scope:
                async with trio.open_nursery() as nursery:
                    await nursery.start(run_with_agent, self.proc, self.proc.me, Extent().point(0))
                    if self.control is not None:
                        self.control.open()
                    self.ready.set()
                    if self.record is not None:
                        nursery.start_soon(self.record.keep_looking)
                        nursery.start_soon(self.record.read_gpus, self._settings)
                        if self._settings.history:
                            nursery.start_soon(self.record.keep_history, self._settings.history)
        except BaseException as error:  # noqa: BLE001 - a system task must not raise; the leases raise it
            self.error = error
        finally:
            if self.control is not None:
                self.control.close()
            self.proc.transport.close()
            if self._spawner is not None:
                self._spawner.abandon()
            if self.record is not None:
                self.record.end_run(self.error or self.left_by)
                self.left_by = None
            self.ready.set()
            self.closed.set()

    def interrupt(self) -> str:
        """Act as Ctrl-C does, without a signal: all blocks are left and raise `KeyboardInterrupt`.

        Returns:
            Reason why that is impossible, or an empty text.
        """
        if not self.leases:
            return "no block of this run can be stopped: end its process with `kill`"
        if not interrupt_blocks():
            for lease in self.leases:
                lease.interrupt()
        return ""

    def interrupt_soon(self) -> None:
        """Call `interrupt` in the Trio thread; any thread may call it."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self.interrupt)

    def _open_host(self, preload: Preload) -> AbstractAsyncContextManager[Host]:
        from trimesh._runtime.life.local_host import open_local_host  # noqa: PLC0415 - see `_start`

        assert self.family.siblings is not None
        spawner, self._spawner = self._spawner, None
        return open_local_host(self.proc, self._transport, preload, self.family.siblings, spawner)


class _Lease:
    """One use of the controller, by a task that has opened a block."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self._is_interrupted = False

    def interrupt(self) -> None:
        self._is_interrupted = True
        self.scope.cancel(reason="trimesh stop")

    def check(self, error: BaseException | None) -> None:
        """Raise a pending interrupt, in place of the normal end of the body or beside its error.

        Raises:
            KeyboardInterrupt: An interrupt is pending.
            BaseExceptionGroup: An interrupt is pending, and the body has failed.
        """
        if not self._is_interrupted or (error is not None and _has_interrupt(error)):
            return
        if error is None or all(isinstance(leaf, trio.Cancelled) for leaf in leaves(error)):
            raise KeyboardInterrupt
        raise BaseExceptionGroup("interrupted by `trimesh stop`", [KeyboardInterrupt(), error])


def _has_interrupt(error: BaseException) -> bool:
    return any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error))


_of_run: trio.lowlevel.RunVar[_Controller | None] = trio.lowlevel.RunVar("trimesh_controller", default=None)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def lease_proc(
    pickled: bool | None = None,  # noqa: FBT001 - None is neither
    *,
    for_host: bool = False,
    is_block: bool = True,
) -> AsyncGenerator[tuple[Proc, Family], None]:
    """Use the `Proc` of this process while a block is open.

    Args:
        pickled: Whether values are pickled; None for the mode of the family, or the setting in a new family.
        for_host: Whether the block will use the host of this machine: its spawner is started early.
        is_block: Whether `trimesh stop` ends the lease with `KeyboardInterrupt`.

    Raises:
        ValueError: The family uses the other mode.
        SpawnError: The system refuses a resource that it needs.
        TrimeshInternalError: The controller has failed; the cause is the failure.
    """
    proc = find_proc()
    if proc is not None and proc.family is not None and _of_run.get() is None:
        check_mode(proc, pickled)
        yield proc, proc.family  # a worker, or a simulated process: its Proc lives as long as it does
        return
    controller = _of_run.get() or _start(pickled, for_host=for_host)
    check_mode(controller.proc, pickled)
    controller.users += 1
    try:
        async with _leased(controller) if is_block else nullcontext():
            await controller.ready.wait()
            _check(controller)
            yield controller.proc, controller.family
    except BaseException as error:
        if controller.users == 1:
            controller.left_by = error
        raise
    finally:
        controller.users -= 1
        if controller.users == 0:
            _of_run.set(None)
            set_proc_of_run(None)
            controller.scope.cancel(reason="the last block has been left")
            _, interrupt = await run_to_end(controller.closed.wait)
            ignore_sigterm(controller.interrupt_soon)
            if interrupt is not None:
                raise interrupt
    _check(controller)


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def _leased(controller: _Controller) -> AsyncGenerator[None, None]:
    lease = _Lease()
    controller.leases.append(lease)
    failure: BaseException | None = None
    try:
        with lease.scope:
            yield
    except BaseException as error:
        failure = error
        raise
    finally:
        controller.leases.remove(lease)
        lease.check(failure)


def check_mode(proc: Proc, pickled: bool | None) -> None:  # noqa: FBT001 - see lease_proc
    """Check that `pickle=` is the mode of the family; None always is.

    Raises:
        ValueError: It is the other mode.
    """
    has = proc.values.is_pickled
    if pickled is not None and pickled != has:
        raise ValueError(
            f"all processes of a program must use the same pickle=, got {_MODES[pickled]!r} in a program with "
            f"pickle={_MODES[has]!r}: set it at the outermost block, and leave it out of the blocks inside"
        )


_MODES = {True: "on", False: "off"}


def _check(controller: _Controller) -> None:
    if controller.error is not None:
        raise TrimeshInternalError("the runtime of this process has failed; please report this") from controller.error


def _start(pickled: bool | None, *, for_host: bool) -> _Controller:  # noqa: FBT001 - see lease_proc
    settings = reread()
    proc_id = ProcId(secrets.randbelow(ID_MAX) + 1)
    with ExitStack() as undo:
        spawner = None
        if for_host:
            # The spawner's interpreter takes longer to start than everything here, and starts on another core.
            from trimesh._runtime.spawner.spawner_process import SpawnerProcess  # noqa: PLC0415 - see below

            spawner = SpawnerProcess.start(proc_id)
            undo.callback(spawner.abandon)
        controller = _prepared(proc_id, settings, pickled, spawner)
        undo.pop_all()
    _of_run.set(controller)
    set_proc_of_run(controller.proc)
    heed_sigterm(controller.interrupt_soon)
    trio.lowlevel.spawn_system_task(controller.run, name="trimesh")
    return controller


def _prepared(
    proc_id: ProcId,
    settings: Settings,
    pickled: bool | None,  # noqa: FBT001 - see lease_proc
    spawner: SpawnerProcess | None,
) -> _Controller:
    try:
        # The native library is loaded here, when the first block is entered, not by `import trimesh`. What `Proc`
        # imports comes before its transport takes descriptors.
        from trimesh._runtime.control import ControlSocket  # noqa: PLC0415
        from trimesh._runtime.flight_feed import record_run  # noqa: PLC0415
        from trimesh._runtime.life import local_host  # noqa: PLC0415
        from trimesh._runtime.services import linked_moves  # noqa: PLC0415
        from trimesh._transport.native.transport import NativeTransport  # noqa: PLC0415

        del linked_moves, local_host  # only loaded
        transport = NativeTransport(proc_id, settings=settings)
    except OSError as error:  # out of descriptors, memory or threads
        raise SpawnError(f"cannot prepare this process for meshes: {error}{refusals()}") from error
    proc = Proc(proc_id, transport, pickled=settings.pickle == "on" if pickled is None else pickled)
    control = ControlSocket(proc, proc.inquiries) if settings.observe == "on" else None
    controller = _Controller(proc, transport, control, spawner, settings)
    proc.family = controller.family
    if settings.record == "on":
        controller.record = record_run(proc)
    return controller
