"""Mesh algebra: extents, points, regions and the values that lie over them. Pure: no I/O, no clock, no threads."""
