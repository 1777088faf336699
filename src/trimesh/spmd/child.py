"""What runs in the interpreter of a rank whose program is a function.

    python child.py DESCRIPTOR

Standard input has the function, pickled by `pack`. The result goes to the descriptor, pickled, or the exception that
the function has raised; then the exit code is 1, and its traceback is on standard error. It imports nothing of trimesh:
the function may not need it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle as untyped

cloudpickle: Any = untyped


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a function and its arguments for another interpreter, with where that finds modules.

    Raises:
        TypeError: They cannot be pickled.
    """
    path = pickle.dumps(sys.path)
    return len(path).to_bytes(8, "little") + path + bytes(cloudpickle.dumps((function, args)))


def main() -> int:
    """Run the function; return the exit code."""
    work = sys.stdin.buffer.read()
    answer = os.fdopen(int(sys.argv[1]), "wb")
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
    """Return an error without what hangs on it; nothing where it cannot travel."""
    try:
        pickled = bytes(cloudpickle.dumps(error))
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - its traceback tells
        return b""
    return pickled


if __name__ == "__main__":
    raise SystemExit(main())
