"""Layers of settings from files, the environment and callers; unknown names and values are errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from trimesh.config.settings import BY_NAME, PREFIX, SETTINGS, Setting, Settings
from trimesh.context_managers import contextmanager
from trimesh.errors import ConfigError, TrimeshInternalError

_NO_SETTINGS: Final = ("TRIMESH_CONFIG", "TRIMESH_PROC", "TRIMESH_SYNCED", "TRIMESH_TRACKER", "TRIMESH_ZIG_TARGET")
_NO_SETTINGS_PREFIXES: Final = ("TRIMESH_TEST_", "TRIMESH_SERVICE_", "TRIMESH_PORT")
"""The last two are set by Kubernetes in every container beside a service that is called trimesh."""


JOBS_TABLE: Final = "jobs"
"""Table of a file with jobs by name, which are not settings; `trimesh.jobs` reads them."""


class Sources(msgspec.Struct, frozen=True):
    """Settings from file and environment, the layers below `configured`.

    Attributes:
        environment: All environment variables.
        table: Settings of the file; empty if there is no file.
        file: Name of the file, for errors.
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
    """Return `below` with the values of `TRIMESH_*` environment variables; empty variables are ignored.

    Raises:
        ConfigError: A variable is unknown, or its value is not one that the setting accepts.
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
                    f"a {PREFIX}* environment variable must name a setting, got {variable}"
                    f"{_guess(variable, list(_VARIABLES))}"
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
    from trimesh.plain_numbers import suggestion  # noqa: PLC0415 - only errors need it

    return f"{suggestion(name, known)}: there are {', '.join(known)}"


_VARIABLES: Final = {one.variable: one for one in SETTINGS}


# ---- which settings count here: those of the block of `configured`, else those of the process ------------------------

_chosen: ContextVar[Settings | None] = ContextVar("trimesh_settings", default=None)


class _Base:
    """The settings of this process, below all `configured`."""

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.is_given = False
        self.read: Callable[[], Sources] = _not_provided


def _not_provided() -> Sources:
    raise TrimeshInternalError("the package was imported in parts: import trimesh")


_base = _Base()


def provide(read: Callable[[], Sources]) -> None:
    """Say how the file and the environment are read; they are when a setting is asked for first."""
    _base.read = read


def install(settings: Settings) -> None:
    """Give this process the settings that its owner has; what its own file and environment say does not count."""
    _base.settings, _base.is_given = settings, True


def reread() -> Settings:
    """Read the environment again, and return what counts here.

    Raises:
        ConfigError: A file or variable names an unknown setting or has an invalid value.
    """
    if not _base.is_given:
        try:
            _base.settings = _base.read().settings()
        except ConfigError as error:
            raise error.with_traceback(None) from None  # how it was found says nothing to its reader
    return current()


def current() -> Settings:
    """Return the settings that count for the running task.

    They are those of the innermost `trimesh.configured` block; outside, those of the process: in a worker its owner's
    and what `env=` has said, else the defaults, with those of the file and of `TRIMESH_*` variables in their place. The
    file is looked for once; variables are read again whenever processes are spawned.

    Raises:
        ConfigError: A file or variable names an unknown setting or has an invalid value.
    """
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    return _base.settings or reread()


@contextmanager
def configured(**settings: Any) -> Generator[Settings, None, None]:
    """Have other settings inside of a block: `with trimesh.configured(grace=30, output="discard"):`.

    They count for what the task does in the block, and the tasks it starts there: blocks that are entered and calls
    that are made. Processes that are spawned there have them as long as they live.

    Args:
        **settings: By name; see docs/settings.md.

    Raises:
        ConfigError: A name is unknown, or a value none of its kind.

    Example:
        >>> with configured(grace=30) as settings:
        ...     settings.grace
        30.0
    """
    try:
        chosen = above(current(), settings)
    except ConfigError as error:
        raise error.with_traceback(None) from None
    token = _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _chosen.reset(token)


def choose(settings: Settings) -> None:
    """Have settings in the running context for good: a simulated process those of its owner."""
    _chosen.set(settings)
