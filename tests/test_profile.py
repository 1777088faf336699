"""Profiles by part: a sample goes to the part that its innermost telling frame names, and no time is lost."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from bench.profile.clocks import Clock, read_clock
from bench.profile.document import DATA, DOCUMENT, read_data, render
from bench.profile.parts import COLLECTOR, IMPORTS, KERNEL, OTHER, VALUES, function_of, part_of
from bench.profile.perf import CALLS, FAULTS, INTERRUPTS, NATIVE, NATIVE_CALLS, PYTHON, read_script
from bench.profile.profile import THREADS, Profile, divided, text
from bench.profile.sampler import read_stacks
from bench.profile.workloads import WORKLOADS
from tests.rows import rows

LIBRARY = "trimesh/_native/libtrimesh.so"
OUTER = ("0x7f41 (libc.so.6)", "<module> (program.py)", "run (trio/_core/_run.py)")


@rows(
    ("frames", "part"),
    [
        (["unrolled_run (trio/_core/_run.py)"], "Trio"),
        (["__init__ (<attrs generated methods outcome._impl.Value>)"], "Trio"),
        (["__init__ (<attrs generated methods trimesh._runtime.peers.incoming.IncomingCall>)"], "mailbox, slot"),
        (["Proc.received (trimesh/_runtime/life/proc.py)"], "tables of the process"),
        (["Block.leave (trimesh/_runtime/meshes/proc_members.py)"], "meshes, processes"),
        (["SendWindow.sent (trimesh/_routing/collector.py)"], "call, collector"),
        (["Collector.add (trimesh/_routing/collector.py)"], "call, collector"),
        (["send (trimesh/_transport/native/link.py)", "cdata_call (_cffi_backend.cpython-311.so)"], "cffi"),
        (["send (trimesh/_transport/native/link.py)", "ffi_call (_cffi_backend.so)", f"tm_send ({LIBRARY})"], NATIVE),
        ([f"tm_send ({LIBRARY})", f"0x7f00 ({LIBRARY})", "0x7f99 (libc.so.6)"], NATIVE),
        (["encode (trimesh/_wire/pickled/payload.py)", "memmove (libc.so.6)"], "encode, decode"),
        (["encode (trimesh/_wire/pickled/payload.py)", "save (_pickle.cpython-311-x86_64-linux-gnu.so)"], VALUES),
        (["encode (trimesh/_wire/pickled/payload.py)", "gc_collect_main (libpython3.11.so.1.0)"], COLLECTOR),
        (["encode (trimesh/_wire/pickled/payload.py)", "gc_collect_main (python)", "free (libc.so.6)"], COLLECTOR),
        (["EpollIOManager.get_events (trio/_core/_io_epoll.py)", "epoll_wait (libc.so.6)"], KERNEL),
        (["EpollIOManager.get_events (trio/_core/_io_epoll.py)"], "Trio"),
        (["_call_with_frames_removed (<frozen importlib._bootstrap>)"], IMPORTS),
        (["get (contextvars.py)"], OTHER),
        (["triomphe (triomphe/x.py)"], OTHER),
    ],
)  # fmt: skip
def test_innermost_frame_that_names_a_part_decides(frames: list[str], part: str) -> None:
    assert part_of([*OUTER, *frames]) == part


def test_sample_without_native_frames_is_the_kernels_where_it_is_entered() -> None:
    entering = "AroundWait.before_io_wait (trimesh/_transport/native/loop_waits.py)"

    assert part_of(["run (trio/_core/_run.py)", entering]) == KERNEL
    assert (
        part_of(["run (trio/_core/_run.py)", entering, "flush (trimesh/_transport/native/transport.py)"]) == "transport"
    )


def test_stack_of_nameless_frames_is_nobodys() -> None:
    assert part_of(["0x1 (libc.so.6)", "free (libc.so.6)"]) == OTHER


def test_function_is_the_frame_that_decided_or_an_exported_caller() -> None:
    encoding = "encode (trimesh/_wire/pickled/payload.py)"

    assert function_of([*OUTER, encoding, "memmove (libc.so.6)"]) == encoding
    assert function_of([*OUTER, encoding, f"tm_send ({LIBRARY})", f"0x1 ({LIBRARY})"]) == f"tm_send ({LIBRARY})"
    assert function_of([*OUTER, encoding, f"0x1 ({LIBRARY})"]) == f"not exported ({LIBRARY})"


def test_script_of_perf_is_read_sample_by_sample() -> None:
    script = f"""
11
\tffffffff816d636f ksys_write ([kernel.kallsyms])
\tffffffff81000130 entry_SYSCALL_64_after_hwframe ([kernel.kallsyms])
\t           2aa53 tm_flush (/somewhere/{LIBRARY})
\t           29052 ffi_call_unix64 (/lib/_cffi_backend.so)

12
\tffffffff816d636f do_epoll_wait ([kernel.kallsyms])
\t           2aa53 epoll_wait (/lib/libc.so.6)

11
\tffffffff816d636f clear_page ([kernel.kallsyms])
\tffffffff816d636f asm_exc_page_fault ([kernel.kallsyms])
\t           2aa53 [unknown] (/somewhere/{LIBRARY})

11
\tffffffff8136989e __irq_exit_rcu ([kernel.kallsyms])
\t           fa910 lookup (/lib/libpython3.11.so.1.0)

