"""Bodies of definitions: reducers and makers of classes, functions and modules.

A reducer returns a maker with its arguments, and, as state, the parts that may refer back to the object. On the other
side the maker, defined below its reducer, creates the object, and the state is restored.

Bodies name three functions that are placeholders here, `load`, `rebuild` and `restore_function`: a decoder binds them
to the table of its process, so that the same bytes create objects in the table of whichever process reads them.

cloudpickle reduces many small objects that occur in classes (properties, dataclass fields, weak sets), because it knows
all releases of Python. Its own table of classes is not used: its ids are random, and it sends a whole class with every
message.

A function also refers to its module by a definition: on the other side all functions of one module share one namespace,
which is created for them and is not `__main__`.

Since Python 3.14 annotations are code that runs when they are first read (PEP 649). That code refers to the namespaces
in which it was compiled, so its values are sent, as on earlier versions. A name that is not defined yet, or only for a
type checker, is sent as a `ForwardRef` of its text.
"""

# ruff: noqa: SLF001 - what cloudpickle knows of Python's releases has no public names

from __future__ import annotations

import builtins
import dataclasses
import enum
import functools
import importlib
import sys
import types
import typing
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from cloudpickle import cloudpickle

from trimesh._wire.memory import DefinitionId, ReducerEntry, Sink
from trimesh._wire.pickled.by_value import MAIN_NAMES, Definitions, find, is_by_value, is_importable, name_of

if TYPE_CHECKING:
    from trimesh._wire.pickled.payload import _Pickler

