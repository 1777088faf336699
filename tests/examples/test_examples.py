"""Each example runs alone, prints what it promises, ends with 0 and leaves nothing behind (the zombie guard looks).

Some are executed as a user does, with torch and without, with another program beside them; the others are copies."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.devices import HAS_CUDA
from tests.program_template import Run, executed

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.real


on_each_device = pytest.mark.parametrize(
    ("device", "tolerance"),
    [
        ("cpu", 1e-5),
        # Ranks share a device where there are fewer. It adds up in another order, which each step magnifies.
        pytest.param(
            "cuda",
            1e-3,
            marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device")],
        ),
    ],
)


EXAMPLE_SECONDS = 100.0
DEVICE_WARNING = re.compile(
    r"^\S+:\d+: UserWarning: (?:[^\n]* has been tested without a CUDA device only|"
    r"collectives of CUDA tensors use gloo)[^\n]*\n(?:  [^\n]*\n)?",
    re.MULTILINE,
)
"""On standard error of programs that name a device: it has not been tried, or ranks share one."""
IN_DOUBLE = Path("tests/examples/in_double.py")

Example = Callable[..., str]
"""Runs an example with options, and returns what it printed."""


@pytest.fixture(scope="session")
def example(run_program: Run) -> Example:
    """Runs examples in copies of one interpreter."""
    return partial(run_example, run=run_program)


def run_example(
    name: str, *options: str, run: Run = executed, in_double: bool = False, warns: str = "", code: int = 0
) -> str:
    """Run an example, as a user does unless told otherwise; return what it printed. `warns` matches its stderr."""
    program = Path("examples") / name
    if in_double:
        done = run(IN_DOUBLE, str(program), *options, cwd=ROOT, seconds=EXAMPLE_SECONDS)
    else:
        done = run(program, *options, cwd=ROOT, seconds=EXAMPLE_SECONDS)
    said = DEVICE_WARNING.sub("", done.stderr) if HAS_CUDA else done.stderr
    is_well = done.returncode == code and re.fullmatch(warns, said)
    assert is_well, f"exit code {done.returncode}\n{done.stderr}\nprinted before:\n{done.stdout}"
    return done.stdout


def facts(pattern: str, text: str) -> list[str]:
    """Return what the one group of `pattern` matched, for each line that matches."""
    return re.findall(pattern, text, re.MULTILINE)


def losses(text: str) -> dict[int, float]:
    """Return the losses that the training printed, by step."""
    found = re.findall(r"^step +(\d+)  loss (\S+)$", text, re.MULTILINE)
    assert len(found) == len(dict(found)), "a step was made twice"
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def training() -> str:
    """What a short training printed that lost a process half-way."""
    return run_example("train_bytes.py", "--steps", "12")


@pytest.mark.daily
@pytest.mark.torch
def test_train_bytes_makes_the_loss_fall(training: str) -> None:
    by_step = losses(training)

    assert sorted(by_step) == list(range(1, 13))
    assert by_step[12] < by_step[1] - 1


@pytest.mark.daily
@pytest.mark.torch
def test_train_bytes_tells_of_the_process_that_was_killed(training: str) -> None:
    """The type, the coordinates, the signal, the delay and the last words of the dead are printed."""
    [pid] = facts(r"^ +\S+ s  SIGKILL to process (\d+)$", training)
    [delay] = facts(r"^ +\S+ s  ProcDied at procs\[replica=2\]: SIGKILL, (\d+) ms ago$", training)
    [words] = facts(r"^ +\S+ s  its last words: (.*)$", training)

    assert int(delay) < 10_000
    assert re.fullmatch(rf"pid {pid} computes the gradients of step \d+", words)


@pytest.mark.daily
@pytest.mark.torch
def test_train_bytes_goes_on_with_a_fresh_mesh_at_the_lost_step(training: str) -> None:
    first, second = facts(r"^ +\S+ s  4 processes ready after \d+ ms for step (\d+)$", training)
    [last_of_the_dead] = facts(r"^ +\S+ s  its last words: .* of step (\d+)$", training)

    assert first == "0"
    assert int(second) >= 6  # more on a machine so busy that the saboteur comes late
    assert int(second) - int(last_of_the_dead) in (0, 1)  # the dead was in the lost step, or about to begin it


@pytest.mark.daily
@pytest.mark.torch
def test_train_bytes_ends_with_text_and_a_table_of_events(training: str) -> None:
    _, _, result = training.partition("What the model writes")
    text, _, table = result.partition("What happened")

    assert "\nclass Reader:\n" in text
    told = facts(r"^ +(\d+\.\d\d) s  ", training)
    assert facts(r"^│ (\d+\.\d\d) +│", table) == told
    assert len(told) == 6


@pytest.mark.daily
@pytest.mark.torch
def test_train_bytes_loses_nothing_by_the_death(training: str, example: Example) -> None:
    """Every loss after the death is the one of a run that nobody disturbed."""
    undisturbed = example("train_bytes.py", "--steps", "12", "--no-kill")

    assert "ProcDied" not in undisturbed
    assert losses(training) == losses(undisturbed)


@pytest.mark.torch
@on_each_device
@pytest.mark.parametrize("ranks", [1, 3])
def test_ddp_training_is_the_training_in_one_process(
    device: str, tolerance: float, ranks: int, example: Example
) -> None:
    printed = example("ddp_training.py", "--ranks", str(ranks), "--steps", "8", "--device", device)

    steps = re.findall(r"^step +\d+  loss (\S+)  in one process (\S+)$", printed, re.MULTILINE)
    assert len(steps) == 8
    assert all(abs(float(one) - float(other)) < tolerance for one, other in steps)
    assert float(steps[-1][0]) < float(steps[0][0]) - 1
    assert f"less than {tolerance:.0e}" in printed
    assert "the ranks have the same weights" in printed


@pytest.mark.daily
def test_script_needs_no_await() -> None:
    """K06."""
    printed = run_example("script.py")

    assert printed.splitlines() == [
        "called: (9, 9)",
        "later: (16, 16)",
        "streamed: [(0, 0), (0, 1), (1, 0), (1, 1)]",
        "held too long: True",
    ]


def test_ping_pong_prints_the_latency() -> None:
    printed = run_example("ping_pong.py", "--rounds", "200")

    [(half, most)] = re.findall(r"^200 round trips: half within (\d+) us, 99 % within (\d+) us$", printed, re.MULTILINE)
    assert 0 < int(half) <= int(most)


@pytest.fixture(scope="module")
def tree(example: Example) -> str:
    """What the actor tree printed."""
    return example("actor_tree.py")


def test_actor_tree_survives_an_error_and_shows_its_way(tree: str) -> None:
    """An error three levels down reaches the caller with the coordinates of every level; nothing dies of it."""
    assert facts(r"the sum is (\d+)$", tree) == ["5050", "5050"]
    climb = tree.partition("an error goes to its caller")[2].partition("the tree lives on")[0]
    # "fifty-one" is number 50 from 0: branch 0 takes the even ones, its twig 1 every other, its leaf 0 of those.
    assert facts(r"\(at (\w+\[.*?\]), actor Node, endpoint total, pid \d+ on ", climb) == [
        "branch[branch=0]",
        "twig[twig=1]",
        "leaf[leaf=0]",
    ]
    assert "ValueError: invalid literal for int() with base 10: 'fifty-one'" in climb


def test_actor_tree_falls_with_a_death_and_shows_its_way(tree: str) -> None:
    """A death three levels down comes out of the outermost block with the coordinates of every level."""
    climb = tree.partition("a death goes to its owner")[2]
    assert facts(r"\(at (\w+\[.*?\]), actor Node, pid", climb) == ["branch[branch=1]", "twig[twig=0]"]
    assert set(facts(r"ProcDied: (procs\[.*?\]) was killed by SIGKILL", climb)) == {"procs[leaf=0]"}


@pytest.mark.daily
@pytest.mark.parametrize(("suite", "count"), [("test_my_actor.py", 6), ("test_rl_loop.py", 8)])
def test_suite_to_start_from_passes(suite: str, count: int) -> None:
    """As somebody else's pytest runs it, over simulated and over real processes, under one seed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin"]
    command += ["-c", "/dev/null", "--rootdir", "examples", f"examples/{suite}", "--mesh-seeds", "1"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)

    assert f"{count} passed" in done.stdout, done.stdout


