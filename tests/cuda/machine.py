"""Facts about a machine that may have CUDA devices: `python -m tests.cuda.machine FILE` writes them as JSON.

Each fact is found by itself: what cannot be found is the reason in words.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

COMMAND_SECONDS: Final = 20
REPORT_SECONDS: Final = 60
LINES_MAX: Final = 60
VARIABLES: Final = re.compile(
    r"(CUDA|NCCL|NVIDIA|TORCH|PYTORCH|UCX|TRIMESH|GLOO|OMP|PYTHON)|LD_LIBRARY_PATH|LD_PRELOAD"
)
PACKAGES: Final = re.compile(
    r"torch|triton|nvidia|cuda|libucx|numpy|pyarrow|trio|pytest|cffi|msgspec|trimesh|cloudpickle"
)
FORKED: Final = """
import os, sys
import torch, torch.distributed.tensor, torch._dynamo
pid = os.fork()
if pid == 0:
    try:
        torch.ones(1, device="cuda").item()
    except BaseException as error:
        print(type(error).__name__, str(error).splitlines()[0])
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
"""Use the device in a fork of a process that has imported what spawners preload."""
SHARED: Final = """
import pickle, subprocess, sys
import torch
if len(sys.argv) > 1:
    storage = torch.UntypedStorage._new_shared_cuda(*pickle.load(sys.stdin.buffer))
    torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(7)
    torch.cuda.synchronize()
else:
    memory = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    handle = pickle.dumps(memory.untyped_storage()._share_cuda_())
    subprocess.run([sys.executable, "-c", sys.orig_argv[2], "other"], input=handle, check=True)
    torch.cuda.synchronize()
    assert bool((memory == 7).all()), "what the other process wrote is not seen"
"""
"""Write to memory of the device from another process."""


def printed(*command: str, seconds: float = COMMAND_SECONDS) -> str:
    """Return the end of what a program prints, or why there is nothing."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, timeout=seconds, check=False, **options)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired as error:
        return f"no end within {seconds} s\n{(error.stdout or b'').decode(errors='replace')}"
    lines = done.stdout.strip().splitlines()[-LINES_MAX:]
    return "\n".join(lines) if done.returncode == 0 else "\n".join([f"status {done.returncode}", *lines])


# ---- without a device ------------------------------------------------------------------------------------------------


def system() -> dict[str, Any]:
    """Return what runs here, as whom, and its limits."""
    memory = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    shared = shutil.disk_usage("/dev/shm")
    return {
        "python": sys.version,
        "executable": sys.executable,
        "system": f"{platform.platform()} {platform.version()}",
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "shared_memory_gib": round(shared.total / (1 << 30), 1),
        "user": os.getuid(),
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "ptrace_scope": text_of("/proc/sys/kernel/yama/ptrace_scope"),
        "networks_that_are_up": [path.parent.name for path in Path("/sys/class/net").glob("*/flags") if is_up(path)],
        "names_in_shared_memory": sorted(os.listdir("/dev/shm"))[:LINES_MAX],
    }


def is_up(flags: Path) -> bool:
    """Return whether an interface is up; gloo needs the loopback, which a new network namespace has down."""
    return bool(int(flags.read_text(), 16) & 1)


def text_of(path: str) -> str:
    """Return the text of a small file, or that it is not there."""
    return Path(path).read_text().strip() if os.access(path, os.R_OK) else "not here"


def variables() -> dict[str, str]:
    """Return the environment variables that CUDA, torch, UCX and trimesh look at."""
    return {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)}


def packages() -> dict[str, str]:
    """Return the versions of packages that matter."""
    found = ((one.metadata["Name"], one.version) for one in importlib.metadata.distributions())
    return {name: version for name, version in sorted(found) if name and PACKAGES.search(name.lower())}


def driver() -> dict[str, Any]:
    """Return what the driver of NVIDIA says."""
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia*"))
    return {
        "version": text_of("/proc/driver/nvidia/version"),
        "files": devices,
        "modules": [line for line in text_of("/proc/modules").splitlines() if line.startswith("nvidia")],
        "devices": printed("nvidia-smi", "-L"),
        "topology": printed("nvidia-smi", "topo", "-m"),
        "overview": printed("nvidia-smi"),
    }


def ucx() -> dict[str, Any]:
    """Return where the UCX of the package index is, and what carries bulk data here."""
    from trimesh._transport.native.mover import wheel_library

    wheel = wheel_library()
    version = "no wheel of UCX is here"
    if wheel is not None:
        asked = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ucp_get_version_string; f.restype = ctypes.c_char_p"
        version = printed(sys.executable, "-c", f"{asked}; print(f().decode())", str(wheel))
    report = printed(sys.executable, "-m", "trimesh.rdma", seconds=REPORT_SECONDS)
    return {"wheel": str(wheel), "version": version, "report": report}


# ---- by torch --------------------------------------------------------------------------------------------------------


def torch_build() -> dict[str, Any]:
    """Return how torch was built, and whether it sees a device."""
    import torch

    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": list(torch.cuda.nccl.version()) if has_nccl and torch.version.cuda else None,
        "sees_a_device": torch.cuda.is_available(),
        "devices": torch.cuda.device_count(),
    }


def devices() -> list[dict[str, Any]]:
    """Return each device, and which others it reaches directly."""
    import torch

    found = []
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        others = (other for other in range(torch.cuda.device_count()) if other != number)
        free, total = torch.cuda.mem_get_info(number)
        found.append(
            {
                "name": one.name,
                "uuid": str(getattr(one, "uuid", "")),
                "capability": f"{one.major}.{one.minor}",
                "processors": one.multi_processor_count,
                "memory_gib": round(total / (1 << 30), 1),
                "free_gib": round(free / (1 << 30), 1),
                "reaches": [other for other in others if torch.cuda.can_device_access_peer(number, other)],
            }
        )
    return found


def fork_after_imports() -> str:
    """Return whether a fork of a process that has imported torch can use the device, as ranks do."""
    return tried(FORKED)


def memory_shared_by_torch() -> str:
    """Return whether CUDA IPC works here without trimesh."""
    return tried(SHARED)


def tried(program: str) -> str:
    """Return whether a program that uses the device works, and what it says if it does not."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return printed(sys.executable, "-c", program, seconds=REPORT_SECONDS) or "works"


FACTS: Final[dict[str, Callable[[], Any]]] = {
    "system": system,
    "variables": variables,
    "packages": packages,
    "driver": driver,
    "torch": torch_build,
    "devices": devices,
    "fork_after_imports": fork_after_imports,
    "memory_shared_by_torch": memory_shared_by_torch,
    "ucx": ucx,
}


def find(file: Path) -> None:
    """Find all facts; write them to a file, and print the new one, after each, for the next one may hang."""
    found: dict[str, Any] = {}
    for name, fact in FACTS.items():
        try:
            found[name] = fact()
        except Exception as error:  # noqa: BLE001 - the reason is the fact
            found[name] = f"{type(error).__name__}: {error}"
        file.write_text(json.dumps(found, indent=1))
        print(show({name: found[name]}), flush=True)


def show(found: dict[str, Any]) -> str:
    """Return facts as text for people."""
    lines = []
    for name, fact in found.items():
        rows = fact.items() if isinstance(fact, dict) else enumerate(fact) if isinstance(fact, list) else [("", fact)]
        lines.append(f"{name}:")
        for key, value in rows:
            text = str(value).replace("\n", "\n      ")
            lines.append(f"  {key}: {text}" if key != "" else f"  {text}")
    return "\n".join(lines)


if __name__ == "__main__":
    find(Path(sys.argv[1]))
