"""User-level operations on tensors on a mesh: placement, modules, functions, reductions, profiles, pipelines."""
