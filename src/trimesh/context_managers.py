"""Context managers from generators that also pass user errors whose class refuses attributes.

`contextlib` sets `__traceback__` on an error that passes through. A class that refuses attributes, such as a frozen
dataclass, raises another error there, which would replace the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Generator
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _SyncManager(contextlib._GeneratorContextManager[Any]):  # type: ignore[type-arg, unused-ignore]  # noqa: SLF001 - all but `__exit__` is its own
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if error is None or not _refuses(error):
            return super().__exit__(kind, error, traceback)
        try:
            self.gen.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            if raised is not error:
                raise
            BaseException.with_traceback(error, traceback)
            return False
        raise RuntimeError("generator didn't stop after throw()")


class _AsyncManager(contextlib._AsyncGeneratorContextManager[Any]):  # type: ignore[type-arg, unused-ignore]  # noqa: SLF001 - as above
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if error is None or not _refuses(error):
            return await super().__aexit__(kind, error, traceback)
        try:
            await self.gen.athrow(error)
        except StopAsyncIteration:
            return True
        except BaseException as raised:
            if raised is not error:
                raise
            BaseException.with_traceback(error, traceback)
            return False
        raise RuntimeError("generator didn't stop after athrow()")


def contextmanager(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Make a context manager, as `contextlib.contextmanager` does."""

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        manager: Any = _SyncManager
        return cast("contextlib.AbstractContextManager[T]", manager(function, args, kwargs))

    return make


def asynccontextmanager(
    function: Callable[P, AsyncGenerator[T, None]],
) -> Callable[P, contextlib.AbstractAsyncContextManager[T]]:
    """Make an async context manager, as `contextlib.asynccontextmanager` does."""

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractAsyncContextManager[T]:
        manager: Any = _AsyncManager
        return cast("contextlib.AbstractAsyncContextManager[T]", manager(function, args, kwargs))

    return make


def _refuses(error: BaseException) -> bool:
    return type(error).__setattr__ is not BaseException.__setattr__