11
\t           25633 [unknown] (/somewhere/{LIBRARY})

11
\t           fa910 lookup (/lib/libpython3.11.so.1.0)
\t           25633 [unknown] (/somewhere/{LIBRARY})
""".splitlines()

    assert read_script(script) == {
        11: Counter([NATIVE_CALLS, FAULTS, INTERRUPTS, NATIVE, PYTHON]),
        12: Counter([CALLS]),
    }


STACKS = Counter({
    (*OUTER, "unrolled_run (trio/_core/_run.py)"): 30,
    (*OUTER, "encode (trimesh/_wire/pickled/payload.py)"): 10,
    (*OUTER, f"tm_send ({LIBRARY})"): 20,
    (*OUTER, "epoll_wait (libc.so.6)"): 500,
})  # fmt: skip


def test_time_is_divided_by_perf_first_and_the_rest_by_the_samples_of_python() -> None:
    kinds = {NATIVE: 10, CALLS: 30, FAULTS: 20, PYTHON: 40}

    parts, functions = divided(STACKS, kinds, 1000.0, system_share=0.9)

    assert parts == {NATIVE: 100, CALLS: 300, FAULTS: 200, "Trio": 300, "encode, decode": 100}
    assert functions == {"unrolled_run (trio/_core/_run.py)": 300, "encode (trimesh/_wire/pickled/payload.py)": 100}


def test_time_is_divided_by_the_clocks_where_there_is_no_perf() -> None:
    parts, functions = divided(STACKS, {}, 1000.0, system_share=0.4)

    assert parts == {KERNEL: 400, NATIVE: 200, "Trio": 300, "encode, decode": 100}
    assert functions[f"tm_send ({LIBRARY})"] == 200


def test_parts_of_a_profile_are_its_whole_time_an_item_and_runs_add_up() -> None:
    clock = Clock(
        main_us=900, others_us=100, ended_us=0, user_ticks=3, system_ticks=1, faults=20, sleeps=10
    )  # fmt: skip
    profile = Profile(10, clock, Counter(), STACKS.copy())
    profile.add(Profile(10, clock, Counter(), STACKS.copy()))

    summary = profile.summary()

    assert (summary["items"], summary["samples"], summary["cpu_us"]) == (20, 2 * 560, 100)
    assert (summary["faults"], summary["sleeps"]) == (2, 1)
    assert sum(summary["parts"].values()) == pytest.approx(100, abs=0.01)
    assert summary["parts"][THREADS] == 10
    assert summary["parts"][KERNEL] == pytest.approx(22.5)

    said = text("a title", "call", {"here": summary}, {"here": profile.functions(1)})

    assert "here: 100.0 us of processor time for each call" in said
    assert "unrolled_run (trio/_core/_run.py)" in said
    assert "encode (trimesh/_wire/pickled/payload.py)" not in said


def test_samples_are_read_as_py_spy_writes_them(tmp_path: Path) -> None:
    (tmp_path / "raw").write_text("a (x.py);b c (y.py) 3\na (x.py) 1\na (x.py) 1\n")

    assert read_stacks(tmp_path / "raw") == {("a (x.py)", "b c (y.py)"): 3, ("a (x.py)",): 2}


def test_clock_counts_what_this_process_computes() -> None:
    before = read_clock(os.getpid())
    total = sum(range(3_000_000))
    used = read_clock(os.getpid()) - before

    assert total
    assert used.main_us > 1000
    assert used.system_share <= 1


def _comparison(times: float) -> dict[str, object]:
    def side(us: float) -> dict[str, object]:
        parts = {"Trio": us * 0.7, "transport": us * 0.295, "cffi": us * 0.005}
        return {"cpu_us": us, "ended_us": 0, "faults": 0.0, "sleeps": 1.0, "parts": parts}

    machine = {"cpu": "a machine", "cores": 2, "python": "3.11"}
    workload = {
        "before": {"here": side(100 * times), "there": side(80 * times)},
        "after": {"here": side(50), "there": side(40)},
    }
    return {"machine": machine, "before": "1234567", "after": "89abcde", "workloads": {"call_one": workload}}


def test_comparison_becomes_a_table_with_a_line_a_part() -> None:
    made = render("before\n<!-- profile one -->\nold\n<!-- end -->\nafter\n", {"one": _comparison(1)})

    assert "| **processor time** | **100.0** | **50.0** | **80.0** | **40.0** |" in made
    assert "| Trio | 70.0 | 35.0 | 56.0 | 28.0 |" in made
    assert "| parts of less than 1% | 0.50 | 0.25 | 0.40 | 0.20 |" in made
    assert "compare one TREE_BEFORE TREE_AFTER call_one --real-time" in made
    assert "old" not in made
    assert render(made, {"one": _comparison(1)}) == made


def test_comparison_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="one place"):
        render("<!-- profile two -->\n<!-- end -->\n", {"one": _comparison(1)})


def test_the_document_has_the_tables_of_its_data() -> None:
    assert DATA.is_file()
    assert render(DOCUMENT.read_text(), read_data()) == DOCUMENT.read_text()


def test_every_workload_has_sides() -> None:
    assert all(workload.sides and workload.title and workload.item for workload in WORKLOADS.values())
