"""A stand-in for NVML (`fake_nvml.c`), built when it is first asked for: the GPUs are what the environment says."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
ROOT = SOURCE.parents[2]


def build() -> Path:
    """Return where the stand-in is, built from its source as that is now."""
    folder = ROOT / ".cache" / "fake_nvml"
    library = folder / f"libnvidia-ml-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f".{os.getpid()}.so"
        caches = {
            "ZIG_LOCAL_CACHE_DIR": str(ROOT / ".zig-cache"),
            "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".zig-cache/global"),
        }
        compiler = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1"]
        subprocess.run([*compiler, str(SOURCE), "-o", str(made)], check=True, env=caches | dict(os.environ))
        made.replace(library)
    return library


def install(monkeypatch: pytest.MonkeyPatch, gpus: int, **more: str) -> None:
    """Have hosts that are opened from now on show some GPUs."""
    for name, value in {"TRIMESH_NVML": str(build()), "FAKE_GPUS": str(gpus), **more}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
