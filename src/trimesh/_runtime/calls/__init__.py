"""Outgoing calls: one call to many actors, streams, maps, started calls, and the membership tables of meshes.

`membership` is here because it queries the owner of a mesh by a call.
"""

from trimesh._runtime.calls.call_set import CallSet, RepliedCall, SendCall, SetCall, begin_replied
from trimesh._runtime.calls.invocation import (
    Err,
    Ok,
    Request,
    Result,
    absorb_budget,
    begin,
    broken_value,
    encode_request,
    finish,
    has_deadline,
    invoke,
    is_news,
    post,
    post_nowait,
    remaining_budget,
    result_of,
    results_of,
    value_of,
    yield_to_cancel,
)
from trimesh._runtime.calls.membership import Membership, Standing, family_of, is_reached, membership_of
from trimesh._runtime.calls.outgoing import OutgoingCall, reason_of
from trimesh._runtime.calls.outgoing_stream import OutgoingStream
from trimesh._runtime.calls.started import NurseryOwner, Owner, StartedWork
from trimesh._runtime.tasks.background import BUDGET_REASON

__all__ = [
    "BUDGET_REASON",
    "CallSet",
    "Err",
    "Membership",
    "NurseryOwner",
    "Ok",
    "OutgoingCall",
    "OutgoingStream",
    "Owner",
    "RepliedCall",
    "Request",
    "Result",
    "SendCall",
    "SetCall",
    "Standing",
    "StartedWork",
    "absorb_budget",
    "begin",
    "begin_replied",
    "broken_value",
    "encode_request",
    "family_of",
    "finish",
    "has_deadline",
    "invoke",
    "is_news",
    "is_reached",
    "membership_of",
    "post",
    "post_nowait",
    "reason_of",
    "remaining_budget",
    "result_of",
    "results_of",
    "value_of",
    "yield_to_cancel",
]
