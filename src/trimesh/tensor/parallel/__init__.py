"""Which parameters of a module lie where, said by patterns of their names."""
