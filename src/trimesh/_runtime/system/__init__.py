"""Linux processes of this host: start, signals, output, exits, diagnosis."""

from trimesh._runtime.system.child import checked_output, checked_variables, run_process
from trimesh._runtime.system.cpu_binding import Bind, checked_bind, host_name
from trimesh._runtime.system.exits import parent_of, signal_name, start_of
from trimesh._runtime.system.forks import is_thread_of_parent
from trimesh._runtime.system.linux import MARKER, close_others, set_parent_death_signal, set_process_name
from trimesh._runtime.system.output import LineCutter, Tail
from trimesh._runtime.system.seeds import SEED_MAX
from trimesh._runtime.system.user_files import credentials_of, entered, read_sources

__all__ = [
    "MARKER",
    "SEED_MAX",
    "Bind",
    "LineCutter",
    "Tail",
    "checked_bind",
    "checked_output",
    "checked_variables",
    "close_others",
    "credentials_of",
    "entered",
    "host_name",
    "is_thread_of_parent",
    "parent_of",
    "read_sources",
    "run_process",
    "set_parent_death_signal",
    "set_process_name",
    "signal_name",
    "start_of",
]
