"""Child program of a rank whose SPMD program is a function: runs it and returns its result.

    python child.py DESCRIPTOR

Standard input holds the function, pickled by `pack`. The pickled result is written to the descriptor. If the function
raises, the exception is written instead, its traceback goes to standard error, and the exit code is 1. The module
imports nothing of trimesh: the function may not need it.
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
    """Pickle a function and its arguments for another interpreter, with `sys.path`.

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
    """Return a pickled error without its traceback and causes; empty if it cannot be pickled."""
    try:
        pickled = bytes(cloudpickle.dumps(error))
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - its traceback tells
        return b""
    return pickled


if __name__ == "__main__":
    raise SystemExit(main())
