"""The transport and the mover of simulated processes. Deterministic under a virtual clock."""
