"""`trimesh doctor` says which settings give others more than they get by default (T10 of the security tests)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cyclopts")

from trimesh.cli.commands import run
from trimesh.config import reread

INSECURE = {
    "rdma": ("tcp", "without encryption"),
    "rdma_address": ("192.0.2.7", "any machine that reaches 192.0.2.7"),
    "collectives": ("10.0.0.0/8", "neither encrypt nor authenticate"),
    "native_lib": ("{}/lib.so", "every user may change"),
    "libssl": ("{}/lib.so", "every user may change"),
    "ucx": ("{}/lib.so", "every user may change"),
}
"""A setting, a value that gives others something, and what is said of that."""


@pytest.fixture(autouse=True)
def settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read them again without the variables of a test: processes of later tests would get its library."""
    yield
    monkeypatch.undo()
    reread()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that this user alone may change."""
    path = tmp_path / "lib.so"
    path.touch(mode=0o644)
    return path


def told(capfdbinary: pytest.CaptureFixture[bytes]) -> dict[str, str]:
    """Return what the command calls insecure."""
    capfdbinary.readouterr()
    run(("doctor", "--json"))
    found = json.loads(capfdbinary.readouterr().out)
    return {one["name"]: one["text"] for one in found if one["verdict"] == "insecure"}


@pytest.mark.parametrize("name", INSECURE)
def test_each_insecure_setting_is_named(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """And nothing else is."""
    value, says = INSECURE[name]
    file.chmod(0o666)
    monkeypatch.setenv(f"TRIMESH_{name.upper()}", value.format(file.parent))
    found = told(capfdbinary)
    assert list(found) == [name]
    assert says in found[name]


def test_settings_that_give_others_nothing_are_not_called_insecure(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The defaults, and libraries that this user alone may change."""
    assert told(capfdbinary) == {}
    for name, value in {"rdma": "shm,cma", "rdma_address": "127.0.0.1", "libssl": str(file), "ucx": str(file)}.items():
        monkeypatch.setenv(f"TRIMESH_{name.upper()}", value)
    assert told(capfdbinary) == {}
