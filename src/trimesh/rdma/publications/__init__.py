"""Versions of a set of tensors that other processes follow, none of them ever torn."""
