"""What workers of the tests run. Each speaks JSON lines over its link."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import trio

from trimesh._runtime.spawner.launcher import attach_launcher
from trimesh._runtime.system.child import LaunchSpec
from trimesh._runtime.system.records import WorkerConfig
from trimesh.ids import ProcId


def say(link: socket.socket, value: Any) -> None:
    """Send one value."""
    link.setblocking(True)
    link.sendall(json.dumps(value).encode() + b"\n")


def hear(link: socket.socket) -> Any:
    """Receive one value; None at the end."""
    link.setblocking(True)
    data = b""
    while not data.endswith(b"\n"):
        piece = link.recv(1)
        if not piece:
            return None
        data += piece
    return json.loads(data)


def serve(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Run what the owner asks for, until it asks to end or is gone."""
    del broker
    say(link, "hello")
    while True:
        request = hear(link)
        if request is None:
            return 0
        name, *arguments = request
        if name == "exit":
            return int(arguments[0])
        say(link, ACTIONS[name](config, link, lifelines, *arguments))


def _about(config: WorkerConfig, link: socket.socket, lifelines: list[int]) -> dict[str, Any]:
    del config
    umask = os.umask(0)
    os.umask(umask)
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "path": sys.path,
        "argv": sys.argv,
        "umask": umask,
        "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
        "filters": [[action, getattr(message, "pattern", message), category.__name__]
                    for action, message, category, _, _ in warnings.filters],
        "fds": sorted(_open_fds()),
        "own": sorted({0, 1, 2, link.fileno(), *lifelines}),
        "lifelines": len(lifelines),
        "stdin": os.path.samefile("/proc/self/fd/0", os.devnull),
        "main": sorted(vars(sys.modules["__main__"])),
        "handlers": [number for number in signal.valid_signals() if callable(signal.getsignal(number))],
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": threading.active_count(),
        "random": random.random(),
        "modules": sorted(sys.modules),
        "executable": sys.executable,
        "command": [word for word in Path("/proc/self/cmdline").read_text().split("\0") if word],
        "comm": Path("/proc/self/comm").read_text().strip(),
        "recursion": len(_frames()),
    }  # fmt: skip


def _frames() -> list[str]:
    import traceback

    return [frame.name for frame in traceback.extract_stack()]


def _open_fds() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            is_own = ".so" in os.readlink(f"/proc/self/fd/{name}")  # libffi keeps its own file open
            if not is_own and not stat.S_ISDIR(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


def _print(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], stream: str, text: str) -> bool:
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    return True


def _flood(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], lines: int) -> float:
    """Write many lines and return how long it took."""
    start = time.perf_counter()
    for index in range(lines):
        os.write(1, f"line {index} {'x' * 100}\n".encode())
    return time.perf_counter() - start


def _fork_executing(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], count: int) -> list[int]:
    """Start daemons, each in a session of its own, that execute themselves again and again; return their pids."""
    receiver, sender = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            os.setsid()
            if os.fork() != 0:
                os._exit(0)
            os.write(sender, f"{os.getpid()} ".encode())
            os.closerange(3, 1024)
            again = 'exec "$0" -c "$1" "$0" "$1"'
            os.execv("/bin/sh", ["/bin/sh", "-c", again, "/bin/sh", again])
        os.wait()
    os.close(sender)
    pids = b"".join(iter(lambda: os.read(receiver, 4096), b""))
    os.close(receiver)
    return [int(word) for word in pids.split()]


