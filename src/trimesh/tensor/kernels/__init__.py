"""Kernels: trimesh's own operations on the ranks."""
