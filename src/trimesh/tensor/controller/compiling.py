"""`torch.compile` around mesh tensors is refused: it has no operations to compile, and reorders what Python code does.

The compiler cannot trace a tensor without memory. It would run each operation by itself, and our own functions, which
number commands and send them, as compiled ones: nothing would be faster, and no order would be sure.
"""

from __future__ import annotations

from typing import Any, Final

import torch

is_traced: Final[Any] = torch.compiler.is_dynamo_compiling
"""Whether the code that asks is read by the compiler rather than run."""

_compiler: Final[Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]


def check_not_compiled() -> None:
    """Refuse operations on mesh tensors in a compiled function.

    Raises:
        TypeError: The code that runs was given to `torch.compile`.
    """
    if _compiler():
        raise TypeError(
            "torch.compile cannot compile operations on tensors of a mesh, got some in a compiled function or module: "
            "compile what runs on the ranks, in a function under @trimesh.remote, and record a whole step by "
            "trimesh.compile"
        )


# Nor does the compiler read this: it warns of functions in C that it does not know.
check_not_compiled._torchdynamo_disable = True  # type: ignore[attr-defined]
