"""Buffers: memory that other processes read and write, whole, in parts and in batches."""
