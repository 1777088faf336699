"""Tables of pure cases: one test that runs all rows and names those that fail.

Each worker of pytest-xdist collects every item, so a row of a millisecond costs more as an item than as a turn of a
loop. The `subtests` fixture of pytest would send a report for each row, and pytest 8.4 lacks it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

SHORT = reprlib.Repr()
"""Shows a value of a row, even one whose `repr` fails, in few enough characters to leave the error readable."""
SHORT.maxstring = SHORT.maxother = 200


def rows(names: str | Sequence[str], table: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test once per row, as one item; the arguments are those of `pytest.mark.parametrize`.

    All rows run. Each error has a note with its row, and several errors are raised as one group. The rows share the
    fixtures of the item: a row that needs a fresh fixture makes it itself.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [dict(zip(keys, row if len(keys) > 1 else (row,), strict=True)) for row in table]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            __tracebackhide__ = True
            with failures() as row:
                for index, case in enumerate(cases):
                    with row(index, case):
                        test(**case, **fixtures)

        @functools.wraps(test)
        async def run_async(**fixtures: Any) -> None:
            __tracebackhide__ = True
            with failures() as row:
                for index, case in enumerate(cases):
                    with row(index, case):
                        await test(**case, **fixtures)

        assert cases, f"{test.__qualname__} has a table without rows"
        of_test = inspect.signature(test).parameters
        assert of_test.keys() >= set(keys), f"{test.__qualname__} does not take all of {keys}"
        found: Any = run_async if inspect.iscoroutinefunction(test) else run
        found.__signature__ = inspect.Signature([one for name, one in of_test.items() if name not in keys])
        return found

    return decorate


@contextlib.contextmanager
def failures() -> Iterator[Callable[[int, dict[str, Any]], contextlib.AbstractContextManager[None]]]:
    """Collect the errors of rows and raise them at the end; what ends the whole item is raised at once."""
    __tracebackhide__ = True
    errors: list[BaseException] = []

    @contextlib.contextmanager
    def row(index: int, case: dict[str, Any]) -> Iterator[None]:
        __tracebackhide__ = True
        try:
            yield
        except BaseException as error:
            name = ", ".join(f"{key}={SHORT.repr(value)}" for key, value in case.items())
            error.add_note(f"in row {index}: {name}")
            if not fails_a_row(error):
                raise
            errors.append(error)

    yield row
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} rows failed", errors)


def fails_a_row(error: BaseException) -> bool:
    """Return whether the next row can run: after an error or a failed `pytest.raises`, not after a time limit."""
    return isinstance(error, Exception | pytest.fail.Exception) and "from pytest-timeout" not in str(error)
