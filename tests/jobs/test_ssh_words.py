"""What ssh has written, and what is made of it: recorded from OpenSSH 9.2, and from servers of others."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from tests.rows import rows

from trimesh.jobs.launcher import NO_PYTHON, agent_command, agent_number
from trimesh.jobs.ssh import start_failure


@rows(
    ("line", "words"),
    [
        ("me@n1: Permission denied (publickey,gssapi-keyex,gssapi-with-mic,password).", "ssh -o BatchMode=yes n1 true"),
        ("Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures", "it refuses this user"),
        ("No ED25519 host key is known for n1 and you have requested strict checking.", "its host key is not known"),
        ("ssh: connect to host n1 port 22: Connection timed out", "it does not answer"),
        ("ssh: connect to host n1 port 22: No route to host", "it does not answer"),
        ("ssh: Could not resolve hostname n1: Name or service not known", "its name cannot be resolved"),
        ("kex_exchange_identification: read: Connection reset by peer", "too many at once"),
        ("channel 0: open failed: administratively prohibited: open failed\nstdio forwarding failed", "jump host"),
        ("~/.ssh/config: line 3: Bad configuration option: foo", "ssh rejects options="),
        ("something that nothing here knows", "ssh could not connect"),
    ],
)
def test_words_of_ssh_have_a_meaning(line: str, words: str) -> None:
    assert words in str(start_failure("n1", 255, ["Warning: a banner", *line.split("\n")], None))


def test_exit_codes_of_the_remote_command_have_one() -> None:
    assert "pass python=" in str(start_failure("n1", NO_PYTHON, [], None))
    assert "must name an interpreter there, got /opt/py" in str(start_failure("n1", 127, [], "/opt/py"))
    assert "install trimesh-actors there" in str(start_failure("n1", 1, ["No module named trimesh"], "/opt/py"))
    assert start_failure("n1", 1, ["Traceback ..."], None) is None


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_command_finds_the_python_that_has_trimesh(shell: str) -> None:
    """The first candidate is no Python, a later one fits, and is asked for an order."""
    command = agent_command(None, "/bin/false", sys.version_info[:2])
    command = command.replace(" python3 ", f" {shlex.quote(sys.executable)} ")
    done = subprocess.run([shell, "-c", command], input=b"", capture_output=True, check=False)
    said, words = done.stderr.decode().splitlines()
    assert agent_number(said) is not None
    assert "must begin with its order, one line" in words


def test_command_says_what_it_has_tried() -> None:
    command = agent_command(None, sys.executable, (3, 99))
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == NO_PYTHON
    assert f"{sys.executable}: it is Python 3." in done.stderr
    assert "python3.99 is not there" in done.stderr


def test_command_is_one_line_without_what_shells_take_apart() -> None:
    """A login shell may be csh or fish."""
    for command in agent_command(None, "/usr/bin/python3", (3, 11)), agent_command("/opt/py", "", (3, 11)):
        assert not set("\n\\!") & set(command)
    assert agent_number("trimesh-agent 12x") is None
