"""Transport and mover of simulated processes. Deterministic under a virtual clock."""
