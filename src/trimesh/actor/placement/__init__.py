"""Placements: processes on the GPUs, CPUs and memory of hosts."""
