"""Copy the values of shared bounds from `trimesh/limits.py` to `limits.zig`: `python -m native.shared_limits`.

A bound is shared when both files name it. The text of its value is the same in both languages.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON, ZIG = ROOT / "src/trimesh/limits.py", ROOT / "native/src/limits.zig"


def written() -> str:
    """Return the text of `limits.zig` with the values of Python."""
    values = dict(re.findall(r"^(\w+): Final = (.+)$", PYTHON.read_text(), re.MULTILINE))
    bound = re.compile(r"^pub const (\w+) = (.+);$", re.MULTILINE)
    return bound.sub(lambda m: f"pub const {m[1]} = {values.get(m[1], m[2])};", ZIG.read_text())


if __name__ == "__main__":
    ZIG.write_text(written())
