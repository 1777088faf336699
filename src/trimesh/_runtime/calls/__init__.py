"""Calls that this process makes: one to many actors, streams, maps, calls that were given up."""
