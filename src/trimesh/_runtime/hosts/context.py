"""What a process takes over from a controller on another host, and what from its own host.

Of the controller: `env=`, `sys.argv`, warning filters, the umask, the working directory if the host has a folder of
that name, and those entries of `sys.path` that do not belong to its Python installation. Of the host: the environment,
the limits, the Python installation with its `sys.path`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

import msgspec

from trimesh._runtime.life.job_hosts import HostCode
from trimesh._runtime.spawner import wire
from trimesh._runtime.spawner.boot import own_prefixes
from trimesh._runtime.spawner.caller import capture_caller

_THREADS: Final = b"OMP_NUM_THREADS"


def far_caller(overlay: Mapping[str, str], code: HostCode | None = None) -> wire.CallerContext:
    """Return what this process, the controller, says of itself to another host: of its environment nothing.

    Args:
        overlay: Variables set over those of the host.
        code: That was brought to the host: it comes first on `sys.path`; packages come after what is this program's.
    """
    context = capture_caller({}, are_several=False)
    said = overlay if code is None else {**code.env, **overlay}
    env = {os.fsencode(name): os.fsencode(value) for name, value in said.items()}
    sys_path = context.sys_path if code is None else _with_code(context.sys_path, code)
    return msgspec.structs.replace(context, env=env, sys_path=sys_path, rlimits=())


def _with_code(own: tuple[bytes, ...], code: HostCode) -> tuple[bytes, ...]:
    inside = tuple(os.fsencode(prefix).rstrip(b"/") + b"/" for prefix in own_prefixes())
    installed = [path for path in own if (path + b"/").startswith(inside)]
    return (*code.paths, *(path for path in own if path not in installed), *code.packages, *installed)


def context_here(asked: wire.CallerContext, *, are_several: bool) -> wire.CallerContext:
    """Return the context of a process on this host that a controller on another one has asked for.

    Args:
        asked: What the controller says.
        are_several: See `capture_caller`.
    """
    own = capture_caller({}, are_several=False)
    env = {**own.env, **asked.env}
    if are_several:
        env.setdefault(_THREADS, b"1")
    return msgspec.structs.replace(
        own,
        env=env,
        cwd=asked.cwd if asked.cwd and os.path.isdir(asked.cwd) else own.cwd,
        sys_path=_sys_path(asked),
        argv=asked.argv,
        filters=asked.filters,
        umask=asked.umask,
    )


def _sys_path(asked: wire.CallerContext) -> tuple[bytes, ...]:
    own = [os.fsencode(path) for path in sys.path]
    if asked.version == sys.version_info[:2] and list(asked.prefixes) == [os.fsencode(one) for one in own_prefixes()]:
        return tuple(dict.fromkeys((*asked.sys_path, *own)))
    inside = tuple(prefix.rstrip(b"/") + b"/" for prefix in asked.prefixes)
    theirs = [path for path in asked.sys_path if not (path + b"/").startswith(inside)]
    return tuple(dict.fromkeys((*theirs, *own)))
