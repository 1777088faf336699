r"""`trimesh dashboard`: a run as a page of a browser, served by a process of its own.

    control socket --RunSource (threads)--> PageFeed --Board--> one event a second --> browsers
                                                  \-- details, stacks, logs, time lines when they are asked for

DX-1 Whatever is served has passed the guard: a name of this machine, the same origin, a token or a cookie (`site`).
DX-2 What a browser gets is bounded by `limits.PAGE_*`, however large the run is: a mesh is a text of one letter a rank.
DX-3 Every text of the run passes `clean` (`detail`): what would steer a terminal, or turn the direction of reading, is
     an escape, on the page, too. Nothing of it is ever markup: the page makes text nodes only, and a policy forbids it.
DX-4 A run is asked only while a browser looks, one question at a time.
"""

from trimesh.cli.dashboard.site import dashboard

__all__ = ["dashboard"]
