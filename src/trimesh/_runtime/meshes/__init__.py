"""Meshes as their owner sees them: one block, its members, their restarts and their end."""
