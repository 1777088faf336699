"""A tiny index of wheels, made as a folder: no network is asked."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def add_wheel(folder: Path, name: str, version: str, text: str, *, requires: str = "", command: str = "") -> None:
    """Write a wheel of one module, whose text is given.

    Args:
        folder: Of the index; made where it is not there.
        name: Of the package and of the module.
        version: Of the package.
        text: Of the module.
        requires: Another package that it needs.
        command: Name of a program that calls `main` of the module.
    """
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if command:
        files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{command} = {name}:main\n"
    rows = [f"{path},sha256={_digest(data)},{len(data.encode())}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def _digest(data: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data.encode()).digest()).rstrip(b"=").decode()
