"""Connections between two programs of one user on one host: one publishes handles under a name, others connect."""

from trimesh._runtime.programs.connection import handle_of, handle_record, open_connection
from trimesh._runtime.programs.publication import FILE_NAME, checked_file_name, checked_program_name, open_publication

__all__ = [
    "FILE_NAME",
    "checked_file_name",
    "checked_program_name",
    "handle_of",
    "handle_record",
    "open_connection",
    "open_publication",
]
