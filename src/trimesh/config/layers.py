"""One layer over another: what a file, the environment, or a caller says of settings; anything else is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from trimesh.config.settings import BY_NAME, PREFIX, SETTINGS, Setting, Settings
from trimesh.errors import ConfigError

_NO_SETTINGS: Final = ("TRIMESH_CONFIG", "TRIMESH_PROC", "TRIMESH_SYNCED", "TRIMESH_TRACKER", "TRIMESH_ZIG_TARGET")
_NO_SETTINGS_PREFIXES: Final = ("TRIMESH_TEST_", "TRIMESH_SERVICE_", "TRIMESH_PORT")
"""The last two are set by Kubernetes in every container beside a service that is called trimesh."""


JOBS_TABLE: Final = "jobs"
"""Of a file: jobs by name, which are no settings; `trimesh.jobs` reads them."""


class Sources(msgspec.Struct, frozen=True):
    """What the system says, below `configured`.

    Attributes:
        environment: All variables.
        table: Of the file; empty if there is none.
        file: Its name, for errors.
    """

    environment: Mapping[str, str]
    table: Mapping[str, Any] = msgspec.field(default_factory=dict[str, Any])
    file: str = ""

    def settings(self) -> Settings:
        """Return the defaults with the file's over them, and the environment's over those."""
        return from_environment(from_file(Settings(), self.table, self.file), self.environment)


def from_file(below: Settings, table: Mapping[str, Any], file: str) -> Settings:
    """Return settings with those of a table of a file in place of some.

    Raises:
        ConfigError: A key is unknown, or its value none of its kind.
    """
    return above(below, {name: said for name, said in table.items() if name != JOBS_TABLE}, f"{file}: ")


def above(below: Settings, chosen: Mapping[str, Any], where: str = "") -> Settings:
    """Return settings with others in place of some.

    Args:
        below: Those.
        chosen: By name.
        where: What texts begin with.

    Raises:
        ConfigError: A name is unknown, or its value none of its kind.
    """
    found = dict[str, Any]()
    for name, value in chosen.items():
        setting = BY_NAME.get(name)
        if setting is None:
            raise ConfigError(f"{where}there is no setting {name!r}{_guess(name, list(BY_NAME))}")
        found[name] = _checked(setting, value, value, f"{where}{name}")
    return msgspec.structs.replace(below, **found) if found else below


def from_environment(below: Settings, environment: Mapping[str, str]) -> Settings:
    """Return settings with those of `TRIMESH_*` variables in place of some; empty ones say nothing.

    Raises:
        ConfigError: A variable is unknown, or its value none of its kind.
    """
    found = dict[str, Any]()
    for variable, said in environment.items():
        if not variable.startswith(PREFIX):
            continue
        setting = _VARIABLES.get(variable)
        text = said.strip()
        if setting is None:
            if variable not in _NO_SETTINGS and not variable.startswith(_NO_SETTINGS_PREFIXES):
                raise ConfigError(
                    f"there is no setting for the environment variable {variable}{_guess(variable, list(_VARIABLES))}"
                )
        elif text:
            try:
                value = setting.kind.read(text)
            except ValueError:
                value = None
            found[setting.name] = _checked(setting, value, said, variable)
    return msgspec.structs.replace(below, **found) if found else below


def _checked(setting: Setting, value: Any, came: object, where: str) -> Any:
    try:
        return setting.kind.check(value)
    except ValueError:
        raise ConfigError(f"{where} must be {setting.kind.known}, got {came!r}") from None


def _guess(name: str, known: list[str]) -> str:
    from trimesh.spelling import suggestion  # noqa: PLC0415 - only errors need it

    return f"{suggestion(name, known)}: there are {', '.join(known)}"


_VARIABLES: Final = {one.variable: one for one in SETTINGS}
