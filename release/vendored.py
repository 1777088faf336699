"""What the page of `trimesh dashboard` has of others: fetched from npm, checked, and written beside the page.

    python -m release.vendored      fetches and writes; the result is committed, so that users and builds need no npm

A package is taken at one version whose digest stands here. A file is changed in one way only: the name of a module
that a browser cannot find becomes a path, and a script becomes a module. `manifest.json` says what was made of what.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tarfile
import urllib.request
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parents[1] / "src/trimesh/cli/dashboard/static/vendor"

PACKAGES: Final = {
    "preact": (
        "11.2.0",
        "sha512-/HfHI/7N84e6GrWBJ3J280z3mLaRJiDcSvj/A+y/4AbLnND/1UlGHe1sR6oYuTGwId0nP7dqDU9OnLxMPZ7xBg==",
        "MIT",
    ),
    "htm": (
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        "Apache-2.0",
    ),
    "uplot": (
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        "MIT",
    ),
}
"""Version, digest of the package as npm has it, licence."""

FILES: Final = {
    "preact.js": ("preact", "dist/preact.mjs"),
    "hooks.js": ("preact", "hooks/dist/hooks.mjs"),
    "htm.js": ("htm", "dist/htm.mjs"),
    "uplot.js": ("uplot", "dist/uPlot.iife.min.js"),
    "uplot.css": ("uplot", "dist/uPlot.min.css"),
    "LICENSE-preact": ("preact", "LICENSE"),
    "LICENSE-htm": ("htm", "LICENSE"),
    "LICENSE-uplot": ("uplot", "LICENSE"),
}


def changed(name: str, data: bytes) -> tuple[bytes, str]:
    """Return a file as a browser can import it, and what was changed in words."""
    text, says = data.decode(), ""
    lines = [line for line in text.splitlines() if not line.startswith("//# sourceMappingURL")]
    text = "\n".join(lines) + "\n"
    if name == "hooks.js":
        text, says = text.replace('from"preact"', 'from"./preact.js"'), "the module preact by its path"
    if name == "uplot.js":
        text, says = text + "export default uPlot;\n", "exports what it defines"
    return text.encode(), says


def fetched(package: str) -> dict[str, bytes]:
    """Return the files of a package.

    Raises:
        ValueError: It is another one than that of the digest.
    """
    version, digest, _ = PACKAGES[package]
    url = f"https://registry.npmjs.org/{package}/-/{package}-{version}.tgz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        data = answer.read()
    found = "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != digest:
        raise ValueError(f"{url} must have the digest {digest}, got {found}")
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        return {member.name.removeprefix("package/"): archive.extractfile(member).read() for member in members}  # type: ignore[union-attr]


def main() -> None:
    """Fetch all packages, and write their files and the manifest."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    packages = {package: fetched(package) for package in PACKAGES}
    files = dict[str, dict[str, str]]()
    for name, (package, path) in FILES.items():
        original = packages[package][path]
        data, says = (original, "") if name.startswith("LICENSE") else changed(name, original)
        (FOLDER / name).write_bytes(data)
        files[name] = {
            "package": package,
            "path": path,
            "original_sha256": hashlib.sha256(original).hexdigest(),
            "sha256": hashlib.sha256(data).hexdigest(),
            **({"changed": says} if says else {}),
        }
        print(f"{name}: {len(data)} bytes")
    heads = {
        package: {"version": version, "integrity": digest, "license": licence}
        for package, (version, digest, licence) in PACKAGES.items()
    }
    (FOLDER / "manifest.json").write_text(json.dumps({"packages": heads, "files": files}, indent=2) + "\n")


if __name__ == "__main__":
    main()
