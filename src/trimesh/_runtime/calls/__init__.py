"""Calls that this process makes: one to many actors, streams, maps, calls that were given up; which members they reach.

`membership` is here because it asks the owner of a mesh by a call who lives at a rank.
"""