def _fork_child(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], kind: str) -> int:
    """Start a foreign process that would outlive us and return its pid.

    kind: "group" (a plain fork), "session" (a fork in a session of its own), "daemon" (forked twice, own session, so
    that its parent has ended), "exec" (a daemon that executes another program, with all descriptors closed).
    """
    receiver, sender = os.pipe()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if kind != "group":
            os.setsid()
        if kind in ("daemon", "exec") and os.fork() != 0:
            os._exit(0)
        os.write(sender, str(os.getpid()).encode())
        os.close(sender)
        if kind == "exec":
            os.closerange(3, 1024)
            os.execv(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        time.sleep(600)
        os._exit(0)
    os.close(sender)
    pid = int(os.read(receiver, 20))
    os.close(receiver)
    if kind in ("daemon", "exec"):
        os.wait()
    return pid


def fork_tree(depth: int) -> list[int]:
    """Fork a chain of processes, each in a session of its own, and return their pids."""
    receiver, sender = os.pipe()
    for level in range(depth):
        if os.fork() != 0:
            if level == 0:
                break
            time.sleep(600)
            os._exit(0)
        os.setsid()
        os.write(sender, f"{os.getpid()} ".encode())
    else:
        time.sleep(600)
        os._exit(0)
    os.close(sender)
    pids = list[int]()
    data = b""
    while len(pids) < depth:
        data += os.read(receiver, 100)
        pids = [int(word) for word in data.split()] if data.endswith(b" ") else []
    os.close(receiver)
    return pids


def _evaluate(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], expression: str) -> Any:
    return eval(expression, {"sys": sys, "os": os, "ctypes": ctypes, "import_module": importlib.import_module})


def _end_by(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int], how: str, text: str = "") -> None:
    """End in a way that the owner must be able to tell."""
    if how == "exception":
        raise ValueError(text)
    if how == "system_exit":
        raise SystemExit(text or 7)
    if how == "segfault":
        ctypes.string_at(8)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(600,), name="sleeper").start()
    if how == "pool":
        from concurrent.futures import ThreadPoolExecutor

        ThreadPoolExecutor().submit(int).result()
    if how == "atexit":
        atexit.register(lambda: Path(text).write_text("atexit ran"))
    if how == "unflushed":
        sys.stdout.reconfigure(line_buffering=False)  # type: ignore[union-attr]
        sys.stdout.write(text)
    if how == "hang":  # in C, holding the interpreter lock
        ctypes.PyDLL(None).sleep(600)
    raise SystemExit(0)


def _spawn_subprocess(_config: WorkerConfig, _link: socket.socket, _lifelines: list[int]) -> int:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]).pid


ACTIONS: dict[str, Callable[..., Any]] = {
    "about": _about,
    "print": _print,
    "flood": _flood,
    "fork": _fork_child,
    "fork_executing": _fork_executing,
    "eval": _evaluate,
    "end": _end_by,
    "subprocess": _spawn_subprocess,
}


def nested(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Own one worker, which serves, or owns one in turn: `extra` counts the levels. Say the pids from here down."""
    del lifelines
    return trio.run(_nest, config, link, broker)


async def _nest(config: WorkerConfig, link: socket.socket, broker: socket.socket) -> int:
    levels = int(config.extra)
    async with attach_launcher(
        broker, proc_id=ProcId(config.proc_id), root_id=ProcId(config.root_id), incoming=_answer_incoming
    ) as launcher:
        child = await launcher.launch(
            LaunchSpec(
                proc_id=ProcId(config.proc_id + 1),
                mesh="inner",
                entry=f"{__name__}:{'nested' if levels > 1 else 'serve'}",
                extra=str(levels - 1).encode(),
            )
        )
        below = await trio.to_thread.run_sync(hear, child.link)
        say(link, [os.getpid(), *([child.pid] if below == "hello" else below)])
        while True:
            request = await trio.to_thread.run_sync(hear, link)
            if request is None:
                return 0
            if request == "connect":
                peer = await launcher.connect(ProcId(config.parent_id))
                say(peer, "from below")
                peer.close()
            elif request == "exit_of":
                report = await launcher.exit_of(child.proc_id)
                say(link, report.signal)
            elif request == "wait":
                report = await child.wait_exited()
                child.close()
                say(link, report.signal)


def _answer_incoming(source: ProcId, sock: socket.socket) -> None:
    say(sock, ["met", source])
    sock.close()


def garble(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Send the spawner bytes that are no record, then serve."""
    broker.send(b"\xc1 this is no record")
    return serve(config, link, broker, lifelines)


def impostor(config: WorkerConfig, link: socket.socket, broker: socket.socket, lifelines: list[int]) -> int:
    """Ask the spawner for what only the controller may, then serve."""
    from trimesh._runtime.spawner import wire as spawner_wire

    broker.send(spawner_wire.encode(spawner_wire.Stop()))
    return serve(config, link, broker, lifelines)


def print_how_it_prints() -> None:
    """Print one line."""
    stdout = cast("TextIOWrapper", sys.stdout)
    print("printed by lines:", stdout.line_buffering, not stdout.write_through)
