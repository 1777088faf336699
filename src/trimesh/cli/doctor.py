"""`trimesh doctor`: conditions of this machine that slow meshes down or prevent them."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from ctypes.util import find_library
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import Parameter

from trimesh import limits
from trimesh._runtime.system import GPU, gpus_here, read_sources
from trimesh.config import JOBS_TABLE, Settings, reread
from trimesh.errors import ConfigError, ConnectError, TrimeshError
from trimesh.observe import ObservedRun, runs

_FILES_MIN: Final = 4096
_SHM_BYTES_MIN: Final = 256 << 20


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    Attributes:
        name: Name of the check.
        verdict: "ok", "costs", "insecure", or "forbids".
        text: The finding and its consequence.
    """

    name: str
    verdict: str
    text: str


def findings() -> Iterator[Finding]:
    """Yield the result of each check, in a fixed order."""
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
    is_new = release >= (5, 4)
    yield Finding("kernel", "ok" if is_new else "forbids", f"Linux {platform.release()}; 5.4 or newer is needed")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} descriptors per process; each link takes some"
    yield Finding("descriptors", "ok" if soft >= _FILES_MIN else "costs", text)
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None  # noqa: S108 - never written
    free = 0 if shm is None else shm.free
    yield Finding("shared memory", "ok" if free >= _SHM_BYTES_MIN else "costs", f"{free >> 20} MiB free in /dev/shm")
    scope = _read("/proc/sys/kernel/yama/ptrace_scope")
    is_open = scope in ("", "0")
    text = (
        "processes can read each other's memory" if is_open else "no reads of each other's memory (slower), no py-spy"
    )
    yield Finding("ptrace", "ok" if is_open else "costs", f"ptrace_scope is {scope or 'not set'}: {text}")
    ssl = find_library("ssl")
    yield Finding("libssl", "ok" if ssl else "costs", ssl or "libssl was not found: no links to other hosts")
    yield from _of_settings()
    yield _of_gpus()
    try:
        for one in runs():
            with one:
                yield from _of_run(one)
        yield Finding("private folder", "ok", "control sockets can be made and found")
    except ConnectError as error:
        yield Finding("private folder", "costs", str(error))


def _of_settings() -> Iterator[Finding]:
    try:
        settings = reread()
    except ConfigError as error:
        yield Finding("settings", "forbids", str(error))
        return
    is_pickling = settings.pickle == "on"
    text = "all settings are valid" + "; values are pickled between processes of a program" * is_pickling
    yield Finding("settings", "ok", text)
    for name, text in insecure(settings):
        yield Finding(name, "insecure", text)
    yield from _of_jobs()


def _of_gpus() -> Finding:
    """List the GPUs that placements on this machine could use, or the reason why there are none."""
    try:
        library = reread().nvml
    except ConfigError:  # `_of_settings` reports it
        library = ""
    found: list[tuple[tuple[GPU, ...], str]] = [
        ((), f"the driver did not answer within limits.NVML_SECONDS ({limits.NVML_SECONDS:g} s)")
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reader = threading.Thread(target=lambda: found.append(gpus_here(library, visible)), daemon=True)
    reader.start()
    reader.join(limits.NVML_SECONDS)  # the driver hangs when a GPU has failed
    gpus, why = found[-1]
    names = ", ".join(f"{one.index}: {one.name}, {one.memory >> 30} GiB" for one in gpus)
    return Finding("gpus", "ok", names or f"none to place processes on: {why}")


def _of_jobs() -> Iterator[Finding]:
    """Yield a finding for each job of the file that turns TLS off, and for each with the user's own certificates."""
    jobs: dict[str, dict[str, Any]] = {}
    with suppress(msgspec.ValidationError):  # `named_job` reports it
        jobs = msgspec.convert(read_sources().table.get(JOBS_TABLE, {}), dict[str, dict[str, Any]])
    for name, job in jobs.items():
        if job.get("insecure"):
            text = f"sessions between its hosts are without TLS (insecure = {job['insecure']!r}): others can read them"
            yield Finding(f"jobs.{name}", "insecure", text)
        if "pki" in job:
            yield _of_certificates(name)


def _of_certificates(name: str) -> Finding:
    """Check the certificate files of a job on this host."""
    from trimesh.jobs import named_job  # noqa: PLC0415 - most files name no certificates
    from trimesh.jobs.identity import look_at  # noqa: PLC0415

    try:
        pki = named_job(name).pki
        assert pki is not None
        until = look_at(pki.read(), datetime.now(UTC))
    except (TrimeshError, ImportError) as error:  # the second: `cryptography` is an extra
        return Finding(f"jobs.{name}.pki", "forbids", f"the job cannot be entered on this host: {error}")
    return Finding(f"jobs.{name}.pki", "ok", f"key and certificates fit and are valid until {until:%Y-%m-%d %H:%M %Z}")


def _of_run(run: ObservedRun) -> Iterator[Finding]:
    """Yield a finding for a run whose hosts are without TLS."""
    with suppress(ConnectError):  # it has ended, or does not answer
        hosts = [host.name for host in run.snapshot().hosts if host.is_insecure]
        if hosts:
            text = f"sessions with its hosts {', '.join(hosts)} are without TLS (insecure=): others can read them"
            yield Finding(f"run {run.pid}", "insecure", text)


def insecure(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each setting that exposes the run to others on the network or machine, and the exposure."""
    clear = [one for one in settings.rdma if one in ("tcp", "ucx")]
    if clear:
        text = "to other hosts without encryption: for networks that you trust"
        yield "rdma", f"bytes of buffers are sent by {' and '.join(clear)} {text}"
    if settings.rdma_address and not ip_address(settings.rdma_address).is_loopback:
        yield "rdma_address", f"any machine that reaches {settings.rdma_address} can connect; a handle gives access"
    if settings.collectives:
        text = "gloo and NCCL neither encrypt nor authenticate: for networks that you trust"
        yield "collectives", f"{settings.collectives}: {text}"
    for name in ("native_lib", "libssl", "nvml", "ucx"):
        path = getattr(settings, name)
        if path and (why := _who_may_change(Path(path))):
            yield name, f"code of {path} runs in every process, and {why}"


def _who_may_change(path: Path) -> str:
    """Return which users besides this one and root may change a file or its folder; "" for none."""
    for one in (path, path.parent):
        try:
            found = one.stat()
        except OSError:
            continue
        if found.st_uid not in (0, os.geteuid()):
            return f"{one} belongs to user {found.st_uid}"
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return f"every user may change {one}"
    return ""


def doctor(*, json: Annotated[bool, Parameter(name="--json", negative="")] = False) -> int:
    """Check this machine: kernel, limits, shared memory, ptrace, libssl, settings, jobs of trimesh.toml, runs.

    Exit codes: 0 nothing forbids meshes, 1 something does.

    Args:
        json: Print one JSON document: a list of findings.
    """
    found = list(findings())
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        sys.stdout.writelines(f"{one.verdict:9}{one.name}: {one.text}\n" for one in found)
    sys.stdout.flush()
    return 1 if any(one.verdict == "forbids" for one in found) else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
