"""Random numbers of simulated processes: each process has its own generators, all derived from the seed.

`random`, numpy and torch keep one generator for a whole operating system process. It is lent to the simulated process
whose task runs, and starts there as in a real one: from the seed of the mesh, by `ProcSeeds`. Consumers of system
entropy - `os.urandom`, `secrets`, `uuid4`, generators without a seed - get it from the seed of the run.
"""

from __future__ import annotations

import functools
import os
import random
import ssl
import sys
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import attrs
import trio

from trimesh._runtime.actors.cell import cell_in
from trimesh._runtime.life.current import find_proc_anywhere, proc_in
from trimesh._runtime.system.seeds import ProcSeeds, when_imported
from trimesh.ids import ProcId
from trimesh.testing.plans.determinism import stream
from trimesh.testing.simulated.guards import Change

_CONTROLLER: Final = ProcId(1)

_UUID_TICKS: Final = 10_000_000
"""Ticks per second of the time in a UUID of version 1."""

_UUID_EPOCH: Final = 0x01B21DD213814000
"""Ticks from the epoch of UUIDs, in 1582, to that of Unix."""

_MULTICAST: Final = 1 << 40
"""Bit that marks a random node number: no network card has it."""

_LAST_TIMES: Final = ("_last_timestamp", "_last_timestamp_v7")
"""Variables by which `uuid` makes times grow; they are reset, because times of a new run begin earlier."""


@attrs.define(eq=False)
class _Generators:
    """Random generators of one simulated process, kept while another one runs.

    Attributes:
        seeds: Their initial seeds.
        python, numpy, torch: Their states; None if unused.
        entropy: Replacement for the system's entropy.
    """

    seeds: ProcSeeds
    entropy: random.Random
    python: Any = None
    numpy: Any = None
    torch: Any = None

    def lend(self) -> None:
        """Install their states in this process."""
        if self.python is None:
            random.seed(self.seeds.python)
        else:
            random.setstate(self.python)
        numpy = sys.modules.get("numpy.random")
        if hasattr(numpy, "set_bit_generator"):
            self.lend_numpy(numpy)
        torch = sys.modules.get("torch")
        if hasattr(torch, "default_generator"):
            self.lend_torch(torch)

    def lend_numpy(self, numpy: Any) -> None:
        """Make numpy draw from the generator of this process."""
        if self.numpy is None:
            self.numpy = numpy.RandomState(self.seeds.numpy)._bit_generator  # noqa: SLF001 - as `seed` seeds it
        numpy.set_bit_generator(self.numpy)

    def lend_torch(self, torch: Any) -> None:
        """Make torch draw from the generator of this process.

        It sets the default generator itself: `torch.set_rng_state` would also reset those of meshes of tensors.
        """
        if self.torch is None:
            self.torch = torch.Generator().manual_seed(self.seeds.torch).get_state()
        torch.default_generator.set_state(self.torch)

    def take_back(self) -> None:
        """Save their states from this process."""
        self.python = random.getstate()
        torch: Any = sys.modules.get("torch")
        if self.torch is not None:
            self.torch = torch.default_generator.get_state()


