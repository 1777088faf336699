"""Bounds of hosts that join a mesh: certificates and tokens."""

from __future__ import annotations

from typing import Final

AUTHORITY_VALID_SECONDS: Final = 400 * 86_400.0
"""The authority of a mesh lives in the memory of its outermost block: longer than any run, shorter than what clocks and
tools take for endless."""

CERTIFICATE_VALID_SECONDS: Final = 30 * 86_400.0
"""A certificate of one incarnation: a run of weeks. Its key ends with its process, long before that."""

CLOCK_SKEW_SECONDS: Final = 3_600.0
"""Certificates count from so long ago: clocks of hosts without a common one differ by minutes, an hour at worst."""

CERTIFIED_MAX: Final = 65_536
"""Incarnations that one authority certifies, a number of 8 bytes each: 1,000 hosts, each replaced 64 times."""

KEY_REQUEST_BYTES_MAX: Final = 4_096
"""A request for a certificate: 400 bytes with a key on P-256."""

JOIN_TOKEN_SECONDS: Final = 300.0
"""A token is worth something for 5 minutes: a person copies it to another terminal; a job that waits in a queue gets it
when it starts."""

JOIN_TOKENS_MAX: Final = 4_096
"""Tokens of one door that have not been used: one for each host that is about to join, and a mesh has 1,000 of them."""

PKI_FILE_BYTES_MAX: Final = 1 << 20
"""A file of certificates or a key: a few KiB; the store of a whole system is a mistake."""
