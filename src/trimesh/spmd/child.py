"""Child program of a rank: runs a script, a module or a function, and ends without the interpreter's finalization.

    python child.py script PATH ARGS...
    python child.py module NAME ARGS...
    python child.py function DESCRIPTOR

A script or module runs as `python PATH` or `python -m NAME` would run it. For a function, standard input holds what
`pack` pickled; the pickled result is written to the descriptor. If the function raises, the exception is written
instead, its traceback goes to standard error, and the exit code is 1. The module imports nothing of trimesh: the
program may not need it.

Threads of torch's gloo that free a tensor while the interpreter is finalized abort the process, although its work is
done (pytorch/pytorch#190489). So the program ends by `os._exit`, after its threads, atexit functions and streams.
"""

from __future__ import annotations

import atexit
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, NoReturn

import cloudpickle as untyped

cloudpickle: Any = untyped


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a function and its arguments for another interpreter, with `sys.path`.

    Raises:
        TypeError: They cannot be pickled.
    """
    path = pickle.dumps(sys.path)
    return len(path).to_bytes(8, "little") + path + bytes(cloudpickle.dumps((function, args)))


def run_script(path: str) -> int:
    """Run a script as `__main__`; return the exit code."""
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        runpy.run_path(path, run_name="__main__")
        return 0
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)  # noqa: T201 - as Python does
        return 2
    program = types.ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    exec(compile(source, path, "exec", dont_inherit=True), program.__dict__)  # noqa: S102 - this is its purpose
    return 0


def run_module(name: str) -> int:
    """Run a module as `__main__`; return the exit code."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]  # noqa: SLF001 - what `python -m` calls
    return 0


def run_function(descriptor: str) -> int:
    """Run the function on standard input; return the exit code."""
    work = sys.stdin.buffer.read()
    answer = os.fdopen(int(descriptor), "wb")
    length = int.from_bytes(work[:8], "little")
    sys.path[:] = pickle.loads(work[8 : 8 + length])
    function, args = pickle.loads(work[8 + length :])
    with answer:
        try:
            result = function(*args)
        except Exception as error:  # noqa: BLE001 - told, whatever it is
            traceback.print_exc()
            answer.write(_pickled_error(error))
            return 1
        answer.write(cloudpickle.dumps(result))
    return 0


def _pickled_error(error: Exception) -> bytes:
    """Return a pickled error without its traceback and causes; empty if it cannot be pickled."""
    try:
        pickled = bytes(cloudpickle.dumps(error))
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - its traceback tells
        return b""
    return pickled


def run(program: Callable[[str], int], argument: str) -> int:
    """Run a program; return the exit code, as the interpreter would after an exception."""
    try:
        return program(argument)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except BaseException as error:  # noqa: BLE001 - the interpreter prints all
        error.__traceback__ = _without_own_frames(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
    return 1


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in {__file__, runpy.__file__, "<frozen runpy>"}:
        trace = trace.tb_next
    return trace


def end(code: int) -> NoReturn:
    """End the process after its threads, atexit functions and streams, by a signal if the code is negative."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for threads that are not daemons
        atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter calls
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


KINDS = {"script": run_script, "module": run_module, "function": run_function}

if __name__ == "__main__":
    kind, argument, *args = sys.argv[1:]
    sys.argv = [argument, *args]
    end(run(KINDS[kind], argument))
