"""How the values of a process travel: by pickle, by annotations, tensors, handles."""
