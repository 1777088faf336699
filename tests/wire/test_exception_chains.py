"""Causes, tracebacks, notes and origins of exceptions that travel (rules X2, E04)."""

from __future__ import annotations

import traceback
from typing import Any

import attrs
import pytest
from tests.wire.sent_exceptions import HERE, own_chain, raised, remote_texts, round_trip

from trimesh import limits
from trimesh._wire.exceptions.codec import decode_exception, encode_exception
from trimesh._wire.pickled.payload import Decoder, Encoder
from trimesh.errors import RemoteTraceback, origin


def test_chain_is_kept() -> None:
    """X2."""
    try:
        try:
            try:
                raise ValueError("first")
            except ValueError as error:
                raise KeyError("second") from error
        except KeyError:
            raise IndexError("third")  # noqa: B904 - the context is what is tested
    except IndexError as error:
        arrived = round_trip(error)

    assert type(arrived) is IndexError
    assert arrived.__cause__ is None
    assert type(arrived.__context__) is KeyError
    assert not arrived.__suppress_context__
    assert type(arrived.__context__.__cause__) is ValueError
    assert arrived.__context__.__context__ is arrived.__context__.__cause__
    assert arrived.__context__.__suppress_context__


def test_suppressed_context_is_kept_and_stays_suppressed() -> None:
    """X2."""
    try:
        try:
            raise ValueError("hidden")
        except ValueError:
            raise KeyError("shown") from None
    except KeyError as error:
        arrived = round_trip(error)

    assert type(arrived.__context__) is ValueError
    assert arrived.__suppress_context__
    assert isinstance(arrived.__cause__, RemoteTraceback)
    assert "hidden" not in "".join(traceback.format_exception(arrived))


def test_remote_traceback_is_the_cause_of_the_last_exception() -> None:
    """X2."""
    first, second = ValueError("first"), KeyError("second")
    second.__cause__ = first

    arrived = round_trip(raised(second))

    assert [type(link) for link in own_chain(arrived)] == [KeyError, ValueError, RemoteTraceback]
    text = remote_texts(arrived)[0]
    assert "in raised" in text
    assert text.index("ValueError: first") < text.index("direct cause") < text.index("KeyError: 'second'")


def test_printed_error_shows_everything_once() -> None:
    """X2."""
    arrived = round_trip(raised(ValueError("text")), where=HERE, note="on gpus=2")

    printed = "".join(traceback.format_exception(arrived))

    assert printed.count("in raised") == 1
    assert printed.count("ValueError: text") == 1
    assert printed.rstrip().endswith("ValueError: text\non gpus=2")


def test_remote_traceback_matches_the_interpreters_own() -> None:
    try:
        try:
            raise ValueError("first")
        except ValueError as error:
            error.add_note("a note")
            raise KeyError("second") from error
    except KeyError as error:
        expected = "".join(traceback.format_exception(error))
        arrived = round_trip(error)

    assert remote_texts(arrived) == [expected.rstrip("\n")]


def test_syntax_error_shows_its_line() -> None:
    try:
        compile("a b", "file.py", "exec")
    except SyntaxError as error:
        expected = "".join(traceback.format_exception_only(error))
        arrived = round_trip(error)

    assert remote_texts(arrived)[0].endswith(expected.rstrip("\n"))


def test_cycle_in_a_chain_arrives_and_prints() -> None:
    """E05."""
    a, b = ValueError("a"), KeyError("b")
    a.__cause__, b.__cause__ = b, a
    a.__context__ = a

    arrived = round_trip(raised(a))

    assert type(arrived.__cause__) is KeyError
    assert len(remote_texts(arrived)) == 1
    traceback.format_exception(arrived)


