"""Global tensors on the ranks, as torch's DTensor: by the table of rules, or whole."""