_cloud: Any = cloudpickle
_dataclasses: Any = dataclasses
_typing: Any = typing
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_FILE_OF_CODE = 10  # where `types.CodeType` takes `co_filename`
_NATIVE_TYPES = {value: name for name, value in vars(types).items() if isinstance(value, type)}
_MODULE_NAMES = ("__name__", "__package__", "__file__")
_VARIABLES: tuple[Any, ...] = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple)
_SENTINELS = {id(getattr(dataclasses, name)): name for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")}
_LAZY_ANNOTATIONS = sys.version_info >= (3, 14)
_CLASS_ANNOTATIONS = ("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__")
_names: dict[str, Any] = {}
_CACHED: type = type(functools.lru_cache(print))

# Left to cloudpickle, for exactly these classes.
_SMALL: tuple[Any, ...] = (
    classmethod,
    _dataclasses._FIELD_BASE,
    property,
    staticmethod,
    type(_names.items()),
    type(_names.keys()),
    type(_names.values()),
    types.GetSetDescriptorType,
    types.MappingProxyType,
    weakref.WeakSet,
)


# ---- placeholders: functions that bodies call in the process that decodes them ---------------------------------------


def load(*_: Any) -> Any:
    """Refuse; in pickles a placeholder for `Definitions.load`."""
    raise TypeError("a definition can be loaded only by the decoder of a link, got a call by other code")


def rebuild(*_: Any) -> Any:
    """Refuse; in pickles a placeholder for the call of a maker; see `bindings_of`."""
    raise TypeError("a definition can be rebuilt only by the decoder of a link, got a call by other code")


def restore_function(*_: Any) -> Any:
    """Refuse; in pickles a placeholder for setting the state of a function; see `bindings_of`."""
    raise TypeError("a definition can be restored only by the decoder of a link, got a call by other code")


def bindings_of(definitions: Definitions) -> dict[tuple[str, str], Any]:
    """Return the functions behind the placeholders for the table of one process, by module and name."""

    def rebuild_here(definition: DefinitionId | None, make: Callable[..., Any], *args: Any) -> Any:
        if definition is None:
            return make(definitions, *args)
        found = definitions.peek(definition)  # a global of a base may refer to it, so that it exists already
        if found is not None:
            return found
        thing = make(definitions, *args)
        definitions.made(definition, thing)
        if not isinstance(thing, FunctionType):  # a function has its name only after it was restored
            definitions.place(thing)
        return thing

    bound = (load, definitions.load), (rebuild, rebuild_here), (restore_function, partial(_restored, definitions))
    return {(__name__, function.__name__): here for function, here in bound}


class _Call:
    """Pickles as the result of a call."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args


class DefinitionReducers:
    """The reducers of one process's definitions."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions

    def table(self) -> dict[type, ReducerEntry]:
        table: dict[type, ReducerEntry] = {
            type: ReducerEntry(self.reduce_class, subclasses=True),
            FunctionType: ReducerEntry(self.reduce_function, subclasses=False),
            ModuleType: ReducerEntry(self.reduce_module, subclasses=True),
            CellType: ReducerEntry(reduce_cell, subclasses=False),
            CodeType: ReducerEntry(reduce_code, subclasses=False),
            functools.cached_property: ReducerEntry(reduce_cached_property, subclasses=False),
            _CACHED: ReducerEntry(self.reduce_cached, subclasses=False),
            typing.NewType: ReducerEntry(self.reduce_new_type, subclasses=False),
            _Call: ReducerEntry(reduce_call, subclasses=False),
        }
        table |= dict.fromkeys(_VARIABLES, ReducerEntry(self.reduce_variable, subclasses=False))
        sentinels: list[Any] = [getattr(dataclasses, name) for name in _SENTINELS.values()]
        table |= dict.fromkeys(map(type, sentinels), ReducerEntry(reduce_sentinel, subclasses=False))
        if _LAZY_ANNOTATIONS:
            table[typing.ForwardRef] = ReducerEntry(reduce_forward_reference, subclasses=False)
        known = _cloud.Pickler.dispatch_table
        return table | {cls: ReducerEntry(_without_sink(known[cls]), subclasses=False) for cls in _SMALL}

    def _defined(self, thing: object, sink: _Pickler) -> DefinitionId:
        """Return the id of `thing`, which the message refers to; define it if this is the first time."""
        definition = self._definitions.id_of(thing)
        if definition is None:
            definition = self._definitions.enter(thing, name_of(thing), thing)
        sink.define(definition)
        return definition

    def _made(self, thing: object, sink: _Pickler, make: Callable[..., Any], *args: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the call of a maker that creates `thing`, which the receiver records under its id if it has one."""
        sink.bound = True
        return rebuild, (self._definitions.id_of(thing), make, *args)

    # ---- classes -----------------------------------------------------------------------------------------------------

    def reduce_class(self, cls: type[Any], sink: _Pickler) -> Any:
        """Reduce a class: to its name, to a reference, or, being defined, to its parts."""
        if sink.subject is cls:
            return self._class_parts(cls, sink)
        if is_importable(cls):
            return NotImplemented
        if not cls.__flags__ & _HEAP_TYPE:
            name = _NATIVE_TYPES.get(cls)
            return NotImplemented if name is None else (getattr, (types, name))
        return load, (self._defined(cls, sink),)

    def _class_parts(self, cls: Any, sink: _Pickler) -> Any:
        if typing.is_typeddict(cls):
            attributes = {name: getattr(cls, name) for name in _TYPED_DICT_ATTRIBUTES if hasattr(cls, name)}
            return self._made(cls, sink, make_typed_dict, cls.__name__, _annotations_of(cls), attributes)
        if issubclass(cls, enum.Enum):
            state, *args = _enum_parts(cls)
            return *self._made(cls, sink, make_enum, *args), state, None, None, restore_enum
        state = _class_state(cls)
        # Attributes needed when the class is created: slots determine its layout.
        first = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        if "__slots__" in cls.__dict__:
            first["__slots__"] = state.pop("__slots__")
        bases = cls.__dict__.get("__orig_bases__", cls.__bases__)
        if types.resolve_bases(bases) != cls.__bases__:
            bases = cls.__bases__
        made = self._made(cls, sink, make_class, cls.__class__, cls.__name__, tuple(bases), first)
        return *made, state, None, None, restore_class

    # ---- functions ---------------------------------------------------------------------------------------------------

    def reduce_function(self, function: FunctionType, sink: _Pickler) -> Any:
        """Reduce a function: to its name, to a reference if it belongs to a module, else to its parts."""
        if sink.subject is function:
            return self._function_parts(function, sink)
        if is_importable(function):
            return NotImplemented
        if self._definitions.id_of(function) is not None or self._is_top_level(function):
            return load, (self._defined(function, sink),)
        if not sink.is_body:
            owner = self._class_of_method(function)
            if owner is not None:
                return getattr, (owner, function.__name__)
        return self._function_parts(function, sink)

    def _function_parts(self, function: FunctionType, sink: _Pickler) -> Any:
        code = function.__code__
        names = function.__globals__
        used: dict[str, Any] = {n: names[n] for n in _cloud._extract_code_globals(code) if n in names}
        where, module, bound = self._names_of(names, used, sink)
        cells = function.__closure__
        values = [*used.values(), *(cell.cell_contents for cell in cells or () if _is_filled(cell))]
        attributes = {name: getattr(function, name) for name in _FUNCTION_ATTRIBUTES if hasattr(function, name)}
        attributes["__annotations__"] = _annotations_of(function)
        # Imported for their side effect: in a function that uses `a.b.c` only `a` is a global.
        submodules = _submodules_used(code, values)
        state = (attributes, function.__dict__, module, bound, submodules)
        packed = code if sink.is_body else _Call(load, self._defined(code, sink))
        made = self._made(function, sink, make_function, packed, where, function.__name__, cells)
        return *made, state, None, None, restore_function

    def _is_top_level(self, function: Any) -> bool:
        """Return whether a function is a global of its own module under its own name."""
        name = function.__qualname__
        return "." not in name and find(self._definitions.module(function.__module__), name) is function

    def _class_of_method(self, function: FunctionType) -> type[Any] | None:
        """Return the class in whose body a function was defined, if it is still there."""
        owner = find(self._definitions.module(function.__module__), function.__qualname__.rpartition(".")[0])
        return owner if isinstance(owner, type) and owner.__dict__.get(function.__name__) is function else None

    def reduce_cached(self, function: Any, sink: _Pickler) -> Any:
        """Reduce a function under `functools.lru_cache`; its cache arrives empty."""
        if sink.subject is not function:
            if is_importable(function):
                return NotImplemented
            if self._definitions.id_of(function) is not None or self._is_top_level(function):
                return load, (self._defined(function, sink),)
        return self._made(function, sink, make_cached, function.cache_parameters(), function.__wrapped__)

    # ---- modules -----------------------------------------------------------------------------------------------------

    def _names_of(
        self, names: dict[str, Any], used: dict[str, Any], sink: _Pickler
    ) -> tuple[Any, DefinitionId | None, dict[str, Any]]:
        """Return the stand-in for a function's globals, the definition of its module, and the names bound there."""
        definition = self._definitions.id_of(names)
        module = sys.modules.get(str(names.get("__name__")))
        if definition is None and (module is None or module.__dict__ is not names):
            # Created by exec, in a separate namespace: the names used are sent along, shared within this pickle.
            space = sink.anonymous.setdefault(id(names), {n: names[n] for n in _MODULE_NAMES if n in names})
            return space, None, used
        if definition is None:
            name = names["__name__"]
            if not is_by_value(name):
                return _Call(names_of_module, name), None, {}
            said = {name: names[name] for name in _MODULE_NAMES if isinstance(names.get(name), str)}
            definition = self._definitions.enter_module(
                names, f"module {name}", lambda new: _Call(rebuild, new, make_names, new, said)
            )
        sink.define(definition)
        return _Call(load, definition), definition, self._bindings(definition, names, used, sink)

    def _bindings(
        self, module: DefinitionId, names: dict[str, Any], used: dict[str, Any], sink: _Pickler
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in used.items():
            found[name] = self._definitions.enter_global(module, name, value, str(names.get("__name__")))
            sink.define(found[name])
        return found

    def reduce_module(self, module: ModuleType, sink: _Pickler) -> Any:
        """Reduce a module: to its name, or, if sent by value, to all its parts that can be sent."""
        name = module.__name__
        if name not in sys.modules:
            raise TypeError(
                f"a module must be importable to be sent, got {name}, made at run time: send its contents instead"
            )
        if name in MAIN_NAMES or not is_by_value(name):
            return importlib.import_module, (name,)
        names = module.__dict__
        reference, definition, _ = self._names_of(names, {}, sink)
        assert definition is not None
        used = {n: value for n, value in list(names.items()) if not n.startswith("__") and self._travels(value)}
        return rebuild, (None, make_module, definition, reference, self._bindings(definition, names, used, sink))

    def _travels(self, value: Any) -> bool:
        try:
            self._definitions.pickle(value, None)
        except Exception:  # noqa: BLE001 - a lock, an open file: no code requested it by name
            return False
        return True

    # ---- type variables, new types -----------------------------------------------------------------------------------

    def reduce_variable(self, variable: Any, sink: _Pickler) -> Any:
        if sink.subject is not variable:
            module = variable.__module__
            if not is_by_value(module) and find(sys.modules.get(module), variable.__name__) is variable:
                return NotImplemented
            return load, (self._defined(variable, sink),)
        options: dict[str, Any] = {}
        if hasattr(variable, "__bound__"):  # which a TypeVarTuple has since Python 3.15
            options = {"bound": variable.__bound__}
            if getattr(variable, "__infer_variance__", False):
                options["infer_variance"] = True
            else:
                options |= {"covariant": variable.__covariant__, "contravariant": variable.__contravariant__}
        if getattr(variable, "has_default", bool)():  # since Python 3.13
            options["default"] = variable.__default__
        constraints = getattr(variable, "__constraints__", ())
        kind = type(variable).__name__
        return self._made(variable, sink, make_variable, kind, variable.__name__, constraints, options)

    def reduce_new_type(self, new_type: Any, sink: _Pickler) -> Any:
        if sink.subject is not new_type:
            return NotImplemented if is_importable(new_type) else (load, (self._defined(new_type, sink),))
        return self._made(new_type, sink, make_new_type, new_type.__name__, new_type.__supertype__, new_type.__module__)


def reduce_call(call: _Call, sink: _Pickler) -> Any:
    sink.bound = True
    return call.function, call.args


def _without_sink(reducer: Callable[[Any], Any]) -> Callable[[Any, Sink], Any]:
    def reduce(thing: Any, _: Sink) -> Any:
        return reducer(thing)

    return reduce


# ---- classes ---------------------------------------------------------------------------------------------------------


def _annotations_of(thing: type[Any] | FunctionType) -> dict[str, Any]:
    """Return the annotations of a class, without those of its bases, or of a function."""
    if sys.version_info >= (3, 14):
        import annotationlib  # noqa: PLC0415 - the module came with 3.14

        # FORWARDREF gives what VALUE does where every name is defined.
        return annotationlib.get_annotations(thing, format=annotationlib.Format.FORWARDREF)
    return thing.__annotations__


def _class_state(cls: Any, getstate: Callable[[Any], Any] = _cloud._class_getstate) -> dict[str, Any]:
    """Return the attributes of a class that can be sent, with its annotations as values."""
    state: dict[str, Any] = getstate(cls)[0]
    if _LAZY_ANNOTATIONS:
        for name in _CLASS_ANNOTATIONS:
            state.pop(name, None)
        annotations = _annotations_of(cls)
        if annotations:
            state["__annotations__"] = annotations
    return state


def make_class(
    definitions: Definitions, metaclass: Any, name: str, bases: tuple[Any, ...], first: dict[str, Any]
) -> Any:
    with _quiet(definitions, bases):
        return types.new_class(name, bases, {"metaclass": metaclass}, lambda names: names.update(first))


def restore_class(cls: type, state: dict[str, Any]) -> None:
    _cloud._class_setstate(cls, (state, {}))


@contextmanager
def _quiet(definitions: Definitions, bases: tuple[Any, ...]) -> Generator[None]:
    """Keep `__init_subclass__` of classes received by value from running.

    It has run where the subclass was defined, with arguments that are no longer known, and its changes to globals are
    sent with those. The globals may not be bound yet, because they may hold the subclass itself.
    """
    found: list[tuple[type, Any]] = [
        (base, base.__dict__["__init_subclass__"])
        for base in dict.fromkeys(base for first in types.resolve_bases(bases) for base in first.__mro__)
        if "__init_subclass__" in base.__dict__ and definitions.id_of(base) is not None
    ]
    try:
        for base, _ in found:
            setattr(base, "__init_subclass__", classmethod(partial(_pass_on, base)))  # noqa: B010
        yield
    finally:
        for base, original in found:
            setattr(base, "__init_subclass__", original)  # noqa: B010


def _pass_on(base: type, cls: type, **options: Any) -> None:
    super(base, cls).__init_subclass__(**options)  # type: ignore[arg-type]  # a class that is only known here


_TYPED_DICT_ATTRIBUTES = (
    "__module__",
    "__qualname__",
    "__doc__",
    "__total__",
    "__required_keys__",
    "__optional_keys__",
    "__readonly_keys__",
    "__mutable_keys__",
    "__orig_bases__",
)


def make_typed_dict(_: Definitions, name: str, fields: dict[str, Any], attributes: dict[str, Any]) -> Any:
    cls = _typing.TypedDict(name, fields)
    for attribute, value in attributes.items():
        setattr(cls, attribute, value)
    return cls


# ---- enums -----------------------------------------------------------------------------------------------------------

_ENUM_MEMBER_NAMES = frozenset(("_value_", "_name_", "__objclass__", "_sort_order_"))

EnumMember = tuple[Any, tuple[Any, ...]]
"""A member of an enum: its value, and the arguments for the `__new__` in C of its class."""


def _enum_parts(cls: Any) -> Any:
    """Return the state of an enum, and the arguments of `make_enum`."""
    state = _class_state(cls, _cloud._enum_getstate)
    members: dict[str, EnumMember] = {
        name: (member._value_, _native_args(member, cls._member_type_)) for name, member in cls.__members__.items()
    }
    for name in members:
        state.pop(name, None)  # aliases; cloudpickle has already removed the members
    # Attributes set by a constructor of the members, which does not run again.
    extras: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        name: (
            {key: value for key, value in member.__dict__.items() if key not in _ENUM_MEMBER_NAMES},
            dict(_slots_of(member)),
        )
        for name, member in cls.__members__.items()
    }
    return (state, extras), cls.__class__, cls.__bases__, cls.__name__, cls.__qualname__, members, cls.__module__


def _native_args(member: Any, data_type: Any) -> tuple[Any, ...]:
    """Return the arguments of a member for the `__new__` in C of its data type, by the pickling of that type."""
    native = _data_type_of(data_type)
    if hasattr(native, "__getnewargs__"):  # of a number, a text, bytes, a tuple
        return tuple(native.__getnewargs__(member))
    if native.__reduce__ is object.__reduce__:
        return ()  # its state is in attributes and slots
    return tuple(native.__reduce__(member)[1])  # of a date


def _data_type_of(cls: type) -> Any:
    """Return the first base of a class that has a `__new__` in C; `object` at the latest."""
    return next(base for base in cls.__mro__ if isinstance(base.__dict__.get("__new__"), BuiltinFunctionType))


def _slots_of(member: Any) -> Iterator[tuple[str, Any]]:
    for base in type(member).__mro__:
        slots = vars(base).items() if "__slots__" in vars(base) else ()
        yield from (
            (name, slot.__get__(member))
            for name, slot in slots
            if isinstance(slot, types.MemberDescriptorType) and hasattr(member, name)
        )


def make_enum(
    definitions: Definitions,
    metaclass: Any,
    bases: tuple[type, ...],
    name: str,
    qualname: str,
    members: dict[str, EnumMember],
    module: str,
) -> Any:
    """Create an enum by its metaclass, with the original members, whose constructors do not run again."""
    recipes = list(members.values())
    native: Any = next((found for base in bases if (found := _data_type_of(base)) is not object), object)

    def make(cls: Any, *args: Any) -> Any:
        index: Any = args[0]
        recipe: EnumMember = recipes[index if isinstance(index, int) else index[0]]
        value, given = recipe
        member = native.__new__(cls, *given)
        member._value_ = value
        return member

    with _quiet(definitions, bases):
        names = metaclass.__prepare__(name, bases)
        names["__module__"], names["__qualname__"] = module, qualname
        names["__new__"], names["__init__"] = make, _do_nothing
        for index, member in enumerate(members):
            names[member] = (index,)
        cls = metaclass(name, bases, names)
    for attribute in ("__init__", "__new_member__"):  # the enum's own ones are in its state
        if attribute in cls.__dict__:
            type.__delattr__(cls, attribute)
    return cls


def _do_nothing(*_: Any) -> None:
    return


def restore_enum(cls: Any, state: tuple[dict[str, Any], dict[str, tuple[dict[str, Any], dict[str, Any]]]]) -> None:
    attributes, extras = state
    restore_class(cls, attributes)
    for name, (own, slots) in extras.items():
        member = cls.__members__[name]
        member.__dict__.update(own)
        for slot, value in slots.items():
            object.__setattr__(member, slot, value)


# ---- functions -------------------------------------------------------------------------------------------------------

_FUNCTION_ATTRIBUTES = (
    "__qualname__",
    "__module__",
    "__doc__",
    "__defaults__",
    "__kwdefaults__",
    "__type_params__",
)


def make_function(
    _: Definitions, code: CodeType, names: dict[str, Any], name: str, cells: tuple[CellType, ...] | None
) -> FunctionType:
    names.setdefault("__builtins__", builtins)
    return FunctionType(code, names, name, None, cells)


def _restored(definitions: Definitions, function: FunctionType, state: tuple[Any, ...]) -> None:
    attributes, own, module, bound, _ = state
    for name, value in attributes.items():
        setattr(function, name, value)
    function.__dict__.update(own)
    if module is None:
        function.__globals__.update(bound)
    else:
        definitions.bind(module, function.__globals__, bound)
    if definitions.id_of(function) is not None:
        definitions.place(function)


def make_cached(_: Definitions, parameters: dict[str, Any], wrapped: Any) -> Any:
    return functools.lru_cache(**parameters)(wrapped)


def reduce_code(code: CodeType, _: Sink) -> Any:
    """Reduce code with its file, which cloudpickle omits: tracebacks and stacks of all processes name it."""
    make, parts = _cloud.Pickler.dispatch_table[CodeType](code)
    return make, (*parts[:_FILE_OF_CODE], "".join(code.co_filename), *parts[_FILE_OF_CODE + 1 :])


def _submodules_used(code: CodeType, values: list[Any]) -> list[ModuleType]:
    """Return the loaded submodules of the modules among `values` that some code, or code inside it, may name.

    An expression `a.b.c` puts the names `b` and `c` into the code.
    """
    prefixes = [
        f"{value.__name__}." for value in values if isinstance(value, ModuleType) and hasattr(value, "__path__")
    ]
    if not prefixes:
        return []
    said = _names_said(code)

    def is_said(name: str) -> bool:
        return any(name.startswith(prefix) and said.issuperset(name[len(prefix) :].split(".")) for prefix in prefixes)

    return [module for name, module in list(sys.modules.items()) if isinstance(module, ModuleType) and is_said(name)]


def _names_said(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in some code, and in the lambdas and comprehensions inside it."""
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names_said, inside))


def reduce_cell(cell: CellType, _: Sink) -> Any:
    """Reduce a closure's cell, created empty: its contents may be the function that uses it."""
    if not _is_filled(cell):
        return make_cell, ()
    return make_cell, (), (cell.cell_contents,), None, None, fill_cell


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def make_cell() -> CellType:
    return CellType()


def fill_cell(cell: CellType, contents: tuple[Any]) -> None:
    (cell.cell_contents,) = contents


# ---- modules ---------------------------------------------------------------------------------------------------------


def names_of_module(name: str) -> dict[str, Any]:
    """Return the namespace of a module that is imported by its name."""
    return importlib.import_module(name).__dict__


def make_names(definitions: Definitions, definition: DefinitionId, said: dict[str, str]) -> dict[str, Any]:
    """Return the namespace of a module sent by value, and create the module."""
    module = definitions.modules[definition] = ModuleType(said["__name__"])
    module.__dict__.update(said)
    return module.__dict__


def make_module(
    definitions: Definitions, definition: DefinitionId, names: dict[str, Any], used: dict[str, DefinitionId]
) -> ModuleType:
    """Return a module sent by value, with all names that were sent bound."""
    definitions.bind(definition, names, used)
    if definitions.owns(definition):
        return importlib.import_module(names["__name__"])
    return definitions.modules[definition]


# ---- small parts of classes and annotations --------------------------------------------------------------------------


def make_variable(_: Definitions, kind: str, name: str, constraints: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return getattr(typing, kind)(name, *constraints, **options)


def make_new_type(_: Definitions, name: str, base: Any, module: str) -> Any:
    made = _typing.NewType(name, base)
    made.__module__ = module
    return made


def reduce_cached_property(found: functools.cached_property[Any], _: Sink) -> Any:
    """Reduce a cached property, which has a lock in Python 3.11."""
    return make_cached_property, (found.func, found.attrname)


def make_cached_property(function: Any, name: str | None) -> functools.cached_property[Any]:
    """Return a cached property in its state after the creation of its class."""
    found = functools.cached_property(function)
    found.attrname = name
    return found


def reduce_forward_reference(reference: Any, _: Sink) -> Any:
    """Reduce a forward reference with a namespace, which cannot be sent: to its current value, or to its text.

    Dataclasses and attrs keep such references to names that were not defined when a class was created, as its own.
    """
    if reference.__owner__ is None and reference.__globals__ is None and reference.__cell__ is None:
        return NotImplemented  # created from a string by the program, or by `typing`
    try:
        return itself, (reference.evaluate(),)
    except Exception:  # noqa: BLE001 - an annotation is any expression
        module = reference.__forward_module__
        named = module if isinstance(module, str) else None
        return forward_reference, (reference.__forward_arg__, named, reference.__forward_is_class__)


def itself(value: Any) -> Any:
    """Return `value`, the object that a forward reference of an annotation was resolved to."""
    return value


def forward_reference(text: str, module: str | None, is_class: bool) -> Any:  # noqa: FBT001 - the order of a pickle
    """Return a forward reference without a namespace."""
    return typing.ForwardRef(text, module=module, is_class=is_class)


def reduce_sentinel(sentinel: object, _: Sink) -> Any:
    """Reduce an object of `dataclasses` that is compared by identity to its name there.

    Since Python 3.15 they are of one class, `sentinel`, which programs may use, too.
    """
    return _SENTINELS.get(id(sentinel), NotImplemented)