def test_cancel_cuts_the_remote_endpoints_and_waits_for_their_clean_up(example: Example) -> None:
    for limit in (0.5, 5.0, 50.0):  # a busy machine may need more to begin
        printed = example("cancel.py", str(limit))
        if printed.count("I need 3600 s") == 2:
            break

    for cook in "01":
        said = facts(rf"^procs\[cook={cook}\] \| (.*)$", printed)
        assert len(said) == 4
        [budget] = facts(r"^I need 3600 s, the caller gives me (\S+) s$", said[0])
        assert 0 <= float(budget) <= limit
        assert re.fullmatch(r"cancelled after \d+\.\d s, cleaning up", said[1])
        assert said[2] == "clean"
        [budget] = facts(r"^I need 0\.1 s, the caller gives me (\S+) s$", said[3])
        assert 0 < float(budget) <= 10
    [cut] = facts(r"^the call was cut after (\S+) s, clean-up included$", printed)
    assert float(cut) >= limit + 0.1
    assert "served: dish 0 dish 1" in printed


@pytest.mark.daily
@pytest.mark.torch
def test_weight_sync_is_never_torn(example: Example) -> None:
    """Every generator has taken versions up to the last, whole."""
    said = example("weight_sync.py", "30", "8", "15")

    taken = re.findall(r"^  generator (\d): (\d+) versions, 0 torn, \S+ ms each$", said, re.MULTILINE)
    assert [generator for generator, _ in taken] == ["0", "1", "2", "3"]
    assert all(1 <= int(count) <= 15 for _, count in taken)
    assert facts(r"^  trainer: \S+ ms to publish one, (\S+) GiB/s$", said)


