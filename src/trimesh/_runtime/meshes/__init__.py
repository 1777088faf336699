"""Meshes as their owner sees them: one block, its members, their restarts and their end."""

from trimesh._runtime.meshes.actor_members import ActorMembers
from trimesh._runtime.meshes.changes import changes_of
from trimesh._runtime.meshes.failure_handling import check_handler
from trimesh._runtime.meshes.member import Member, kill_wanted
from trimesh._runtime.meshes.proc_members import ProcMembers
from trimesh._runtime.meshes.rendezvous import Rendezvous
from trimesh._runtime.meshes.survivors import DEATHS, fold_into_deaths, says_peer_is_gone, text_says_peer_is_gone

__all__ = [
    "DEATHS",
    "ActorMembers",
    "Member",
    "ProcMembers",
    "Rendezvous",
    "changes_of",
    "check_handler",
    "fold_into_deaths",
    "kill_wanted",
    "says_peer_is_gone",
    "text_says_peer_is_gone",
]
