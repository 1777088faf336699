"""Tensor engine of a process and of a mesh: opening, activation, message handling."""
