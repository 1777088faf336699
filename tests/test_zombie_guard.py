"""The zombie guard of the pytest plugin sees each kind of leftover, and nothing in a clean test."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LEAKS = """
import _multiprocessing, _posixshmem, ctypes, mmap, os, subprocess, sys, threading, time
import pytest
from trimesh.testing import zombie_guard

SLEEP = [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(30)"]
kept = []

def test_clean():
    subprocess.run([sys.executable, "-S", "-c", ""], check=True)
    thread = threading.Thread(target=time.sleep, args=(0.001,))
    thread.start()
    thread.join()
    with open(__file__):
        pass

def test_guard_is_impatient_from_here_on():
    zombie_guard.ORPHAN_SECONDS = zombie_guard.LINGER_SECONDS = 0.1

def test_child():
    child = subprocess.Popen(SLEEP, stdout=subprocess.PIPE)
    child.stdout.readline()  # a process that is just being started has no command line
    child.stdout.close()
    child.returncode = 0

def test_unreaped():
    child = subprocess.Popen([sys.executable, "-S", "-c", ""], stdout=subprocess.PIPE)
    child.stdout.read()
    child.stdout.close()
    child.returncode = 0

def test_orphan_in_its_own_session():
    start = "import subprocess, sys; "
    start += "subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.PIPE).stdout.readline()"
    subprocess.run([sys.executable, "-S", "-c", start, *SLEEP], check=True)

def test_orphaned_fork():
    read, write = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.close(read)
            os.setsid()
            time.sleep(30)
        os._exit(0)
    os.wait()
    os.close(write)
    os.close(read)

def test_descriptor():
    os.open(__file__, os.O_RDONLY)

def test_thread():
    threading.Thread(target=time.sleep, args=(600,), name="left over", daemon=True).start()

def test_native_thread():
    libc = ctypes.CDLL(None)
    kept.append(ctypes.c_ulong())
    assert libc.pthread_create(ctypes.byref(kept[0]), None, libc.pause, None) == 0

def test_shared_memory(request):
    path = f"/dev/shm/trimesh-guard-{os.getpid()}"
    with open(path, "wb+") as file:
        file.truncate(1)
        # Mapped, so that a guarded run beside this one sees whose it is; without Python's own copy of the descriptor.
        mapped = ctypes.CDLL(None).mmap
        mapped.restype, mapped.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_long] * 5]
        assert mapped(None, 1, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    request.config.add_cleanup(lambda: os.unlink(path))

def test_name_of_the_cuda_driver(request):
    path = f"/dev/shm/cuda.shm.0.{os.getpid():x}.1"
    open(path, "wb").close()
    request.config.add_cleanup(lambda: os.unlink(path))

def test_names_of_another_program():
    os.write(int(os.environ["TO_FOREIGN"]), b"make\\n")
    assert os.read(int(os.environ["FROM_FOREIGN"]), 100) == b"made\\n"

def test_file_in_shared_memory(request):
    path = f"/dev/shm/guard-file-{os.getpid() + 1}"
    open(path, "wb").close()
    request.config.add_cleanup(lambda: os.unlink(path))

def test_closed_shared_memory(request):
    name = f"/guard-segment-{os.getpid() + 1}"
    number = _posixshmem.shm_open(name, os.O_CREAT | os.O_RDWR, mode=0o600)
    os.ftruncate(number, 1)  # as multiprocessing.shared_memory does
    os.close(number)
    request.config.add_cleanup(lambda: _posixshmem.shm_unlink(name))

def test_semaphore_of_this_program(request):
    name = f"/trimesh-guard-{os.getpid()}"
    kept.append(_multiprocessing.SemLock(0, 1, 1, name, False))
    request.config.add_cleanup(lambda: _multiprocessing.sem_unlink(name))

def test_pools_of_torch():
    pytest.importorskip("torch")
"""

FOREIGN = """
import _multiprocessing, os, sys
sys.stdin.readline()
name = f"/trimesh-foreign-{os.getpid()}"
made = _multiprocessing.SemLock(0, 1, 1, name, False)
closed = f"/dev/shm/foreign-{os.getpid()}"  # no process uses it
open(closed, "wb").close()
os.mkdir(f"{closed}-folder")
os.write(1, b"made\\n")
sys.stdin.read()
_multiprocessing.sem_unlink(name)
os.unlink(closed)
os.rmdir(f"{closed}-folder")
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    (folder / "test_leaks.py").write_text(LEAKS)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:trio", "-p", "trimesh.testing.plugin", "-c", "/dev/null"]
    options += ["-o", "mesh_zombie_guard=all", "--rootdir", folder, folder]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", FOREIGN], **pipes) as foreign:
        ends = {"TO_FOREIGN": foreign.stdin.fileno(), "FROM_FOREIGN": foreign.stdout.fileno()}
        environment = os.environ | {name: str(fd) for name, fd in ends.items()} | {"TRIMESH_TEST_ID": "of another run"}
        command = [sys.executable, "-m", "pytest", *options]
        done = subprocess.run(
            command, env=environment, pass_fds=ends.values(), capture_output=True, text=True, check=False
        )
        foreign.stdin.close()  # it removes its semaphore and ends
    return done.stdout


@pytest.mark.parametrize(
    ("test", "leftover"),
    [
        ("child", r"process \d+ \(python.*, state [RSD], parent \d+\): .*time\.sleep\(30\)"),
        ("unreaped", r"process \d+ \(python.*, state [RXZ]"),
        ("orphan_in_its_own_session", r"orphaned process \d+ \(python.*, state [RSD], .*time\.sleep\(30\)"),
        ("orphaned_fork", r"orphaned process \d+ .*pytest"),
        ("descriptor", r"descriptor \d+ -> .*test_leaks\.py"),
        ("thread", r"thread \d+ \(left over\)"),
        ("native_thread", r"thread \d+ \(python.*\)"),
        ("shared_memory", r"shared memory /dev/shm/trimesh-guard-\d+"),
        ("file_in_shared_memory", r"shared memory /dev/shm/guard-file-\d+"),
        ("closed_shared_memory", r"shared memory /dev/shm/guard-segment-\d+"),
        ("semaphore_of_this_program", r"shared memory /dev/shm/sem\.trimesh-guard-\d+"),
    ],
)
def test_zombie_guard_names_leftover(report: str, test: str, leftover: str) -> None:
    section = re.search(rf"_ ERROR at teardown of test_{test} _+\n(.*?)(?=\n_{{3,}}|\n=)", report, re.DOTALL)

    assert section is not None, report
    assert re.search(leftover, section[1]), section[1]
    assert section[1].count("\n  ") == 1, section[1]


def test_zombie_guard_passes_clean_test(report: str) -> None:
    assert "ERROR at teardown of test_clean" not in report
    assert "ERROR at teardown of test_name_of_the_cuda_driver" not in report
    assert "ERROR at teardown of test_pools_of_torch" not in report
    assert "11 errors" in report


def test_zombie_guard_passes_names_of_another_program(report: str) -> None:
    assert "test_names_of_another_program" not in report
    assert re.search(r"16 passed|15 passed, 1 skipped", report)
