"""pyarrow, imported when rows are read; it has no types of its own, so these are names for people."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

ArrowSchema: TypeAlias = Any
ArrowTable: TypeAlias = Any
ArrowBatch: TypeAlias = Any
ArrowArray: TypeAlias = Any
ArrowType: TypeAlias = Any


def arrow(module: str = "pyarrow") -> Any:
    """Return the module `pyarrow`, or one below it.

    Raises:
        ModuleNotFoundError: It is not installed; the text says how.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "streams of data need pyarrow, which is not installed here: write `pip install 'trimesh-actors[data]'`",
            name="pyarrow",
        ) from error
