"""Issuing of torch operators as commands, and fetching of values to the controller."""
