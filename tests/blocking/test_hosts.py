"""Hosts of a job without `await`: code and ports of the program on them (K06)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from tests.patience import HANG_SECONDS

import trimesh.blocking as tb

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls

pytestmark = [pytest.mark.real, pytest.mark.daily, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


def test_plain_program_brings_code_and_forwards_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H16, H18, K06."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = tmp_path / "src" / "synchronized_module.py"
    module.parent.mkdir()
    module.write_text("VALUE = 1\n")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tb.fail_after(HANG_SECONDS),
        tb.enter(jobs.LocalJob({"a": 1})) as entered,
    ):
        hosts = tb.face(entered)
        assert (len(hosts), hosts.names, hosts.slice(hosts=0).names) == (1, hosts["a"].names, hosts.names)
        with hosts.sync("src") as synced:
            assert not synced.update()
            module.write_text("VALUE = 22\n")
            assert synced.update()
            assert (synced.version, synced.files, synced.sent_bytes) == (2, 1, 11)
            assert str(synced) == "<synchronized code, version 2, 1 files>"
            assert synced.digest
        with (
            hosts.forward(remote=server.getsockname()[1]) as forwarded,
            socket.create_connection(("127.0.0.1", forwarded.port)) as client,
            server.accept()[0] as taken,
        ):
            client.sendall(b"there")
            client.shutdown(socket.SHUT_WR)
            assert taken.recv(100, socket.MSG_WAITALL) == b"there"
            taken.sendall(b"and back")
            taken.shutdown(socket.SHUT_WR)
            assert client.recv(100, socket.MSG_WAITALL) == b"and back"