class SimRandom(trio.abc.Instrument):
    """The random numbers of one simulated run; an instrument of its Trio run."""

    def __init__(self, seed: int, wall: Callable[[], float]) -> None:
        self._seed = seed
        self._wall = wall
        self._of: dict[ProcId, _Generators] = {}
        self._of_imports = stream(seed, "imports")
        self._lent: _Generators | None = None

    def start(self, proc_id: ProcId, seeds: ProcSeeds) -> None:
        self._of[proc_id] = _Generators(seeds, stream(self._seed, "entropy", proc_id))

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Install the generators of the process whose user code is about to run."""
        proc = proc_in(task.context)
        if proc is not None and (proc.proc_id == _CONTROLLER or cell_in(task.context) is not None):
            generators = self._of.get(proc.proc_id)
            if generators is not self._lent and generators is not None:
                self._lend(generators)

    def _lend(self, generators: _Generators | None) -> None:
        if self._lent is not None:
            self._lent.take_back()
        self._lent = generators
        if generators is not None:
            generators.lend()

    def _entropy(self) -> random.Random | None:
        proc = find_proc_anywhere()
        if proc is None or not proc.is_simulated:
            return None
        if _is_importing():  # a module is imported once in this process, not again when the seed is replayed
            return self._of_imports
        found = self._of.get(proc.proc_id)
        return None if found is None else found.entropy

    def _uuid_bytes(self, entropy: random.Random) -> bytes:
        """Return a UUID of version 1 from the virtual wall clock and the entropy of the process."""
        ticks = round(self._wall() * _UUID_TICKS) + _UUID_EPOCH + entropy.getrandbits(8)
        return uuid.UUID(
            fields=(
                ticks & 0xFFFFFFFF,
                ticks >> 32 & 0xFFFF,
                ticks >> 48 & 0x0FFF,
                entropy.getrandbits(6),
                entropy.getrandbits(8),
                entropy.getrandbits(48),
            ),
            version=1,
        ).bytes

    def imported(self, adopt: Callable[[_Generators, Any], None], module: Any) -> None:
        """Install a generator in a newly imported module, for the process that imported it."""
        if self._lent is not None:
            adopt(self._lent, module)

    def changes(self) -> list[Change]:
        """Return the replacements by which simulated processes get these numbers."""
        urandom, seed, node = os.urandom, random.Random.seed, uuid.getnode
        of_time: Any = vars(uuid).get("_generate_time_safe")

        def simulated_urandom(size: int, *_: Any) -> bytes:
            entropy = self._entropy()
            return urandom(size) if entropy is None else entropy.randbytes(size)

        def simulated_pseudo(size: int) -> tuple[bytes, bool]:
            return simulated_urandom(size), True

        def simulated_seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            seed(generator, int.from_bytes(simulated_urandom(32)) if a is None else a, version)

        def simulated_of_time() -> Any:
            entropy = self._entropy()
            return of_time() if entropy is None else (self._uuid_bytes(entropy), None)

        def simulated_node() -> int:
            proc = find_proc_anywhere()
            if proc is None or not proc.is_simulated:
                return node()
            return stream(self._seed, "node", proc.proc_id).getrandbits(48) | _MULTICAST

        changes: list[Change] = [
            (os, "urandom", simulated_urandom),
            (os, "getrandom", simulated_urandom),
            (ssl, "RAND_bytes", simulated_urandom),
            (random, "_urandom", simulated_urandom),
            (random.Random, "seed", simulated_seed),
            (uuid, "getnode", simulated_node),
        ]
        if hasattr(ssl, "RAND_pseudo_bytes"):  # until Python 3.11
            changes.append((ssl, "RAND_pseudo_bytes", simulated_pseudo))
        if of_time is not None:
            changes.append((uuid, "_generate_time_safe", simulated_of_time))
        return changes + [(uuid, name, None) for name in _LAST_TIMES if hasattr(uuid, name)]

    @contextmanager
    def lent(self) -> Generator[None, None, None]:
        """Let simulated processes draw these numbers, while a simulation runs."""
        self.start(_CONTROLLER, ProcSeeds.of(self._seed, "controller", 0, 0))
        _watch_imports()
        with _kept():
            _running.append(self)
            try:
                yield
            finally:
                _running.remove(self)
                self._lent = None


def _is_importing() -> bool:
    frame = sys._getframe()  # noqa: SLF001
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
    return False


_running: Final[list[SimRandom]] = []
"""The running simulation, which is notified of modules that are imported in it."""


@functools.cache
def _watch_imports() -> None:
    def tell(adopt: Callable[[_Generators, Any], None], module: Any) -> None:
        for one in _running:
            one.imported(adopt, module)

    when_imported("numpy.random", functools.partial(tell, _Generators.lend_numpy))
    when_imported("torch", functools.partial(tell, _Generators.lend_torch))


@contextmanager
def _kept() -> Generator[None, None, None]:
    """Restore the generators of this process at the end of the block."""
    numpy: Any = sys.modules.get("numpy.random")
    torch: Any = sys.modules.get("torch")
    python = random.getstate()
    of_numpy = numpy.get_bit_generator() if hasattr(numpy, "set_bit_generator") else None
    of_torch = torch.default_generator.get_state() if hasattr(torch, "default_generator") else None
    try:
        yield
    finally:
        random.setstate(python)
        if of_numpy is not None:
            numpy.set_bit_generator(of_numpy)
        if of_torch is not None:
            torch.default_generator.set_state(of_torch)
