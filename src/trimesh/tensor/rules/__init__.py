"""Sharding rules: a table of the torch operators that run on the local parts of global tensors, and its engine.

DTensor serves as the container (local tensor, placements, mesh, redistribution); its own sharding rules are not used.
`table` has the rows, `engine` runs them.
"""
