"""Puts classes, functions and modules together from what `definition_reduce` made of them; the receiving half.

Bodies name two functions of this module, `rebuild` and `restore`; a decoder binds them to its process's `Rebuilder`,
so that the same bytes make objects in the table of whichever process reads them.
"""

# ruff: noqa: SLF001 - what cloudpickle knows of Python's releases has no public names

from __future__ import annotations

import builtins
import functools
import importlib
import types
import typing
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

from cloudpickle import cloudpickle

from trimesh._wire.memory.reducers import DefinitionId
from trimesh._wire.pickled.by_value import Definitions

_cloud: Any = cloudpickle
_typing: Any = typing


def rebuild(*_: Any) -> Any:
    """Stand for `Rebuilder.rebuild` in pickles."""
    raise TypeError("a definition can be rebuilt only by the decoder of a link")


def restore(*_: Any) -> Any:
    """Stand for `Rebuilder.restore` in pickles."""
    raise TypeError("a definition can be restored only by the decoder of a link")


def make_cell() -> CellType:
    """Return an empty cell."""
    return CellType()


def make_cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    """Return a cached property as it is after its class was made."""
    found = functools.cached_property(function)
    found.attrname = name
    return found


def fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents


def itself(value: Any) -> Any:
    """Return `value`, the object that a forward reference of an annotation was resolved to."""
    return value


def forward_reference(text: str, module: str | None, is_class: bool) -> Any:  # noqa: FBT001 - the order of a pickle
    """Return a forward reference without a namespace."""
    return typing.ForwardRef(text, module=module, is_class=is_class)


EnumMember = tuple[Any, tuple[Any, ...]]
"""A member of an enum: its value, and what the `__new__` in C of its class takes besides the class."""


def data_type_of(cls: type) -> Any:
    """Return what a class derives from that has a `__new__` in C: `object`, if nothing else has."""
    return next(base for base in cls.__mro__ if isinstance(base.__dict__.get("__new__"), BuiltinFunctionType))


def _do_nothing(*_: Any) -> None:
    return


def _pass_on(base: type, cls: type, **options: Any) -> None:
    super(base, cls).__init_subclass__(**options)  # type: ignore[arg-type]  # a class that is only known here


