"""Global tensors on the ranks, as torch's `DTensor`: operators run by the table of rules or on whole tensors."""
