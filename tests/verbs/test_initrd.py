"""The archive that the emulated machine boots from, and what is said where there can be none."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
from tests.verbs import initrd
from tests.verbs.packages import PackageTree, UnavailableError


def module(folder: Path, name: str, depends: str) -> None:
    data = b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0"
    (folder / name).write_bytes(lzma.compress(data) if name.endswith(".xz") else data)


def entries(archive: bytes) -> dict[str, bytes]:
    """Read an archive as the kernel's documentation (initramfs buffer format) describes it."""
    at, found = 0, {}
    while True:
        assert at % 4 == 0
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * n : at + 14 + 8 * n], 16) for n in range(13)]
        size, name_size = fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        if name == "TRAILER!!!":
            return found
        start = at + 110 + name_size
        start += -start % 4
        found[name] = archive[start : start + size]
        at = start + size
        at += -at % 4


def test_modules_come_after_those_they_need(tmp_path: Path) -> None:
    module(tmp_path, "rdma_rxe.ko.xz", "ib-core,udp_tunnel")
    module(tmp_path, "ib_core.ko", "")
    module(tmp_path, "9p.ko", "9pnet,built_in")
    module(tmp_path, "9pnet.ko", "")
    module(tmp_path, "unwanted.ko", "")
    (tmp_path / "busybox").write_bytes(b"shell")

    found = entries(initrd.build(tmp_path / "busybox", tmp_path, {"init": "#!run\n"}))

    order = found["modules/order"].decode().split()
    assert set(order) == {"rdma_rxe", "ib_core", "9p", "9pnet"}
    assert order.index("ib_core") < order.index("rdma_rxe")
    assert order.index("9pnet") < order.index("9p")
    assert b"license" in found["modules/rdma_rxe.ko"]
    assert found["bin/busybox"] == b"shell"
    assert found["init"] == b"#!run\n"


def test_a_machine_without_apt_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UnavailableError, match=r"x86_64|no 'apt-get'"):
        PackageTree(tmp_path / "cache").fetch()