def test_endless_chain_is_cut() -> None:
    """E05."""
    error: BaseException = ValueError(0)
    for number in range(1, 5_000):
        following = ValueError(number)
        following.__context__ = error
        error = following

    encoded = encode_exception(error, Encoder())
    arrived = decode_exception(encoded.payload, Decoder())
    chain = list(own_chain(arrived))

    assert encoded.nbytes < 100_000
    assert [link.args[0] for link in chain[:3]] == [4999, 4998, 4997]
    assert len(chain) == limits.EXCEPTION_CHAIN_MAX + 1  # and the remote traceback
    assert "left out" in chain[-2].__notes__[0]


def test_deep_traceback_is_shortened() -> None:
    def fall(depth: int) -> None:
        if depth:
            exec("fall(depth - 1)", {"fall": fall, "depth": depth}) if depth % 2 else fall(depth - 1)
        else:
            raise ValueError("x" * 200_000)

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any
        fall(100)

    text = remote_texts(round_trip(caught.value))[0]

    assert len(text) < limits.TRACEBACK_CHARS_MAX + 100
    assert "characters left out" in text


def test_recursion_error_arrives() -> None:
    def fall() -> None:
        fall()

    with pytest.raises(RecursionError) as caught:
        fall()

    assert type(round_trip(caught.value)) is RecursionError


def test_note_and_origin_are_set_on_a_new_exception() -> None:
    """X2."""
    arrived = round_trip(ValueError("x"), where=HERE, note="on gpus=2")

    assert arrived.__notes__ == ["on gpus=2"]
    assert origin(arrived) == HERE


def test_relayed_exception_has_one_traceback_and_its_first_origin() -> None:
    """X2, E04."""
    there = attrs.evolve(HERE, mesh="inner", pid=1)

    def innermost() -> None:
        raise ValueError("text")

    def relay(error: Exception) -> None:
        raise error

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any
        innermost()
    once = round_trip(caught.value, where=there, note="on inner")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - any
        relay(once)
    twice = round_trip(caught.value, where=HERE, note="on outer")

    assert origin(twice) == there
    assert twice.__notes__ == ["on inner"]
    [whole] = remote_texts(twice)
    assert whole.count("in innermost") == whole.count("Traceback (most recent call last)") == 1
    assert whole.index("in relay") < whole.index("in innermost") < whole.index("ValueError")
    printed = "".join(traceback.format_exception(twice))
    assert printed.index("in relay") < printed.index("in innermost")


def test_relayed_exception_with_a_chain_keeps_two_tracebacks() -> None:
    """X2: between the two is the error that the second process has handled."""
    once = round_trip(raised(ValueError("x")), where=HERE)
    try:
        try:
            raise once
        except ValueError:
            raise KeyError("y") from once
    except KeyError as error:
        twice = round_trip(error, where=HERE)

    assert [type(link) for link in own_chain(twice)] == [KeyError, ValueError, RemoteTraceback, RemoteTraceback]


def test_point_of_an_origin_may_be_anything_that_pickles() -> None:
    where = attrs.evolve(HERE, point={"gpus": 2})  # type: ignore[arg-type]

    found = origin(round_trip(ValueError("x"), where=where))

    assert found == where


def test_syntax_error_with_odd_details_arrives() -> None:
    error = SyntaxError("bad", ("f.py", 1, 2, "x y", 1, 3))
    error.text = 5  # type: ignore[assignment]
    error.lineno = "x"  # type: ignore[assignment]

    arrived = round_trip(raised(error))

    assert type(arrived) is SyntaxError
    assert "SyntaxError: bad" in remote_texts(arrived)[0]


def test_frames_that_cannot_be_shown_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "a source file of another encoding")

    monkeypatch.setattr(traceback.StackSummary, "extract", fail)

    assert "cannot be shown" in remote_texts(round_trip(raised(ValueError("x"))))[0]


def test_surrogates_in_coordinates_do_no_harm() -> None:
    arrived = round_trip(ValueError("x"), where=attrs.evolve(HERE, mesh="\ud800", actor=None), note="\ud800")

    assert arrived.__notes__ == ["\\ud800"]
    found = origin(arrived)
    assert found is not None
    assert (found.mesh, found.actor) == ("\\ud800", None)
