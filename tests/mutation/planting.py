"""Puts the code of a mutant into the functions of a module that has been imported already."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Final

Key = tuple[str, int]
"""A function of a file: its qualified name, and which of those that have it, by line."""


class Functions:
    """The functions of one source file that are there now. Those that they make later have their new code.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self.path: Final = path
        objects = [it for it in gc.get_objects() if type(it) is FunctionType and it.__code__.co_filename == self.path]
        lines = {(it.__code__.co_qualname, it.__code__.co_firstlineno) for it in objects}
        keys = _numbered(lines)
        self._of_key = [(keys[it.__code__.co_qualname, it.__code__.co_firstlineno], it) for it in objects]

    def plant(self, source: str) -> bool:
        """Give all of them the code of another version of the file, which differs within functions only.

        Returns:
            False if one cannot have its code, which uses other variables of the functions around it.
        """
        codes = {(code.co_qualname, code.co_firstlineno): code for code in _codes(compile(source, self.path, "exec"))}
        of_key = {key: codes[place] for place, key in _numbered(set(codes)).items()}
        for key, function in self._of_key:
            code = of_key.get(key)
            if code is not None and code.co_freevars != function.__code__.co_freevars:
                return False
            if code is not None:
                function.__code__ = code
        return True


def _numbered(places: set[tuple[str, int]]) -> dict[tuple[str, int], Key]:
    count: dict[str, int] = {}
    keys: dict[tuple[str, int], Key] = {}
    for name, line in sorted(places):
        keys[name, line] = (name, count.get(name, 0))
        count[name] = count.get(name, 0) + 1
    return keys


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
