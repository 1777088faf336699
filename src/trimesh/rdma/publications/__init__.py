"""Publications: versions of a set of tensors that other processes follow without torn reads."""
