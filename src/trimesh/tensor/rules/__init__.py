"""Which operators of torch run on the parts of global tensors, and how: a table of ours, and what it cannot be asked.

DTensor is the container (the local tensor, how it lies, the mesh, how it is laid out anew); its own rules of sharding
are not asked. `table` has the rows, `engine` runs them.
"""
