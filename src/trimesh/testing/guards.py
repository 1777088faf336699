"""What user code in a simulated actor may not do, because all actors share one real process (rule S1).

`os.kill`, `os.abort` and `os._exit` would hit the test itself, `os.getpid` would tell every actor the same number, and
differ from run to run: in code of an actor they raise, and name what to use instead. `time.time` tells the virtual
time. The libraries that such code uses are left alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from trimesh._runtime.context import context, find_proc

EPOCH_SECONDS: Final = 1_000_000_000.0
"""What `time.time` says when a simulation begins: the 9th of September 2001."""

_INSTEAD: Final = {
    "kill": 'plan it from the test: `faults.kill(point, how="sigkill")`',
    "abort": 'plan it from the test: `faults.kill(point, how="abort")`',
    "_exit": 'plan it from the test: `faults.kill(point, how="exit(1)")`',
    "getpid": "use `trimesh.current_point()`, or `trimesh.context().incarnation`, to tell processes apart",
}


def _is_actor_code(depth: int) -> bool:
    """Tell whether the caller is what a user wrote, in an actor: neither the library of Python, nor Trio, nor we."""
    package = str(sys._getframe(depth).f_globals.get("__name__", "")).partition(".")[0]  # noqa: SLF001
    if package in sys.stdlib_module_names and package != "__main__":
        return False
    if package in ("trimesh", "trio", "pytest", "_pytest", "outcome"):
        return False
    try:
        proc = find_proc()
        context()
    except RuntimeError:
        return False
    return proc is not None and proc.is_simulated


def _refusal(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _is_actor_code(2):
            raise RuntimeError(
                f"os.{name}() in an actor would act on the process of the whole simulation: {_INSTEAD[name]}"
            )
        return real(*args, **kwargs)

    return refuse


@contextmanager
def guarded(wall_clock: Callable[[], float]) -> Generator[None, None, None]:
    """Guard the functions of the operating system while a simulation runs.

    Args:
        wall_clock: What `time.time` says in the actor that calls it.
    """
    real_time = time.time

    def virtual_time() -> float:
        return wall_clock() if _is_actor_code(2) else real_time()

    saved = {name: getattr(os, name) for name in _INSTEAD}
    for name, real in saved.items():
        setattr(os, name, _refusal(name, real))
    time.time = virtual_time
    try:
        yield
    finally:
        time.time = real_time
        for name, real in saved.items():
            setattr(os, name, real)
