"""Jobs defined in a file: `[jobs.big]` of `trimesh.toml`, or `[tool.trimesh.jobs.big]` of `pyproject.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_type_hints

import attrs
import msgspec

from trimesh._runtime.system import read_sources
from trimesh.config import JOBS_TABLE, reread
from trimesh.errors import ConfigError
from trimesh.jobs.job import Job
from trimesh.jobs.kept import attach
from trimesh.jobs.kubernetes import KubernetesJob
from trimesh.jobs.local import LocalJob
from trimesh.jobs.slurm import SlurmJob
from trimesh.jobs.ssh import SSHJob

_KINDS: Final[Mapping[str, type[Job]]] = {
    "local": LocalJob,
    "ssh": SSHJob,
    "slurm": SlurmJob,
    "kubernetes": KubernetesJob,
}
_KIND: Final = "kind"

KEPT: Final = "kept:"
"""Prefix of the setting `job` that names a kept job."""


def default() -> Job:
    """Return the job that the setting `job` names, or `LocalJob(1)` if it is empty.

    So one script runs on a laptop, by ssh and under Slurm: `async with trimesh.jobs.default() as hosts:`. Set it by
    `trimesh run --job NAME script.py`, by `TRIMESH_JOB`, or as `job = "NAME"` in the file itself. "kept:NAME" is the
    kept job of that name, see `attach`.

    Raises:
        ConfigError: The file has no such job, or its table is invalid.
    """
    name = reread().job
    if name.startswith(KEPT):
        return attach(name.removeprefix(KEPT))
    return named_job(name) if name else LocalJob(1)


def named_job(name: str) -> Job:
    """Return a job of the file: `kind` is "local", "ssh", "slurm" or "kubernetes", other keys are fields of its class.

    Raises:
        ConfigError: The file has no such job, or its table is invalid.
    """
    sources = read_sources()
    where = sources.file or "a file trimesh.toml"
    try:
        tables = msgspec.convert(sources.table.get(JOBS_TABLE, {}), dict[str, dict[str, Any]])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: jobs must hold a table for each job, [jobs.NAME]: {error}") from None
    if name not in tables:
        has = f"it has {', '.join(map(repr, tables))}" if tables else "it has none"
        raise ConfigError(f"{where} must have a table [jobs.{name}] for the job {name!r}; {has}")
    return _job_of(tables[name], f"{where}: jobs.{name}")


def _job_of(table: Mapping[str, Any], where: str) -> Job:
    kind = table.get(_KIND)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(f'{where}.kind must be one of {", ".join(_KINDS)}, got {kind!r}: write kind = "local"')
    cls = _KINDS[kind]
    hints = get_type_hints(cls)
    known = [one.name for one in attrs.fields(cls) if one.init]
    said = dict[str, Any]()
    for key, value in table.items():
        if key == _KIND:
            continue
        if key not in known:
            raise ConfigError(f"{where}.{key} is no field of {cls.__name__}: there are {', '.join(sorted(known))}")
        try:
            said[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}.{key} has the wrong type: {error}, got {value!r}") from None
    if "hosts" not in said:
        raise ConfigError(f"{where}.hosts must be given: the names of the hosts, or how many")
    try:
        return cls(**said)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
