"""Publications of sharded tensors: published by ranks or actors, read in any layout, relayed between hosts."""