@pytest.mark.torch
def test_training_from_parquet_loses_no_row_with_a_loader(example: Example) -> None:
    """Two loaders read what DuckDB has written, and one of them is killed."""
    pytest.importorskip("duckdb", reason="comes with the extra `test`")
    warned = r"procs: ProcDied: procs\[loaders=0\] [^\n]*; restarting rank 0 after [^\n]*\n"
    printed = example("train_from_parquet.py", "--rows", "8000", "--epochs", "1", warns=warned)
    assert "killed the first loader\n" in printed
    assert "8000 rows in 16 batches" in printed
    assert printed.endswith("each row came once an epoch\n")


@pytest.mark.torch
def test_training_over_hosts_loses_nothing_by_the_loss_of_one(training: str, example: Example) -> None:
    """`make demo HOSTS=2`: the host is replaced, and the loss at the end is that of as many processes on one host."""
    pytest.importorskip("cryptography")
    warned = r"procs: HostLost: the host [^\n]* was lost [^\n]*; restarting rank 2, 3 after [^\n]*\n"
    printed = example("train_bytes_on_hosts.py", "--hosts", "2", "--steps", "12", warns=warned)
    assert re.search(r"SIGKILL to process \d+\n.*HostLost at hosts\[hosts=1\]: agent exit", printed, re.DOTALL)
    [loss] = re.findall(r"12 steps done, final loss (\d\.\d{4})\n", printed)
    assert abs(float(loss) - losses(training)[12]) < 1e-3


@pytest.mark.torch
@on_each_device
@pytest.mark.parametrize("program", ["train_module.py", "tensor_parallel.py", "train_bytes_on_mesh.py", "pipeline.py"])
def test_training_on_a_mesh_has_the_losses_of_plain_torch(
    program: str, device: str, tolerance: float, example: Example
) -> None:
    there = example(program, "--steps", "6", "--seed", "1", "--device", device, in_double=True)
    here = example(program, "--steps", "6", "--seed", "1", "--plain", in_double=True)

    assert sorted(losses(here)) == list(range(1, 7))
    assert losses(there) == pytest.approx(losses(here), abs=tolerance)
    if program == "tensor_parallel.py":
        assert "up.weight    (128, 32)  lies ['tp', None]   a rank has (64, 32)" in there
        assert "norm.weight  (32,)      lies [None]         a rank has (32,)" in there


@pytest.mark.torch
def test_fully_sharded_training_has_the_losses_of_plain_torch(example: Example) -> None:
    there = example("train_module.py", "--steps", "6", "--seed", "1", "--sharded", in_double=True)
    here = example("train_module.py", "--steps", "6", "--seed", "1", "--plain", in_double=True)

    assert losses(there) == pytest.approx(losses(here), abs=1e-9)
    assert "a rank holds 2,568 bytes of 10,248" in there


@pytest.mark.torch
def test_plans_are_compared_without_processes(example: Example, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    said = example("simulate_training.py", "--hosts", "2", "--width", "128", "--layers", "1", "--trace", str(trace))

    weights = 4 * (12 * 128 * 128 + 9 * 128)
    sent = {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"^(.+): .* sends (\S+) along hosts", said, re.MULTILINE)
    }
    assert list(sent) == ["data", "fully sharded", "tensor in a host"]
    assert sent["data"] == sent["fully sharded"] == weights  # added up, or brought together and scattered
    assert sent["tensor in a host"] < weights // 2
    assert "simulate_training.py:" in trace.read_text()


