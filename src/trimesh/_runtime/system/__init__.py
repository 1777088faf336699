"""Linux processes of this host: start, signals, output, exits, diagnosis."""

from typing import TYPE_CHECKING, Any

from trimesh._runtime.system.child import checked_output, checked_variables, run_process
from trimesh._runtime.system.cpu_binding import Bind, checked_bind, host_name
from trimesh._runtime.system.exits import parent_of, signal_name, start_of
from trimesh._runtime.system.forks import is_thread_of_parent
from trimesh._runtime.system.linux import MARKER, close_others, set_parent_death_signal, set_process_name
from trimesh._runtime.system.output import LineCutter, Tail
from trimesh._runtime.system.records import HostShare
from trimesh._runtime.system.seeds import SEED_MAX
from trimesh._runtime.system.user_files import credentials_of, entered, read_sources

if TYPE_CHECKING:
    from trimesh._runtime.system.inventory import (
        GPU,
        Inventory,
        gpus_here,
        own_settings,
        simulated_inventory,
        take_inventory,
    )

_OF_INVENTORY = ("GPU", "Inventory", "gpus_here", "own_settings", "simulated_inventory", "take_inventory")

__all__ = [
    "GPU",
    "MARKER",
    "SEED_MAX",
    "Bind",
    "HostShare",
    "Inventory",
    "LineCutter",
    "Tail",
    "checked_bind",
    "checked_output",
    "checked_variables",
    "close_others",
    "credentials_of",
    "entered",
    "gpus_here",
    "host_name",
    "is_thread_of_parent",
    "own_settings",
    "parent_of",
    "read_sources",
    "run_process",
    "set_parent_death_signal",
    "set_process_name",
    "signal_name",
    "simulated_inventory",
    "start_of",
    "take_inventory",
]


def __getattr__(name: str) -> Any:
    """Import the inventory on first use: few processes inspect their host."""
    if name not in _OF_INVENTORY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trimesh._runtime.system import inventory  # noqa: PLC0415

    return getattr(inventory, name)
