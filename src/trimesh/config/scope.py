"""Which settings count here: those of the block of `configured`, else those of the process."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

from trimesh.config.layers import Sources, above
from trimesh.config.settings import Settings
from trimesh.context_managers import contextmanager
from trimesh.errors import ConfigError, TrimeshInternalError

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
        ConfigError: A file or variable says what is no setting.
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
        ConfigError: A file or variable says what is no setting.
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