@pytest.mark.torch
@pytest.mark.skipif(HAS_CUDA, reason="torch finds a CUDA device")
def test_training_on_a_device_that_is_not_there_says_so(example: Example) -> None:
    told = "--device cuda needs a CUDA device, and torch finds none\n"

    assert example("pipeline.py", "--device", "cuda", warns=told, code=1) == ""


@pytest.mark.torch
@on_each_device
def test_generators_write_what_the_trainer_has_learned(device: str, tolerance: float, example: Example) -> None:
    """The weights that moved, and those that were read, are the trainer's: all write the same, and what was learned."""
    del tolerance
    said = example("generate_with_trained.py", "--rounds", "3", "--device", device)

    by_round = [float(loss) for loss in facts(r"^round \d  loss (\S+)  '", said)]
    assert len(by_round) == 3
    assert by_round[0] > 10 * by_round[2]
    assert "she sells sea shells by the sea shore; she sell" in facts(r"^round 3  loss \S+  '(.*)'$", said)
    assert facts(r"^round 3  loss \S+  '(.*)'$", said) == facts(r"^by handles +'(.*)'$", said)
    assert facts(r"^by handles +'(.*)'$", said) == facts(r"^here +'(.*)'$", said)


@pytest.mark.torch
@pytest.mark.parametrize("is_broken", [False, pytest.param(True, marks=pytest.mark.stress)], ids=["right", "broken"])
def test_grpo_learns_by_its_rewards_alone_and_loses_no_work_by_a_death(is_broken: bool, example: Example) -> None:
    """With the rewards of other answers all else is the same, and nothing is learned."""
    options = ["--broken"] if is_broken else []
    said = example("grpo.py", "--steps", "60", *options, warns=restarts("generation", "training"))

    [(reward, verdict)] = re.findall(r"^reward (\S+): copying is (.*), the bound is 0.9$", said, re.MULTILINE)
    assert verdict == ("not learned" if is_broken else "learned")
    assert float(reward) < 0.5 if is_broken else float(reward) >= 0.9
    assert facts(r"^step +(\d+)  generator 1 was killed$", said) == ["20"]
    assert facts(r"^step +(\d+)  the trainer was killed$", said) == ["40"]
    assert re.search(r"^generators made \{\(0, 0\): \d+, \(1, 0\): \d+, \(1, 1\): \d+\} groups", said, re.MULTILINE)
    assert facts(r"^groups: \d+ added, (\d+) trained", said) == ["480"]


def restarts(*meshes: str) -> str:
    """Return what is warned of when a process of each of these meshes is restarted."""
    return "".join(rf"{mesh}: ProcDied.*; restarting rank \d .*\n" for mesh in meshes)


@pytest.mark.torch
def test_grpo_goes_on_where_it_was_killed_and_in_asyncio_to_the_same_weights(tmp_path: Path, example: Example) -> None:
    """Without staleness what is learned depends on the seed alone: not on kills, resumes and loops."""
    plan = ["grpo.py", "--steps", "6", "--staleness", "0"]
    whole = example(*plan, warns=restarts("generation", "training"))
    in_asyncio = example(*plan, "--asyncio", warns=restarts("generation", "training"))
    saved = ["--checkpoint", str(tmp_path)]
    killed = example(*plan, *saved, "--die-after", "3", warns=restarts("generation"), code=-signal.SIGKILL)
    resumed = example(*plan, *saved, "--resume", warns=restarts("training"))

    assert "step    3  this program is killed" in killed
    assert "resumed after step 3" in resumed
    digests = [facts(r"^weights (\w+)$", said) for said in (whole, in_asyncio, resumed)]
    assert len(digests[0]) == 1
    assert digests[0] == digests[1] == digests[2]
    for said in (whole, in_asyncio, resumed):
        assert facts(r"^groups: \d+ added, (\d+) trained", said) == ["48"]


def test_parameter_server_finds_the_weights(example: Example) -> None:
    distances = [float(found) for found in facts(r"distance (\S+)$", example("ray/parameter_server.py"))]

    assert len(distances) == 2
    assert max(distances) < 0.05


