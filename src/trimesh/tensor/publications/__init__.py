"""Versions of tensors that the ranks of a mesh, or actors, publish: made, read by other layouts, relayed."""
