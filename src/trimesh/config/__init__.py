"""PURE: every setting that a user can make; in layers: default, file, environment, `with trimesh.configured(...)`.

`current()` returns the settings of the running task. [docs/settings.md](docs/settings.md) is printed from here by
`python -m trimesh.config`.
"""

from trimesh.config.layers import (
    JOBS_TABLE,
    Sources,
    above,
    choose,
    configured,
    current,
    from_environment,
    from_file,
    install,
    provide,
    reread,
)
from trimesh.config.settings import SETTINGS, Setting, Settings

__all__ = [
    "JOBS_TABLE",
    "SETTINGS",
    "Setting",
    "Settings",
    "Sources",
    "above",
    "choose",
    "configured",
    "current",
    "from_environment",
    "from_file",
    "install",
    "provide",
    "reread",
]
