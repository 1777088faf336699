"""Definitions sent by value (rule V2): selection, ids, and the table of one process.

A class or function that the other process cannot import travels as a *definition*: bytes under an id, sent once per
link ahead of the first payload that names it, and made into an object there when a payload is decoded. Its owner is
the process that first encoded it; wherever it goes, and when it comes home, the id stands for the same object.

    object                                                   is sent as
    class, function, type variable of `__main__`, of a       definition, the same object every time it is named
      module given to `by_value`, or defined in a function
    global that such a function uses                         definition, again when it is bound to another object
    lambda, function defined in a function                   code as a definition; closure and defaults in the payload
    everything importable                                    name

    BV-1 Ids are "<owner>.<number>": counted, never drawn, so a seeded run repeats bit for bit.
    BV-2 An id names one object per process, for as long as the process lives.
    BV-3 A definition is a snapshot of the moment it was first sent: attributes that a class gets later, and names that
         are bound anew in its module, reach other processes only with a new definition (a notebook cell that is run
         again makes one).
    BV-4 The user's `__main__` is never imported. A class or function of it is put on the receiving process's
         `__main__` where its name is free, so that pickles made there find it.
"""

import sys
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from trimesh import limits
from trimesh._wire.memory import Buffer, DefinitionId
from trimesh.errors import LimitExceeded, ProtocolError

MAIN_NAMES = frozenset(("__main__", "__mp_main__"))
"""Names of the module of the user's script; in another process they name another module."""

_modules: set[str] = set()


def by_value(module: ModuleType) -> None:
    """Send the classes and functions of a module, and of its submodules, by value.

    For a module that other processes cannot import, or that is being edited. It affects messages of this process.

    Raises:
        TypeError: `module` is not a module.
    """
    if not isinstance(module, ModuleType):
        raise TypeError(f"by_value needs a module, got {module!r}: import it and pass the module itself")
    _modules.add(module.__name__)


def is_by_value(module: str) -> bool:
    """Return whether the classes and functions of the module of this name go by value."""
    if module in MAIN_NAMES:
        return True
    while _modules:
        if module in _modules:
            return True
        module, dot, _ = module.rpartition(".")
        if not dot:
            break
    return False


def is_importable(thing: Any) -> bool:
    """Return whether module and qualified name resolve to this class or function, so that it may go by name."""
    name = getattr(thing, "__module__", None)
    if not isinstance(name, str) or is_by_value(name):
        return False
    return find(sys.modules.get(name), thing.__qualname__) is thing


def find(module: ModuleType | None, qualname: str) -> Any:
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


# Annotations are not texts here: msgspec would compile each of them in every new process.


