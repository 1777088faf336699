"""Settings: their layers, what is refused, and the page of them."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.rows import rows

from trimesh import config, configured
from trimesh.config import SETTINGS, Settings, Sources, from_environment, from_file
from trimesh.config import layers as scope_module
from trimesh.config.__main__ import page
from trimesh.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_page_is_that_of_the_settings():
    assert PAGE.read_text() == page(), "write it anew: python -m trimesh.config > docs/settings.md"


def test_default_of_each_setting_is_one_of_its_values():
    assert tuple(one.name for one in SETTINGS) == Settings.__struct_fields__
    for one in SETTINGS:
        default = getattr(Settings(), one.name)
        if default != "":
            assert one.kind.check(default) == default


def test_each_layer_stands_over_the_one_before():
    """G1: defaults, file, environment."""
    found = Sources({"TRIMESH_GRACE": "7", "HOME": "x"}, {"grace": 3, "spin": "off"}, "a.toml").settings()
    assert found == Settings(grace=7.0, spin="off")
    assert Sources({}).settings() == Settings()


def test_empty_variable_says_nothing():
    """G1."""
    assert from_environment(Settings(grace=2.0), {"TRIMESH_GRACE": " "}) == Settings(grace=2.0)


def test_variables_that_are_no_settings_are_left_alone():
    """G2: those of ours, of tests, and those that Kubernetes sets beside a service of that name."""
    others = ("TRIMESH_CONFIG", "TRIMESH_PROC", "TRIMESH_TEST_X", "TRIMESH_SERVICE_HOST", "TRIMESH_PORT_80_TCP")
    assert from_environment(Settings(), dict.fromkeys(others, "1")) == Settings()


@rows(
    ("variable", "text", "value"),
    [
        ("GRACE", "inf", float("inf")),
        ("GRACE", "0", 0.0),
        ("HOST_ID", "machine 7", "machine 7"),
        ("OUTPUT", "discard", "discard"),
        ("PRELOAD", "torch, numpy,", ("torch", "numpy")),
        ("STREAM_WINDOW", " 12 ", 12),
        ("ABANDON_AFTER", "0.5", 0.5),
        ("RDMA", "tcp, cma", ("tcp", "cma")),
        ("RDMA_ADDRESS", "::1", "::1"),
    ],
)
def test_text_of_a_variable_is_read(variable: str, text: str, value: object):
    """G1."""
    found = from_environment(Settings(), {f"TRIMESH_{variable}": text})
    assert getattr(found, variable.lower()) == value


@rows(
    ("variable", "text", "known"),
    [
        ("GRACE", "soon", "a number of seconds >= 0"),
        ("GRACE", "-1", "a number of seconds >= 0"),
        ("GRACE", "nan", "a number of seconds >= 0"),
        ("ABANDON_AFTER", "inf", "a number of seconds >= 0, got"),
        ("STREAM_WINDOW", "0", "a whole number from 1 to"),
        ("STREAM_WINDOW", "1.5", "a whole number from 1 to"),
        ("SPIN", "on", "one of auto, off"),
        ("RDMA", "tpc", "some of shm, cma, tcp, ucx"),
        ("RDMA", "CMA", "some of shm, cma, tcp, ucx"),
        ("RDMA_ADDRESS", "localhost", "an IP address of this host"),
    ],
)
def test_wrong_text_is_refused(variable: str, text: str, known: str):
    """G2: by the name, what is right, and what came."""
    with pytest.raises(ConfigError, match=rf"TRIMESH_{variable} must be {known}") as caught:
        from_environment(Settings(), {f"TRIMESH_{variable}": text})
    assert str(caught.value).endswith(f"got {text!r}")


@rows(
    ("table", "text"),
    [
        ({"grace": "5"}, "a.toml: grace must be a number of seconds >= 0"),
        ({"grace": True}, "got True"),
        ({"preload": "torch"}, "a list of texts"),
        ({"preload": [1]}, r"got \[1\]"),
        ({"stream_window": True}, "a whole number"),
        ({"output": 1}, "one of forward"),
        ({"host_id": 1}, "a text, got 1"),
        ({"grcae": 5}, r"a.toml: there is no setting 'grcae' \(is it grace\?\): there are grace, output"),
    ],
)
def test_wrong_entry_of_a_file_is_refused(table: dict[str, Any], text: str):
    """G2."""
    with pytest.raises(ConfigError, match=text):
        from_file(Settings(), table, "a.toml")


def test_unknown_variable_is_refused():
    """G2."""
    with pytest.raises(ConfigError, match=r"got TRIMESH_GRCE \(is it TRIMESH_GRACE\?\): there are TRIMESH_GRACE"):
        from_environment(Settings(), {"TRIMESH_GRCE": "1"})


def test_configured_blocks_nest_and_end():
    """G1: also by an error."""
    before = config.current()
    with configured(grace=1, spin="off"), pytest.raises(LookupError), configured(grace=2) as inner:
        assert inner is config.current()
        assert (inner.grace, inner.spin) == (2.0, "off")
        raise LookupError
    assert config.current() == before


def test_configured_refuses_what_is_no_setting():
    """G2: and nothing has changed."""
    with pytest.raises(ConfigError, match=r"there is no setting 'graze' \(is it grace\?\)"), configured(graze=1):
        raise AssertionError
    with pytest.raises(ConfigError, match="there is no setting 'zzz': there are grace"), configured(zzz=1):
        raise AssertionError
    with pytest.raises(ConfigError, match="grace must be"), configured(grace=None):
        raise AssertionError


def test_settings_cannot_be_changed():
    with pytest.raises(AttributeError):
        config.current().grace = 1.0  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(Settings(grace=9.0)), type=Settings) == Settings(grace=9.0)


def test_example_is_true():
    assert doctest.testmod(scope_module).failed == 0
