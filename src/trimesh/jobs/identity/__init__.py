"""Who may be a host of a mesh: an authority of the mesh, credentials of an incarnation, tokens to join by.

Certificates are made by `cryptography` (extra `hosts`), which is imported when the first authority is made. The state
machines read no clock: the caller hands in the time.
"""

from trimesh.jobs.identity.authority import PLAIN, Authority, Credentials, IdentityError, KeyRequest, name_of
from trimesh.jobs.identity.certificates import ForeignAuthority, read_own_pki
from trimesh.jobs.identity.tokens import JoinToken, TokenLedger, proof_of

__all__ = [
    "PLAIN",
    "Authority",
    "Credentials",
    "ForeignAuthority",
    "IdentityError",
    "JoinToken",
    "KeyRequest",
    "TokenLedger",
    "name_of",
    "proof_of",
    "read_own_pki",
]
