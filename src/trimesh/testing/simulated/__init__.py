"""Simulated runs: virtual time, hosts and links in one process, and oracles."""