class Rebuilder:
    """Makes the objects of one process's definitions."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions
        self._modules: dict[DefinitionId, ModuleType] = {}
        self._makers: dict[str, Callable[..., Any]] = {
            "reference": definitions.load,
            "class": self._class,
            "typed_dict": self._typed_dict,
            "enum": self._enum,
            "function": self._function,
            "cached": self._cached,
            "variable": self._variable,
            "new_type": self._new_type,
            "names": self._names,
            "module": self._module,
        }

    def bindings(self) -> dict[tuple[str, str], Any]:
        return {(__name__, rebuild.__name__): self.rebuild, (__name__, restore.__name__): self.restore}

    def rebuild(self, kind: str, definition: DefinitionId | None, *args: Any) -> Any:
        """Make the object that `args` describe, without what may refer back to it."""
        if definition is not None and kind != "module":
            found = self._definitions.peek(definition)  # a base's global may name it, and have had it made already
            if found is not None:
                return found
        return self._makers[kind](definition, *args)

    def restore(self, thing: Any, state: tuple[str, Any, Any]) -> None:
        """Give an object the rest."""
        kind, first, second = state
        if kind == "function":
            self._restore_function(thing, first, second)
            return
        _cloud._class_setstate(thing, (first, {}))
        members: dict[str, tuple[dict[str, Any], dict[str, Any]]] = second or {}
        for name, (attributes, slots) in members.items():
            member = thing.__members__[name]
            member.__dict__.update(attributes)
            for slot, value in slots.items():
                object.__setattr__(member, slot, value)

    # ---- classes ---------------------------------------------------------------------------------------------

    def _class(
        self, definition: DefinitionId, metaclass: Any, name: str, bases: tuple[Any, ...], first: dict[str, Any]
    ) -> Any:
        with self._quiet(bases):
            cls = types.new_class(name, bases, {"metaclass": metaclass}, lambda names: names.update(first))
        return self._done(definition, cls)

    @contextmanager
    def _quiet(self, bases: tuple[Any, ...]) -> Generator[None]:
        """Keep `__init_subclass__` of classes that came by value from running.

        It has run where the subclass was defined, with arguments that are not known any more, and what it entered
        in globals came with these; the globals may not be bound yet, for they may hold the very subclass.
        """
        found: list[tuple[type, Any]] = [
            (base, base.__dict__["__init_subclass__"])
            for base in dict.fromkeys(base for first in types.resolve_bases(bases) for base in first.__mro__)
            if "__init_subclass__" in base.__dict__ and self._definitions.id_of(base) is not None
        ]
        try:
            for base, _ in found:
                setattr(base, "__init_subclass__", classmethod(partial(_pass_on, base)))  # noqa: B010
            yield
        finally:
            for base, original in found:
                setattr(base, "__init_subclass__", original)  # noqa: B010

    def _enum(
        self,
        definition: DefinitionId,
        metaclass: Any,
        bases: tuple[type, ...],
        name: str,
        qualname: str,
        members: dict[str, EnumMember],
        module: str,
    ) -> Any:
        """Make an enum by its metaclass, with members as they were: what made these does not run again."""
        recipes = list(members.values())
        native: Any = next((found for base in bases if (found := data_type_of(base)) is not object), object)

        def make(cls: Any, *args: Any) -> Any:
            index: Any = args[0]
            recipe: EnumMember = recipes[index if isinstance(index, int) else index[0]]
            value, given = recipe
            member = native.__new__(cls, *given)
            member._value_ = value
            return member

        with self._quiet(bases):
            names = metaclass.__prepare__(name, bases)
            names["__module__"], names["__qualname__"] = module, qualname
            names["__new__"], names["__init__"] = make, _do_nothing
            for index, member in enumerate(members):
                names[member] = (index,)
            cls = metaclass(name, bases, names)
        for attribute in ("__init__", "__new_member__"):  # its own ones come with the rest
            if attribute in cls.__dict__:
                type.__delattr__(cls, attribute)
        return self._done(definition, cls)

    def _typed_dict(
        self, definition: DefinitionId, name: str, fields: dict[str, Any], attributes: dict[str, Any]
    ) -> Any:
        cls = _typing.TypedDict(name, fields)
        for attribute, value in attributes.items():
            setattr(cls, attribute, value)
        return self._done(definition, cls)

    def _done(self, definition: DefinitionId | None, thing: Any) -> Any:
        if definition is not None:
            self._definitions.made(definition, thing)
            self._definitions.place(thing)
        return thing

    # ---- functions and what is like them -----------------------------------------------------------------------

    def _function(
        self,
        definition: DefinitionId | None,
        code: CodeType,
        names: dict[str, Any],
        name: str,
        cells: tuple[CellType, ...] | None,
    ) -> Any:
        names.setdefault("__builtins__", builtins)
        function = FunctionType(code, names, name, None, cells)
        if definition is not None:
            self._definitions.made(definition, function)
        return function

    def _restore_function(
        self, function: FunctionType, state: dict[str, Any], owner: tuple[DefinitionId | None, DefinitionId | None]
    ) -> None:
        for name, value in state["attributes"].items():
            setattr(function, name, value)
        function.__dict__.update(state["dict"])
        definition, module = owner
        if module is None:
            function.__globals__.update(state["bindings"])
        else:
            self._definitions.bind(module, function.__globals__, state["bindings"])
        if definition is not None:
            self._definitions.place(function)

    def _cached(self, definition: DefinitionId | None, parameters: dict[str, Any], wrapped: Any) -> Any:
        return self._done(definition, functools.lru_cache(**parameters)(wrapped))

    def _variable(self, definition: DefinitionId, kind: str, name: str, args: tuple[Any, ...], options: Any) -> Any:
        return self._done(definition, getattr(typing, kind)(name, *args, **options))

    def _new_type(self, definition: DefinitionId, name: str, base: Any, module: str) -> Any:
        made = _typing.NewType(name, base)
        made.__module__ = module
        return self._done(definition, made)

    # ---- modules -----------------------------------------------------------------------------------------------

    def _names(self, definition: DefinitionId | None, said: dict[str, str]) -> dict[str, Any]:
        """Return the namespace of a module: of an imported one, or of one that is made for a definition."""
        name = said["__name__"]
        if definition is None:
            return importlib.import_module(name).__dict__
        module = self._modules[definition] = ModuleType(name)
        module.__dict__.update(said)
        self._definitions.made(definition, module.__dict__)
        return module.__dict__

    def _module(self, definition: DefinitionId, names: dict[str, Any], used: dict[str, DefinitionId]) -> ModuleType:
        """Return a module that goes by value, all of what travels of it bound."""
        self._definitions.bind(definition, names, used)
        if self._definitions.owns(definition):
            return importlib.import_module(names["__name__"])
        return self._modules[definition]
