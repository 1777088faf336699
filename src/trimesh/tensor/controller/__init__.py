"""Controller side of tensors: metadata, commands to the ranks, requests and replies."""
