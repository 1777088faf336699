"""The bundle for GPU machines: what goes in, and a run of it that copes with tests that fail, hang and die."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.cuda import bundle, session

ROOT = Path(__file__).parents[2]
PLANTED = """
import ctypes, os, pytest

pytestmark = pytest.mark.cuda

def test_good(): ...

def test_bad():
    print("printed before")
    assert 1 == 2

def test_skipped():
    pytest.skip("has no device")

def test_hangs():
    ctypes.CDLL(None).pause()

def test_dies():
    os._exit(7)

def test_behind(): ...
"""
NAMES = ["good", "bad", "skipped", "hangs", "dies", "behind"]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with tests of many kinds the current one; its packages are those of this checkout."""
    (tmp_path / "test_planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("TEST_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(session, name, 3.0 if name == "STALL_SECONDS" else 60.0)
    return tmp_path


def run_planted(folder: Path, tests: list[str], minutes: float = 5.0) -> session.Results:
    results = session.Results(folder, {"tests": tests}, minutes, patience=1.0)
    session.run_all_tests(results, folder, only="")
    return results


def outcomes(results: session.Results) -> list[str]:
    return [results.tests[f"test_planted.py::test_{name}"]["outcome"] for name in NAMES]


@pytest.mark.real
def test_run_goes_on_behind_tests_that_hang_and_die(planted: Path) -> None:
    results = run_planted(planted, [f"test_planted.py::test_{name}" for name in NAMES])

    assert outcomes(results) == ["passed", "failed", "skipped", "hung", "died", "passed"]
    assert results.failed() == [f"test_planted.py::test_{name}" for name in ("bad", "hangs", "dies")]
    log = (planted / "failures.log").read_text()
    for told in (
        "assert 1 == 2",
        "printed before",
        "in test_hangs",
        "bash cuda.sh --only ",
        "make test-cuda PYTEST_ARGS=",
    ):
        assert told in log
    assert json.loads((planted / "results.json").read_text())["counts"]["passed"] == 2


@pytest.mark.real
def test_ids_that_are_others_here_cost_no_test(planted: Path) -> None:
    """One id that pytest does not know would cost all."""
    (planted / "test_planted.py").write_text(PLANTED.partition("def test_hangs")[0])
    results = run_planted(planted, ["test_planted.py::test_good", "test_planted.py::test_gone"])

    assert results.tests["test_planted.py::test_bad"]["outcome"] == "failed"
    assert results.tests["test_planted.py::test_good"]["outcome"] == "passed"
    assert results.tests["test_planted.py::test_gone"]["outcome"] == "not run"


@pytest.mark.real
def test_file_that_needs_what_is_not_here_is_skipped(planted: Path) -> None:
    (planted / "test_planted.py").write_text(PLANTED.partition("def test_hangs")[0])
    (planted / "test_lacking.py").write_text('import pytest\npytest.importorskip("no_such_package")\n')
    results = run_planted(planted, ["test_lacking.py::test_one", "test_planted.py::test_good"])

    assert results.tests["test_lacking.py::test_one"]["outcome"] == "skipped"
    assert results.tests["test_planted.py::test_good"]["outcome"] == "passed"
    assert results.failed() == []


def test_groups_run_in_the_order_of_what_others_need() -> None:
    """Each group is the first that a test of its kind belongs to."""
    expected = {
        "tests/rdma/test_cuda.py::test_publication_from_device_to_device": "publications",
        "tests/rdma/test_cuda.py::test_many_parts_at_one_time": "buffers",
        "tests/rdma/test_devices.py::test_matrices_are_read_and_written[cuda:0-cpu-1]": "one-sided",
        "tests/rdma/test_devices.py::test_module_follows_versions_without_mixing_them[cuda-cuda]": "publications",
        "tests/tensor/test_cuda.py::test_collectives_on_devices[1]": "groups",
        "tests/tensor/test_cuda.py::test_recorded_step_on_a_device": "recordings",
        "tests/tensor/test_cuda.py::test_training_on_devices_equals_training_here[3]": "tensor engine",
        "tests/tensor/test_devices.py::test_group_without_a_device[cuda-1]": "groups",
        "tests/tensor/test_devices.py::test_recorded_training_step_equals_plain_torch[cuda-1]": "recordings",
        "tests/tensor/test_devices.py::test_module_on_a_mesh_trains_as_plain_torch_does[cuda-1]": "modules",
        "tests/data/test_devices.py::test_rows_arrive_on_the_device_of_each_rank[cuda]": "data",
        "tests/examples/test_examples.py::test_training_on_a_mesh[pipeline.py-cuda-0.001]": "programs",
        "tests/new/test_new.py::test_new": "others",
    }

    assert {test: session.group_of(test) for test in expected} == expected


def test_trimmed_wheel_of_ucx_records_what_is_left(tmp_path: Path) -> None:
    kept = ["libucx/__init__.py", "libucx/lib/libucp.so.0", "libucx/lib/ucx/libuct_cuda.so.0", "libucx_cu13.libs/x.so"]
    left_out = ["libucx/lib/libucp.so", "libucx/lib/libucp.a", "libucx/bin/ucx_info", "libucx/lib/ucx/libperftest.so.0"]
    record = "libucx_cu13-1.dist-info/RECORD"
    wheel = tmp_path / "libucx_cu13-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in [*kept, *left_out]:
            file.writestr(name, name)
        file.writestr(record, "".join(f"{name},,\n" for name in [*kept, *left_out, record]))

    bundle.trim_ucx(wheel)

    with zipfile.ZipFile(wheel) as file:
        assert sorted(file.namelist()) == sorted([*kept, record])
        assert [row[0] for row in csv.reader(io.StringIO(file.read(record).decode()))] == [*kept, record]


def test_wheels_are_all_that_is_needed_besides_torch() -> None:
    found = bundle.needed(bundle.NEEDED, "3.12")

    assert {"trio", "outcome", "cffi", "pycparser", "msgspec", "cloudpickle", "pytest", "hypothesis", "rich"} <= set(
        found
    )
    assert not {"torch", "numpy", "trimesh-actors"} & set(found)


@pytest.mark.real
@pytest.mark.torch
@pytest.mark.timeout(600)  # a quarter of a minute, more beside much other load
def test_a_run_without_a_device_skips_tests_and_measures_small_sizes(tmp_path: Path) -> None:
    """`bash cuda.sh --without-device`, less its wheels."""
    made = tmp_path / "bundle.json"
    one = "tests/tensor/test_cuda.py::test_recorded_step_on_a_device"
    made.write_text(json.dumps({"tests": [one], "python": "any"}))
    only = "test_recorded_step_on_a_device|figures operators"
    options = [
        "--bundle",
        made,
        "--out",
        tmp_path,
        "--minutes",
        "10",
        "--patience",
        "4",
        "--without-device",
        "--only",
        only,
    ]
    command = [sys.executable, "-m", "tests.cuda.session", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    results = json.loads((tmp_path / "results.json").read_text())
    assert (done.returncode, results["status"], results["failed"]) == (0, "done", []), done.stdout + done.stderr
    assert results["tests"][one]["outcome"] == "skipped"
    assert [row["name"] for row in results["figures"]] == ["one eager operator"]
    assert results["machine"]["torch"]["sees_a_device"] is False
