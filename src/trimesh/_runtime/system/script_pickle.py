"""What `multiprocessing` of a worker does with classes and functions of the user's script.

In a worker they came by value, and its `__main__` has no file that a process started by `spawn` or `forkserver` could
run again, as it does in plain Python. So they go by value there, too: with their name, and what makes them where the
name is not known. They are put on `__main__` there, so that pickles that come back by name mean those of this worker.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

from trimesh._runtime.system.import_watch import when_imported
from trimesh._wire.pickled.by_value import MAIN_NAMES, find


def carry_script() -> None:
    """Let what `multiprocessing` pickles in this process, and in what is forked from it, carry the user's script."""
    when_imported("multiprocessing.reduction", _carry)


def _carry(module: ModuleType) -> None:
    reduction: Any = module
    reduction.ForkingPickler.reducer_override = _reduce


def _reduce(_: object, thing: Any) -> Any:
    if isinstance(thing, (FunctionType, type)) and thing.__module__ in MAIN_NAMES:
        return make, (thing.__qualname__, _cloudpickle().dumps(thing))
    return NotImplemented


def make(name: str, data: bytes) -> Any:
    """Return a class or function of the script: that of this process's `__main__`, or one made from a pickle.

    Called where the pickle is loaded: in a child of a worker, forked or not, or in the worker itself.
    """
    main = sys.modules["__main__"]
    found: Any = find(main, name)
    if found is None:
        found = _cloudpickle().loads(data)
        _place(main, found)
        attributes: dict[str, Any] = found.__dict__
        for one in (found, *attributes.values()):
            if isinstance(one, FunctionType):
                for used in one.__globals__.values():
                    _place(main, used)
    return found


def _cloudpickle() -> Any:
    import cloudpickle  # noqa: PLC0415 - needed by few workers

    return cloudpickle


def _place(main: ModuleType, thing: Any) -> None:
    if isinstance(thing, (FunctionType, type)) and thing.__module__ in MAIN_NAMES and thing.__qualname__.isidentifier():
        main.__dict__.setdefault(thing.__qualname__, thing)
