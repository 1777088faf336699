"""The name of a machine may be any bytes; what travels and is shown is text."""

from __future__ import annotations

import socket

import pytest

from trimesh._runtime.system import host_name


@pytest.mark.parametrize(("name", "shown"), [("node-7", "node-7"), ("nœud", "nœud"), ("h\udcff\udcfe", "h\\xff\\xfe")])
def test_host_name_can_be_encoded(name: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert host_name() == shown
    assert host_name().encode() == shown.encode()
