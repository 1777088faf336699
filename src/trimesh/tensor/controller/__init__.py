"""The controller's side of a mesh with tensors: what is known of them, what is sent, what is answered."""
