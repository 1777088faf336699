"""Every bound of trimesh: its value, its unit (last word of the name) and the reason for the value.

Bounds that the native library shares are repeated in `native/src/limits.zig`; `tests/native` compares the two. Code
reads them as `limits.NAME`, when it needs them, so that a test can set one for its own time.
"""

from __future__ import annotations

from trimesh.limits.bulk import *
from trimesh.limits.calls import *
from trimesh.limits.hosts import *
from trimesh.limits.links import *
from trimesh.limits.observing import *
from trimesh.limits.processes import *
from trimesh.limits.service import *
from trimesh.limits.tensors import *
from trimesh.limits.testing import *
