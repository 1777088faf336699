"""What the environment says of carriers, and which host this is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.rows import rows

from trimesh._transport.interface import Carrier
from trimesh._transport.native.carriers import can_look_at_memory, chosen_carriers, host_identity, yama_allows
from trimesh.config import Settings, from_environment

ALL = Carrier.LOCAL | Carrier.SHM | Carrier.CMA | Carrier.TCP | Carrier.UCX


@rows(
    ("environment", "carriers", "address"),
    [
        ({}, ALL, b""),
        ({"TRIMESH_RDMA": ""}, ALL, b""),
        ({"TRIMESH_RDMA": "cma"}, Carrier.LOCAL | Carrier.CMA, b""),
        ({"TRIMESH_RDMA": "tcp, cma"}, Carrier.LOCAL | Carrier.CMA | Carrier.TCP, b"\x7f\0\0\1"),
        ({"TRIMESH_RDMA": "shm", "TRIMESH_RDMA_ADDRESS": "10.0.0.1"}, Carrier.LOCAL | Carrier.SHM, b""),
        ({"TRIMESH_RDMA": "tcp", "TRIMESH_RDMA_ADDRESS": "10.0.0.1"}, Carrier.LOCAL | Carrier.TCP, b"\x0a\0\0\1"),
        ({"TRIMESH_RDMA_ADDRESS": "::1"}, ALL, bytes(15) + b"\1"),
    ],
)
def test_choice(environment: dict[str, str], carriers: Carrier, address: bytes):
    found = chosen_carriers(from_environment(Settings(), environment), lambda: True)
    assert (found.carriers, found.address) == (carriers, address)


def test_sandboxed_process_listens():
    """Where no process may look at another one's memory, tcp is what is left."""
    assert chosen_carriers(Settings(), lambda: False).address == b"\x7f\0\0\1"
    assert chosen_carriers(Settings(rdma=("shm", "cma")), lambda: False).address == b""


@pytest.mark.skipif("Seccomp:\t0" not in Path("/proc/self/status").read_text(), reason="a sandbox may forbid the call")
def test_own_memory_can_be_looked_at():
    assert can_look_at_memory()


@pytest.mark.parametrize(
    ("scope", "capabilities", "allowed"),
    [
        (None, 0, True),
        ("", 0, True),
        ("0\n", 0, True),
        ("1\n", 0, True),
        ("2\n", 0, False),
        ("2\n", ~(1 << 19), False),
        ("2\n", 1 << 19, True),
        ("3\n", 1 << 19, False),
    ],
)
def test_yama_is_asked(tmp_path: Path, scope: str | None, capabilities: int, allowed: bool):
    """It lets every process look at its own memory, so that a look there says nothing of others."""
    scope_file, status_file = tmp_path / "ptrace_scope", tmp_path / "status"
    if scope is not None:
        scope_file.write_text(scope)
    status_file.write_text(f"CapPrm:\tffff\nCapEff:\t{capabilities & (1 << 41) - 1:016x}\nCapBnd:\tffff\n")
    assert yama_allows(scope_file, status_file) is allowed


def test_host_identity_is_the_same_each_time():
    own = host_identity()
    assert own == host_identity()
    assert 0 < own < 1 << 64
    assert len({own, host_identity("a"), host_identity("b")}) == 3
