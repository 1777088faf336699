"""What stands in a value for something of a package above: the process that decodes the value says what it is.

Pickles name this function, so decoding one does not import that package.
"""

from __future__ import annotations

from typing import Any

from trimesh._runtime.life.current import current_proc


def rebuild(name: str, *fields: Any) -> Any:
    """Return what the service `name` has in this process for some fields; see `Handler.rebuild`."""
    return current_proc().services.rebuild(name, fields)