def test_map_over_actors_uses_all_and_keeps_the_order(example: Example) -> None:
    printed = example("ray/map_over_actors.py", "--items", "9")

    assert f"in order: {[number * number for number in range(9)]}" in printed
    assert "workers used: [0, 1, 2]" in printed


def test_async_actor_batches_streams_and_is_cancelled(example: Example) -> None:
    printed = example("ray/async_actor.py")

    assert "'PROMPT 7'" in printed
    assert "tokens: ONE WORD AFTER THE OTHER" in printed
    assert "cancelled calls that have unwound: 1" in printed


@pytest.mark.daily
def test_getting_started_tells_of_slices_errors_and_restarts(run_program: Run) -> None:
    done = run_program(Path("examples") / "monarch" / "getting_started.py", cwd=ROOT, seconds=EXAMPLE_SECONDS)

    assert done.returncode == 0, done.stderr
    assert "restarting rank 1" in done.stderr
    assert "steps, asked from another process: 10" in done.stdout
    assert "a batch of rank 2 is broken, at [{'hosts': 1/2, 'gpus': 0/2}]" in done.stdout
    assert "steps after a death and a restart: [0, 0]" in done.stdout


def test_philosophers_eat_with_a_waiter_and_are_told_without(example: Example) -> None:
    printed = example("monarch/dining_philosophers.py", "--philosophers", "3", "--rounds", "5")

    assert "meals: [5, 5, 5]" in printed
    assert "without a waiter: " in printed
    assert "waits for itself" in printed


def test_crawler_reads_every_page_once_and_knows_when_it_is_done(example: Example) -> None:
    printed = example("monarch/crawler.py", "--crawlers", "3", "--depth", "9")

    assert "pages read: 40, broken: 41, by 3 crawlers" in printed
    read = facts(r"crawler \d: http://[^/]+/(\d*), \d+ characters", printed)
    assert sorted(read) == sorted(["", *map(str, range(1, 40))])


def test_crawler_goes_as_deep_as_it_is_told(example: Example) -> None:
    printed = example("monarch/crawler.py", "--crawlers", "2", "--depth", "2")

    assert "pages read: 7, broken: 0, by 2 crawlers" in printed


@pytest.mark.torch
def test_actors_of_asyncio_learn_together(example: Example) -> None:
    printed = example("monarch/grpo_actor.py", "--steps", "61", "--generators", "2")

    rewards = [float(one) for one in facts(r"^step .* reward (\S+)$", printed)]
    assert len(rewards) == 7
    assert rewards[0] + 0.1 < rewards[-1]
    assert int(facts(r"^trajectories scored: (\d+)$", printed)[0]) > 300


@pytest.mark.torch
def test_script_of_torchrun_trains_on_a_mesh(example: Example) -> None:
    said = example("monarch/ddp.py", "--ranks", "1", "--steps", "2", warns=r"(?s).*")  # each imports torch, twice

    assert "step 1: loss" in said
    assert "exit codes: [0]" in said
    [failure] = facts(r"^failed at (.*)$", said)
    assert failure.startswith("{'gpus': 0/1}: ")
    assert failure.endswith("ValueError: rank 0 does not like step 0")


@pytest.mark.daily
def test_hosts_greet_each_other(example: Example) -> None:
    """Workers on the first host get answers of those on the second."""
    pytest.importorskip("cryptography")
    printed = example("two_hosts.py")

    assert "4 processes over {'hosts': 2, 'gpus': 2}" in printed
    assert printed.count("hello, host 0") == 4


def test_two_programs_talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds no service, starts one, and asks it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    printed = run_example("two_programs.py")

    assert "no program of this user publishes 'example-judge'" in printed
    assert facts(r"^'.*': (\d\.\d\d)$", printed) == ["0.15", "1.00"]
    assert [one for one in (tmp_path / "trimesh").rglob("*") if one.is_socket()] == []


def test_verl_adapter_dispatches_ends_by_its_deadline_and_tells_of_a_death(example: Example) -> None:
    """`RemoteCall`: the deadline is that of the submission; `DP_COMPUTE` cuts and puts together."""
    printed = example("verl_adapter.py", warns=r"(?s).*ProcDied: procs\[dp=1\].*")
    assert printed.splitlines() == [
        "7 answers of 3 workers, in order",
        "the first worker sees 7 prompts",
        "stall has passed its deadline",
        "lost: [{'dp': 1}]",
    ]
