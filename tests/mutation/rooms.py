"""The rooms of the product, and the tests that are nearest to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

NEAREST: Final[Mapping[str, Sequence[str]]] = {
    "src/trimesh/_runtime/calls": (
        "tests/runtime/test_invocation.py",
        "tests/runtime/test_outgoing*.py",
        "tests/runtime/test_several_calls.py",
        "tests/runtime/test_deadlock.py",
        "tests/conformance/test_abandoned*.py",
        "tests/conformance/test_calls_while_spawning.py",
        "tests/conformance/test_cancellation*.py",
        "tests/conformance/test_choosing*.py",
        "tests/conformance/test_deadlines*.py",
        "tests/conformance/test_deadlock*.py",
        "tests/conformance/test_elastic*.py",
        "tests/conformance/test_errors.py",
        "tests/conformance/test_functions.py",
        "tests/conformance/test_isolation*.py",
        "tests/conformance/test_mailbox.py",
        "tests/conformance/test_map*.py",
        "tests/conformance/test_membership*.py",
        "tests/conformance/test_multicast.py",
        "tests/conformance/test_options.py",
        "tests/conformance/test_per_rank.py",
        "tests/conformance/test_reduced*.py",
        "tests/conformance/test_replied*.py",
        "tests/conformance/test_restart*.py",
        "tests/conformance/test_stalls.py",
        "tests/conformance/test_started*.py",
        "tests/conformance/test_stream*.py",
        "tests/conformance/test_supervised*.py",
    ),
    "src/trimesh/_runtime/channels": (
        "tests/runtime/test_channels.py",
        "tests/routing",
        "tests/conformance/test_*channel*.py",
    ),
    "src/trimesh/_transport/relay.py": ("tests/relay", "tests/jobs/network", "tests/transport"),
    "src/trimesh/actor/item_map.py": (
        "tests/actor",
        "tests/conformance/test_choosing.py",
        "tests/conformance/test_deadlines.py",
        "tests/conformance/test_map*.py",
        "tests/conformance/test_options.py",
        "tests/conformance/test_per_rank.py",
        "tests/conformance/test_survivors.py",
        "tests/observe/test_progress.py",
    ),
    "src/trimesh/actor/started.py": (
        "tests/actor",
        "tests/conformance/test_started.py",
        "tests/conformance/test_legible_failures.py",
        "tests/conformance/test_mistakes.py",
        "tests/conformance/test_options.py",
        "tests/aio/test_started.py",
        "tests/blocking/test_from_thread.py",
    ),
    "src/trimesh/config": ("tests/config", "tests/conformance/test_settings.py"),
    "src/trimesh/observe": (
        "tests/observe",
        "tests/dashboard/test_feed.py",
        "tests/dashboard/test_fold.py",
        "tests/dashboard/test_publishing.py",
        "tests/blocking/test_shown.py",
        "tests/conformance/test_observe.py",
        "tests/conformance/test_stalls.py",
    ),
    "src/trimesh/jobs/addresses.py": ("tests/jobs/test_addresses.py", "tests/jobs/test_join_words.py"),
    "src/trimesh/jobs/door.py": (
        "tests/jobs/test_door.py",
        "tests/jobs/test_host_faults.py",
        "tests/jobs/test_insecure.py",
        "tests/jobs/test_join_words.py",
        "tests/jobs/test_joined_host.py",
        "tests/jobs/test_open_door.py",
        "tests/jobs/test_own_pki.py",
        "tests/jobs/test_replacing.py",
        "tests/jobs/test_strangers.py",
    ),
    "src/trimesh/jobs/identity.py": ("tests/jobs/identity", "tests/jobs/test_own_pki.py", "tests/jobs/test_door.py"),
    "src/trimesh/jobs/job_file.py": ("tests/jobs/test_job_file.py",),
    "src/trimesh/jobs/packages.py": ("tests/jobs/packages",),
    "src/trimesh/jobs/slurm_output.py": ("tests/jobs/test_slurm_words.py",),
    "src/trimesh/rdma/publications": (
        "tests/rdma/test_board.py",
        "tests/rdma/test_layout.py",
        "tests/conformance/test_*publi*.py",
        "tests/observe/test_publications.py",
        "tests/service/test_weights.py",
        "tests/testing/test_lost_pins.py",
        "tests/testing/test_publication_races.py",
        "tests/testing/test_transfer_faults.py",
    ),
    "src/trimesh/service": ("tests/service",),
    "src/trimesh/service/slots.py": ("tests/service", "tests/data"),
    "src/trimesh/tensor/dtensor": (
        "tests/tensor/test_global_sequences.py",
        "tests/tensor/test_local_replay.py",
        "tests/tensor/test_sequences.py",
        "tests/tensor/test_learnt_operators.py",
        "tests/tensor/test_global_tensor.py",
        "tests/tensor/test_rank.py",
    ),
    "src/trimesh/tensor/publications": (
        "tests/tensor/test_publication.py",
        "tests/tensor/test_mapped_memory.py",
        "tests/service/test_relays.py",
        "tests/service/test_weights.py",
    ),
    "src/trimesh/tensor/rank": (
        "tests/tensor/test_global_sequences.py",
        "tests/tensor/test_sequences.py",
        "tests/tensor/test_local_replay.py",
        "tests/tensor/test_box.py",
        "tests/tensor/test_errors.py",
        "tests/tensor/test_foreign_messages.py",
        "tests/tensor/test_functions.py",
        "tests/tensor/test_layouts.py",
        "tests/tensor/test_moves.py",
        "tests/tensor/test_movement.py",
        "tests/tensor/test_rank.py",
        "tests/tensor/test_recording.py",
        "tests/tensor/test_runner.py",
    ),
}
"""Tests, by a folder or a file of the product; of several that hold a file the innermost counts."""

BOTH_TIERS: Final = ("src/trimesh/aio", "src/trimesh/jobs/door.py")
"""Rooms most of whose tests start processes, so that few are daily; all of them are tried."""


def tier_of(path: str) -> str:
    """Return the tier of the nearest tests that are tried for a file or folder."""
    return "all" if any(place.as_posix() in BOTH_TIERS for place in (Path(path), *Path(path).parents)) else "daily"


def nearest(path: str) -> list[str]:
    """Return the files and folders of tests that are nearest to a file or folder: of `NEAREST`, or its package's."""
    for place in (Path(path), *Path(path).parents):
        patterns = NEAREST.get(place.as_posix())
        if patterns is not None:
            return sorted({str(found) for pattern in patterns for found in Path().glob(pattern)})
        folder = Path("tests", place.name.removeprefix("_"))
        if place.suffix != ".py" and place.name not in ("src", "") and folder.is_dir():
            return [str(folder)]
    raise SystemExit(f"{path} has no tests that are known to be near: name them by --tests")


def files_of(path: str) -> list[str]:
    """Return the source files of a room: all of a folder, or one."""
    found = [it for it in Path(path).rglob("*.py") if it.name != "__main__.py"] if Path(path).is_dir() else [path]
    return sorted(map(str, found))
