"""Meshes at their owner: one block, its members, their restarts and their end."""

from trimesh._runtime.meshes.actor_members import ActorMembers
from trimesh._runtime.meshes.failures import (
    DEATHS,
    check_handler,
    fold_into_deaths,
    says_peer_is_gone,
    text_says_peer_is_gone,
)
from trimesh._runtime.meshes.launching import Rendezvous
from trimesh._runtime.meshes.member import Member, kill_wanted
from trimesh._runtime.meshes.proc_members import ProcMembers

__all__ = [
    "DEATHS",
    "ActorMembers",
    "Member",
    "ProcMembers",
    "Rendezvous",
    "check_handler",
    "fold_into_deaths",
    "kill_wanted",
    "says_peer_is_gone",
    "text_says_peer_is_gone",
]
