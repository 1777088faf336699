"""Imports a package as a release of it that calls something otherwise; Python runs this at its start.

TRIMESH_TEST_RENAMED has a table as JSON: the package, a pattern, and what stands in its source instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

PACKAGE, PATTERN, REPLACEMENT = json.loads(os.environ["TRIMESH_TEST_RENAMED"])


class Renaming(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = importlib.util.decode_source(self.get_data(self.path))
        return compile(re.sub(PATTERN, REPLACEMENT, source), self.path, "exec", dont_inherit=True)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{PACKAGE}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Renaming(fullname, spec.loader.path)
        return spec


sys.meta_path.insert(0, Finder())
