"""Tracebacks without frames of the library: which go, which stay, and what is a bug of ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest

import trimesh
from trimesh._wire.exceptions.tracebacks import has_user_frame, shown_traceback, without_own_frames
from trimesh.errors import TrimeshInternalError


def in_package(package: str, code: str) -> Callable[..., Any]:
    """Return the function `run` of some code that looks as if it stood in a package."""
    names: dict[str, Any] = {"__name__": package}
    exec(compile(code, f"/{package}.py", "exec"), names)
    run = names["run"]
    assert isinstance(run, FunctionType)
    return run


CALLS = "def run(first, *rest):\n    return first(*rest)\n"
ours, trios, stdlibs, users = (in_package(name, CALLS) for name in ("trimesh.inside", "trio", "contextlib", "app"))


def fail() -> None:
    raise ValueError("of the user")


def caught(first: Callable[..., object], *rest: Callable[..., object]) -> BaseException:
    """Return what is raised when each function calls the next one."""
    with pytest.raises(BaseException) as found:  # noqa: PT011 - any
        first(*rest)
    return found.value


def names(error: BaseException) -> list[str]:
    """Names of files and functions of a traceback, without those of this test's helpers."""
    shown = [(frame.filename.rpartition("/")[2], frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return [name if file == "test_frames.py" else file for file, name in shown if name != "caught"]


def test_frames_of_the_library_and_of_what_it_calls_go() -> None:
    error = caught(users, ours, trios, users, fail)

    assert names(without_own_frames(error)) == ["app.py", "app.py", "fail"]


def test_frames_that_the_user_has_called_stay() -> None:
    error = caught(ours, users, stdlibs, trios, fail)

    assert names(without_own_frames(error)) == ["app.py", "contextlib.py", "trio.py", "fail"]


@pytest.mark.parametrize("error", ["TypeError('write it so')", "type('LivenessError', (AssertionError,), {})('slow')"])
def test_error_that_the_library_raises_by_intent_has_frames_of_the_user_alone(error: str) -> None:
    refuse = in_package("trimesh.inside", f"def run():\n    raise {error}\n")

    assert names(shown := without_own_frames(caught(users, refuse))) == ["app.py"]
    assert not hasattr(shown, "__notes__")


@pytest.mark.parametrize(
    "code",
    [
        "return {}['x']",
        "assert False",
        "import json; json.loads('')",
    ],
    ids=["operation", "assertion", "library below"],
)
def test_bug_of_the_library_keeps_all_frames(code: str) -> None:
    error = caught(users, in_package("trimesh.inside", f"def run():\n    {code}\n"))

    assert names(without_own_frames(error))[:2] == ["app.py", "trimesh.inside.py"]


def test_broken_promise_of_the_library_keeps_all_frames() -> None:
    def broken() -> None:
        raise TrimeshInternalError("a bug")

    assert names(without_own_frames(caught(ours, broken))) == ["trimesh.inside.py", "broken"]


def test_frames_go_from_members_and_causes_and_stay_gone() -> None:
    cause = caught(users, ours, fail)
    leaf = caught(users, ours, fail)
    leaf.__cause__ = cause
    group = ExceptionGroup("g", [leaf])  # type: ignore[list-item]

    for _ in range(2):  # what has lost the frame that raised it is no bug the second time
        without_own_frames(group)
        assert names(leaf) == names(cause) == ["app.py", "fail"]


def test_all_frames_stay_when_they_are_asked_for() -> None:
    error = caught(users, ours, fail)

    with trimesh.configured(traceback="full"):
        without_own_frames(error)

    assert names(error) == ["app.py", "trimesh.inside.py", "fail"]


def test_error_that_refuses_attributes_loses_frames_all_the_same() -> None:
    class Refuses(Exception):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    def refuse() -> None:
        raise Refuses

    assert names(without_own_frames(caught(users, ours, refuse))) == ["app.py", "refuse"]


def test_interrupt_ends_at_the_line_of_the_user() -> None:
    interrupt = in_package("trio", "def run():\n    raise KeyboardInterrupt\n")

    assert names(without_own_frames(caught(users, trios, interrupt))) == ["app.py"]


def test_frames_of_the_user_are_known() -> None:
    refuse = in_package("trimesh.inside", "def run():\n    raise TypeError\n")
    error = caught(users, refuse)

    assert has_user_frame(error)
    assert error.__traceback__ is not None
    inside = error.with_traceback(error.__traceback__)
    while inside.__traceback__ is not None and inside.__traceback__.tb_frame.f_code.co_filename != "/trimesh.inside.py":
        inside = inside.with_traceback(inside.__traceback__.tb_next)
    assert not has_user_frame(inside)
    assert shown_traceback(inside) is None
