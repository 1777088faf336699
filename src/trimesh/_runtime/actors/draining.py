"""The end of service of one actor: all that it has accepted runs to its end, unless it waits behind what was given up.

DR-1 a call that was not cancelled is waited for, however long it takes (rule M3).
DR-2 a call that was cancelled has `grace` seconds from then to unwind. When that is over for all calls that run in a
     group without a free slot, what is queued for it is cancelled; when it is over for all that is left, nothing more
     is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from trimesh._runtime.actors.mailbox import Mailbox
    from trimesh._runtime.peers.incoming import IncomingCall


async def drain(mailbox: Mailbox, grace: float, cancel: Callable[[IncomingCall], None]) -> None:
    """Wait until a mailbox is idle, or has nothing left but what was given up more than `grace` seconds ago.

    Args:
        mailbox: Of an actor that takes no new messages.
        grace: Seconds.
        cancel: Takes a call that is queued behind such ones out of the mailbox.
    """
    while not mailbox.is_idle():
        groups = [group for group in mailbox.groups() if group.running]
        over = {group: _given_up_until(group.running, grace) for group in groups}
        late = [group for group in groups if over[group] <= trio.current_time()]
        for group in late:
            for call in list(group.queue) if group.is_full else ():
                cancel(call)
        if mailbox.is_open and len(late) == len(groups) and not any(mailbox.queued()):
            return
        with trio.CancelScope(
            deadline=min((until for until in over.values() if not _is_over(until)), default=math.inf)
        ):
            await mailbox.wait_changed()


def _is_over(until: float) -> bool:
    return until <= trio.current_time()


def _given_up_until(calls: Iterable[IncomingCall], grace: float) -> float:
    """Return when calls that run have had their grace since they were cancelled; never, if one was not."""
    return max(call.cancelled_at for call in calls) + grace
