"""What users do with tensors on a mesh."""
