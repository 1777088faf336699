"""Certificates of a site, or none at all, as a job or a door is told of them; `identity` reads them."""

from trimesh.jobs.pki.insecure import UNDERSTOOD, checked_insecure, plain_warning
from trimesh.jobs.pki.own_pki import OwnPKI

__all__ = ["UNDERSTOOD", "OwnPKI", "checked_insecure", "plain_warning"]
