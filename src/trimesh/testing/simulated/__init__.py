"""Simulated runs: virtual time, hosts and wires in one process, and what must hold in each run."""
