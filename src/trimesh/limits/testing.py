"""Bounds of the test kit."""

from __future__ import annotations

from typing import Final

LINEARIZATION_STATES_MAX: Final = 500_000
"""Pairs of operations done and state that one check of a history looks at: some ten seconds, and 100 MB. It grows with
the operations under way at one time and the outcomes that are unknown, not with the length of the history."""

HISTORY_ROWS: Final = 60
"""Events of a history that a report shows, the last ones: what has failed is at the end."""

HISTORY_CELL_CHARS: Final = 32
"""Width of a column of that table; the rest of an argument or a result is cut off."""