class Definition(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One definition in the form of messages.

    Attributes:
        name: Name of its object in error texts.
        is_global: Whether it is the value of a global, not an object with an id of its own.
        definitions: Ids of definitions that it needs.
        body: The pickle that creates it.
    """

    name: str
    is_global: bool
    definitions: list[str]
    body: bytes


class DefinitionBytes(msgspec.Struct, frozen=True):
    """Encoded definition.

    Attributes:
        payload: Argument of `Definitions.define` on the other side.
        definitions: Definitions that the other side also needs, before or after.
        attachments: As `Encoded.attachments`.
    """

    payload: bytes
    definitions: tuple[DefinitionId, ...]
    attachments: tuple[object, ...] = ()


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Definition)
_MISSING = object()


class DefinitionError(TypeError):
    """A definition cannot be encoded.

    Attributes:
        names: The definitions, each of which needs the next one.
        reason: Why the last one cannot be encoded.
    """

    def __init__(self, names: tuple[str, ...], reason: str) -> None:
        self.names = names
        self.reason = reason
        first, *others = names
        needed = f" with {others[-1]}: " if others else ", but "
        super().__init__(f"{first} goes by value{needed}{reason}")

    def needed_by(self, name: str) -> "DefinitionError":
        """Return the error of a definition that needs this one."""
        return DefinitionError((name, *self.names), self.reason)


class Definitions:
    """All definitions that one process knows: its own and those it was sent."""

    def __init__(self, owner: int, main: ModuleType | None = None) -> None:
        """Create the table of a process.

        Args:
            owner: Its `ProcId`.
            main: Module that definitions of the sender's `__main__` are added to; None for none.
        """
        self.owner = owner
        self.pickle: Callable[[Any, object], tuple[bytes, tuple[DefinitionId, ...], tuple[object, ...]]] = _unset
        """Encodes a body; returns also the definitions that it needs, and attachments; set by the encoder."""
        self.unpickle: Callable[[bytes], Any] = _unset
        """Decodes a body; set by the decoder."""
        self._prefix = f"{owner:x}."
        self._count = 0
        self._ids: dict[int, DefinitionId] = {}
        self._objects: dict[DefinitionId, Any] = {}  # keeps them alive, so that no `id()` in _ids is used again
        self._bytes: dict[DefinitionId, DefinitionBytes] = {}
        self._received: dict[DefinitionId, tuple[Definition, object]] = {}  # and the object kept until it is unpickled
        self.modules: dict[DefinitionId, ModuleType] = {}
        """The modules that were created for namespaces received by value."""
        # Value and definition of a name of a module when it was last sent or received.
        self._globals: dict[tuple[DefinitionId, str], tuple[Any, DefinitionId]] = {}
        self._main = main
        self._placed: dict[str, Any] = {}
        self._unbound: list[tuple[DefinitionId, dict[str, Any], str, DefinitionId]] | None = None

    # ---- sending ---------------------------------------------------------------------------------------------

    def id_of(self, thing: object) -> DefinitionId | None:
        return self._ids.get(id(thing))

    def owns(self, definition: DefinitionId) -> bool:
        """Return whether this process was the first to encode it."""
        return definition.startswith(self._prefix)

    def enter(self, thing: object, name: str, body: object, *, is_global: bool = False) -> DefinitionId:
        """Give an object an id and encode its body.

        Args:
            name: For error texts.
            body: Object to pickle; its pickle must rebuild `thing`.
            is_global: True if `thing` stands for the value of a global.

        Raises:
            LimitExceeded: `limits.DEFINITIONS_MAX` objects have an id.
            DefinitionError: The body cannot be pickled; then nothing was entered.
        """
        if self._count >= limits.DEFINITIONS_MAX:
            raise LimitExceeded(
                "DEFINITIONS_MAX",
                self._count + 1,
                f"a process can send {limits.DEFINITIONS_MAX} definitions by value, got one more for {name}; "
                "define classes once, at the top of a module, not anew for each call",
            )
        definition = self._next_id()
        self._count += 1
        # Bodies name each other, so an id is given before the body is pickled. If that fails, all ids given since go
        # too, for their bodies may name the one that failed.
        first = self._count
        self._ids[id(thing)] = definition
        self._objects[definition] = thing
        try:
            data, needed, attachments = self.pickle(body, thing)
            payload = _ENCODER.encode(Definition(name, is_global, list(needed), data))
            self._bytes[definition] = DefinitionBytes(payload, needed, attachments)
        except BaseException as error:
            self._forget([DefinitionId(f"{self._prefix}{number}") for number in range(first, self._count + 1)])
            if isinstance(error, DefinitionError):
                raise error.needed_by(name) from error.__cause__
            if isinstance(error, Exception):
                raise DefinitionError((name,), str(error)) from error.__cause__
            raise
        return definition

    def _forget(self, definitions: list[DefinitionId]) -> None:
        gone = set(definitions)
        for definition in definitions:
            self._ids.pop(id(self._objects.pop(definition, None)), None)
            self._bytes.pop(definition, None)
        for key, (_, found) in list(self._globals.items()):
            if found in gone:
                del self._globals[key]

    def enter_global(self, module: DefinitionId, name: str, value: Any, module_name: str) -> DefinitionId:
        """Return the id of the value that a module's global has now."""
        found = self._globals.get((module, name))
        if found is None or found[0] is not value:
            # Recorded first: the value may be an instance of a class that uses this global.
            found = self._globals[module, name] = value, self._next_id()
            self.enter(_Box(value), f"global {name} of {module_name}", value, is_global=True)
        return found[1]

    def enter_module(self, names: dict[str, Any], name: str, body: Callable[[DefinitionId], object]) -> DefinitionId:
        """Give the namespace of a module an id; `body` is called with it."""
        return self.enter(names, name, body(self._next_id()))

    def _next_id(self) -> DefinitionId:
        return DefinitionId(f"{self._prefix}{self._count + 1}")

    def bytes_of(self, definition: DefinitionId) -> DefinitionBytes:
        """Return the encoded form of a definition that this process encoded or received."""
        return self._bytes[definition]

    # ---- receiving -------------------------------------------------------------------------------------------

    def define(
        self, definition: DefinitionId, payload: Buffer, carried: object = None, attachments: tuple[object, ...] = ()
    ) -> None:
        """Add a definition that a peer has sent; its body is not unpickled before it is needed.

        Args:
            payload: Its bytes.
            carried: Kept until the body was unpickled.
            attachments: Attachments of messages that send it on.

        Raises:
            ProtocolError: The bytes are not a definition, or its id is one of this process, which never made it.
        """
        try:
            record = _DECODER.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a definition cannot be read: {error}") from error
        if definition in self._bytes:
            return  # received before, from another peer
        if self.owns(definition):
            raise ProtocolError(f"only this process may make definitions with its ids, got {definition} from a peer")
        needed = tuple(DefinitionId(name) for name in record.definitions)
        self._received[definition] = record, carried
        self._bytes[definition] = DefinitionBytes(bytes(payload), needed, attachments)

    def load(self, definition: DefinitionId) -> Any:
        """Return the object of a definition, created at the first call.

        Raises:
            LookupError: It was never defined.
            TypeError: It cannot be created here.
        """
        found = self._objects.get(definition, _MISSING)
        if found is _MISSING:
            found = self._make(definition)
        return found.value if isinstance(found, _Box) else found

    def _make(self, definition: DefinitionId) -> Any:
        if definition not in self._received:
            raise LookupError(f"a definition must be sent ahead of the value that needs it, got none for {definition}")
        record, _ = self._received[definition]
        enclosing = self._unbound
        unbound = self._unbound = []
        try:
            thing = self.unpickle(record.body)
            self.made(definition, _Box(thing) if record.is_global else thing)
            # Only now: the value of a global may be an instance of the class that was just created.
            self._unbound = enclosing
            for binding in unbound:
                self._bind(*binding)
        except BaseException as error:
            self._unbound = enclosing
            self._ids.pop(id(self._objects.pop(definition, None)), None)  # its half-made object
            if isinstance(error, Exception):
                raise TypeError(f"{record.name} came by value and cannot be made here: {error}") from error
            raise
        self._received.pop(definition, None)
        return self._objects[definition]

    def peek(self, definition: DefinitionId) -> Any:
        """Return the object of a definition if it exists already, or None."""
        return self._objects.get(definition)

    def made(self, definition: DefinitionId, thing: Any) -> None:
        """Record the object of a definition as soon as it exists, so that bodies that refer to it find it."""
        if definition not in self._objects:
            self._objects[definition] = thing
            self._ids[id(thing)] = definition

    def bind(self, module: DefinitionId, names: dict[str, Any], used: dict[str, DefinitionId]) -> None:
        """Bind the globals that a function uses, once the definition that is being created is complete."""
        for name, definition in used.items():
            if self._unbound is None:
                self._bind(module, names, name, definition)
            else:
                self._unbound.append((module, names, name, definition))

    def _bind(self, module: DefinitionId, names: dict[str, Any], name: str, definition: DefinitionId) -> None:
        """Bind a name in a received module, unless it has this value, or a newer one, already."""
        found = self._globals.get((module, name))
        if self.owns(module) or (found is not None and not _replaces(definition, found[1])):
            return
        value = self.load(definition)
        self._globals[module, name] = value, definition
        names[name] = value

    def module(self, name: str | None) -> ModuleType | None:
        """Return the module of a name; for `__main__` the one that definitions are added to, if there is one."""
        return self._main if self._main is not None and name in MAIN_NAMES else sys.modules.get(str(name))

    def place(self, thing: Any) -> None:
        """Add a class or function of the sender's `__main__` to that of this process, unless the user has its name."""
        name = getattr(thing, "__qualname__", ".")
        if self._main is None or "." in name or "<" in name or thing.__module__ not in MAIN_NAMES:
            return
        names = self._main.__dict__
        if name not in names or (name in self._placed and names[name] is self._placed[name]):
            names[name] = self._placed[name] = thing


class _Box:
    """Wrapper in the table for a value whose identity is not the definition's."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def _replaces(new: DefinitionId, old: DefinitionId) -> bool:
    """Return whether `new` was numbered after `old` by the same process; between processes the first one stays."""
    owner, _, number = new.partition(".")
    old_owner, _, old_number = old.partition(".")
    return owner == old_owner and int(number) > int(old_number)


def _unset(*_: Any) -> Any:
    raise TypeError("these definitions have no encoder and decoder yet; give them to both")


def name_of(thing: Any) -> str:
    """Return the name of a class, function or code in error texts."""
    if isinstance(thing, CodeType):
        return f"function {thing.co_qualname}"
    kind = "class" if isinstance(thing, type) else "function" if isinstance(thing, FunctionType) else "object"
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", repr(thing))
    return f"{kind} {module}.{name}"
