"""What ssh says when it cannot do something, in words that say what to do; PURE."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from trimesh.jobs.remote_python import NO_PYTHON

SSH_FAILED: Final = 255
"""Exit code of ssh itself; others are those of the remote command."""

_NOT_FOUND: Final = 127

_MEANINGS: Final = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (
            r"REMOTE HOST IDENTIFICATION HAS CHANGED|Offending .* key",
            "its host key is another one than the one that is known: find out why, then mend the file of known hosts",
        ),
        (
            r"Host key verification failed|host key is known for",
            "its host key is not known: connect once by hand (ssh {host}), or add it to the file of known hosts",
        ),
        (
            r"Permission denied|Too many authentication failures|No supported authentication methods",
            "it does not let this user in, and a job cannot type a password: `ssh -o BatchMode=yes {host} true` has to "
            "work, so load a key into the ssh agent, or name it in ssh's configuration",
        ),
        (r"Could not resolve hostname|Name or service not known", "its name is not known here"),
        (r"Connection refused", "no ssh server listens at its address"),
        (r"timed out|No route to host|Network is unreachable", "it does not answer"),
        (
            r"Bad configuration option|Can't open user config file|unknown option|illegal option|usage: ssh",
            "ssh does not understand options= or its configuration",
        ),
        (
            r"kex_exchange_identification|Connection (closed|reset) by|banner exchange|stdio forwarding failed",
            "its ssh server, or the one of a jump host, has closed the connection (too many at once, or not allowed)",
        ),
    )
)


def start_failure(host: str, code: int, lines: Sequence[str], python: str | None) -> str | None:
    """Return why ssh has not started an agent; None where it says nothing that is known.

    Args:
        host: Its name, as ssh got it.
        code: Exit code of ssh.
        lines: That ssh, and what it ran, have written to standard error.
        python: The interpreter that the job names.
    """
    if code == NO_PYTHON:
        return (
            "no Python with trimesh was found there: install trimesh-actors for the same Python, or say python=, the "
            "path of the interpreter there"
        )
    if code == _NOT_FOUND and python is not None:
        return f"there is no {python}, which python= names"
    if code == 1 and any("No module named" in line and "trimesh" in line for line in lines):
        return f"trimesh is not installed for {python or 'the Python there'}: install trimesh-actors there"
    if code != SSH_FAILED:
        return None
    text = "\n".join(lines)
    for pattern, words in _MEANINGS:
        if pattern.search(text):
            return words.format(host=host)
    return "ssh could not connect, or the connection broke"
