"""Shows the part `Example:` of a docstring as a listing. The reader of docstrings knows it as `Examples:` only."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class ExampleSections(Extension):
    """Renames that part while the sources are read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
