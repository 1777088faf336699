"""Shows methods of `trimesh.blocking` that are derived from those of `trimesh` as methods, with the first paragraph."""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Function, Module, Parameters


class DerivedMethods(Extension):
    """Puts a function in place of an attribute such as `kill = waits(proc_mesh.ProcMesh.kill)`."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Change the classes of a package that was read."""
        if pkg.name != "trimesh":
            return
        for module in pkg["blocking"].modules.values():
            for cls in module.classes.values():
                for name, member in [] if cls.is_alias else list(cls.members.items()):
                    if member.is_alias or not member.is_attribute:
                        continue
                    derived = re.match(r"(?:\w+\()+(\w+)([\w.]*)(?:\[Any\])?(\.\w+)", str(member.value))
                    if derived is not None:
                        path = module.imports[derived[1]] + derived[2] + derived[3]
                        cls[name] = _method(name, pkg[path.removeprefix("trimesh.")])


def _method(name: str, source: Function) -> Function:
    first = (source.docstring.value if source.docstring is not None else "").partition("\n\n")[0]
    text = Docstring(first.replace("async ", "").replace("await ", ""), lineno=1)
    returns = str(source.returns).replace("AbstractAsync", "Abstract")
    return Function(name, parameters=Parameters(*source.parameters), returns=returns, docstring=text)
