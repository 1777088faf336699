"""Classes of every kind, as scripts of a user."""

from __future__ import annotations

# Name, the user's script, and an expression about `A` that must say the same on both sides.
SCRIPTS: list[tuple[str, str, str]] = [
    (
        "dataclass",
        """
        import dataclasses
        @dataclasses.dataclass(order=True)
        class A:
            x: int = 1
            y: list = dataclasses.field(default_factory=list)
        """,
        "A(), A(2, [3]), A() == A(), A(1) < A(2)",
    ),
    (
        "frozen_slots_dataclass",
        """
        import dataclasses
        @dataclasses.dataclass(frozen=True, slots=True)
        class A:
            x: int
            y: int = 3
        """,
        "A(1), hash(A(1)), hasattr(A(1), '__dict__'), A.__slots__",
    ),
    (
        "attrs",
        """
        import attrs
        @attrs.define
        class A:
            x: int
            y: int = attrs.field(default=3, validator=attrs.validators.ge(0))
        """,
        "A(1), hasattr(A(1), '__dict__'), A(1) == A(1)",
    ),
    (
        "named_tuple",
        """
        from typing import NamedTuple
        class A(NamedTuple):
            x: int
            y: int = 3
            def s(self): return self.x + self.y
        """,
        "A(1), A(1, 2).s(), A._fields, A(1)._replace(x=2)",
    ),
    (
        "collections_named_tuple",
        """
        from collections import namedtuple
        A = namedtuple('A', 'x y', defaults=[4])
        """,
        "A(1), A(1)._asdict()",
    ),
    (
        "enum",
        """
        import enum
        class A(enum.Enum):
            RED = 1
            CRIMSON = 1
            BLUE = enum.auto()
            def low(self): return self.name.lower()
        """,
        "[m.name for m in A], A.CRIMSON is A.RED, A(2).low(), A['BLUE'].value",
    ),
    (
        "int_flag",
        """
        import enum
        class A(enum.IntFlag):
            R = 1
            W = 2
        """,
        "A.R | A.W, int(A.W), A(3) & A.R",
    ),
    (
        "str_enum",
        """
        import enum
        class A(enum.StrEnum):
            ON = enum.auto()
        """,
        "A.ON, A.ON + '!'",
    ),
    (
        "enum_with_new_and_init",
        """
        import enum
        class A(int, enum.Enum):
            ONE = 1, "one"
            TWO = 2, "two"
            def __new__(cls, value, label):
                made = int.__new__(cls, value * 10)
                made._value_ = value
                made.label = label
                return made
            def __init__(self, value, label):
                self.twice = label * 2
        """,
        "A.ONE, int(A.TWO), A(2).label, A.TWO.twice, list(A)",
    ),
    (
        "enum_of_bytes_with_new",
        """
        import enum
        class A(bytes, enum.Enum):
            def __new__(cls, value, label):
                made = bytes.__new__(cls, [value])
                made._value_ = value
                made.label = label
                return made
            PX = 1, "P.X"
        """,
        "A(1).name, bytes(A.PX), A.PX.label",
    ),
    (
        "enums_of_data_types",
        """
        import datetime, decimal, enum, typing
        class Day(datetime.date, enum.Enum):
            FIRST = 2026, 1, 1
        class Number(int, enum.Enum):
            TWO = "10", 2
        class Price(decimal.Decimal, enum.Enum):
            A = "1.5"
        class Pair(typing.NamedTuple):
            a: int
            b: str = "x"
        class Named(Pair, enum.Enum):
            A = 1, "y"
        class Complex(complex, enum.Enum):
            I = 1j
        class A:
            enums = Day, Number, Price, Named, Complex
        """,
        "[(list(cls), [member.value for member in cls]) for cls in A.enums], A.enums[0].FIRST.year, A.enums[3].A.b",
    ),
    (
        "enums_of_dataclasses",
        """
        import dataclasses, enum
        @dataclasses.dataclass
        class Plain:
            x: int
            y: list
        @dataclasses.dataclass(slots=True)
        class Slotted:
            x: int
        class First(Plain, enum.Enum):
            P = 1, [2]
        class Second(Slotted, enum.Enum):
            P = 3
        class A:
            enums = First, Second
        """,
        "[(cls.P.x, cls.P.name, cls(cls.P.value) is cls.P) for cls in A.enums], A.enums[0].P.y",
    ),
    (
        "enum_with_metaclass",
        """
        import enum
        class Meta(enum.EnumMeta):
            def first(cls): return next(iter(cls))
        class A(enum.Enum, metaclass=Meta):
            X = [1]
            Y = {"a": 1}
            ALSO_X = [1]
        """,
        "A.first(), A([1]), A.ALSO_X, list(A.__members__), type(A).__name__",
    ),
    (
        "flag_with_new",
        """
        import enum
        class A(enum.Flag):
            R = 4, "read"
            W = 2, "write"
            def __new__(cls, value, label):
                made = object.__new__(cls)
                made._value_ = value
                made.label = label
                return made
        """,
        "A.R.label, A.R | A.W, A(6), list(A), ~A.R",
    ),
    (
        "flag_that_keeps",
        """
        import enum
        class A(enum.IntFlag, boundary=enum.KEEP):
            R = 4
            W = 2
            RWX = 7
            @classmethod
            def _missing_(cls, value): return super()._missing_(value)
        """,
        "A.R | A.W, A(64), A.RWX, list(A), A['RWX']",
    ),
    (
        "typed_dict_with_bases",
        """
        import typing
        class Base(typing.TypedDict, total=False):
            a: int
        class A(Base):
            b: str
        """,
        "A(b='x'), A.__required_keys__, A.__optional_keys__, A.__total__",
    ),
    (
        "enum_with_constructor",
        """
        import enum
        class A(enum.Enum):
            E = (1, 2)
            def __init__(self, m, r): self.m, self.r = m, r
            @property
            def g(self): return self.m / self.r
        """,
        "A.E.g, A.E.m, A.E.value",
    ),
    (
        "generic",
        """
        from typing import Generic, TypeVar
        T = TypeVar('T', bound=int)
        class A(Generic[T]):
            def get(self, x: T) -> T: return x
        """,
        "A[int]().get(3), A.__parameters__[0].__bound__, A.__orig_bases__",
    ),
    (
        "generic_over_parameters",
        """
        from typing import Generic, ParamSpec, TypeVarTuple, Unpack
        P = ParamSpec('P')
        Ts = TypeVarTuple('Ts')
        class B(Generic[Unpack[Ts]]): pass
        class A(Generic[P]):
            other = B[int, str]
        """,
        "A[[int]].__args__, A.other.__args__",
    ),
    (
        "abstract",
        """
        import abc
        class B(abc.ABC):
            @abc.abstractmethod
            def f(self): ...
        class A(B):
            def f(self): return super().f() or 7
        B.register(int)
        """,
        "A().f(), isinstance(3, A.__mro__[1]), A.__mro__[1].__abstractmethods__",
    ),
    (
        "super_and_class_cell",
        """
        class B:
            def __init__(self, x): self.x = x
        class A(B):
            def __init__(self, x):
                super().__init__(x + 1)
                self.me = __class__
        """,
        "A(1).x, A(1).me is A",
    ),
    (
        "slots",
        """
        class A:
            __slots__ = ('x', '__y')
            def __init__(self, x): self.x, self.__y = x, 2
            def get(self): return self.__y
        """,
        "A(1).x, A(1).get(), hasattr(A(1), '__dict__')",
    ),
    (
        "properties",
        """
        from functools import cached_property
        class A:
            @property
            def p(self): return 1
            @p.setter
            def p(self, value): self.v = value
            @cached_property
            def c(self): return [2]
            @staticmethod
            def s(): return 3
            @classmethod
            def k(cls): return cls.__name__
        """,
        "A().p, (a := A()).c is a.c, A.s(), A.k(), setattr(a, 'p', 4), a.v",
    ),
    (
        "descriptor",
        """
        class D:
            def __set_name__(self, owner, name): self.name = name
            def __get__(self, obj, cls): return self.name
        class A:
            attribute = D()
        """,
        "A().attribute",
    ),
    (
        "metaclass",
        """
        class M(type):
            def __new__(m, name, bases, names, **options):
                cls = super().__new__(m, name, bases, names)
                cls.made = name
                return cls
            def hello(cls): return cls.made
        class A(metaclass=M, flag=1): pass
        """,
        "A.hello(), type(A).__name__",
    ),
    (
        "nested",
        """
        class A:
            class B:
                class C: x = 5
            def get(self): return self.B.C.x
        """,
        "A().get(), A.B.C.__qualname__, A.B.C is A().B.C",
    ),
    (
        "local",
        """
        def f():
            n = 4
            class A:
                def get(self): return n
            return A
        A = f()
        """,
        "A().get()",
    ),
    (
        "self_registering",
        """
        found = {}
        class B:
            def __init_subclass__(cls, *, name): found[name] = cls
            def names(self): return sorted(found)
        class A(B, name='a'): pass
        """,
        "A().names()",
    ),
    (
        "subclassed_there",
        """
        found = []
        class B:
            def __init_subclass__(cls): found.append(cls.__name__)
        class A(B):
            def make(self):
                class C(A): pass
                return found
        """,
        "A().make()[:2]",
    ),
    (
        "mutual",
        """
        class A:
            def other(self): return B()
        class B:
            def other(self): return A()
        """,
        "type(A().other().other()) is A",
    ),
    (
        "instance_of_itself",
        """
        class A: pass
        A.one = A()
        A.many = [A.one, A]
        """,
        "type(A.one) is A, A.many[0] is A.one, A.many[1] is A",
    ),
    (
        "typed_dict",
        """
        from typing import TypedDict
        class A(TypedDict, total=False):
            x: int
        """,
        "A(x=1), A.__annotations__, A.__total__",
    ),
    (
        "protocol",
        """
        from typing import Protocol, runtime_checkable
        @runtime_checkable
        class A(Protocol):
            def close(self): ...
        """,
        "isinstance(open, A), isinstance(type('X', (), {'close': 1})(), A)",
    ),
    ("new_type", "from typing import NewType\nA = NewType('A', int)", "A(3), A.__name__, A.__supertype__"),
    (
        "subclass_of_dict",
        """
        class A(dict):
            def __missing__(self, key): return key * 2
        """,
        "A()[3]",
    ),
    (
        "subclass_of_int",
        """
        class A(int):
            def __add__(self, other): return A(int(self) + other + 1)
        """,
        "A(1) + 1",
    ),
    (
        "context_manager",
        """
        from contextlib import contextmanager
        class A:
            @contextmanager
            def hold(self): yield 3
            def go(self):
                with self.hold() as x: return x
        """,
        "A().go()",
    ),
    (
        "match_args",
        """
        class A:
            __match_args__ = ('x',)
            x = 1
            def m(self):
                match self:
                    case A(x): return x
        """,
        "A().m()",
    ),
    (
        "annotations",
        """
        class A:
            x: 'Nowhere[int]' = 1
            def f(self, a: 'B') -> 'C': return a
        """,
        "A.__annotations__, A().f(3), A.f.__annotations__",
    ),
    (
        "evaluated_annotations",
        """
        import enum
        from typing import Optional
        class B:
            size: int
        class A(B):
            T = float
            other: B
            itself: Optional['A'] = None
            held: list[T]
            def f(self, b: B, *, c: Optional['Nowhere'] = None) -> list[B]: return [b]
            class E(enum.Enum):
                size: int
                ONE = 1
        """,
        "A.__annotations__, A.__mro__[1].__annotations__, A.f.__annotations__, A.E.__annotations__, A.E.ONE",
    ),
    (
        "annotations_without_any",
        """
        class B:
            size: int
        class A(B):
            def f(self): ...
        """,
        "'__annotations__' in A.__dict__, A.f.__annotations__",
    ),
    (
        "doc_and_module_names",
        """
        'the script'
        class A:
            'says so'
            def name(self): return __name__
        """,
        "A.__doc__, A().name(), A.name.__qualname__",
    ),
    (
        "single_dispatch_free_functions",
        """
        import operator
        class A:
            get = operator.itemgetter(1)
            table = {'plus': operator.add, 'own': lambda a, b: (a, b)}
        """,
        "A.get([1, 2]), A.table['plus'](1, 2), A.table['own'](1, 2)",
    ),
    (
        "exception",
        """
        class B(Exception): pass
        class A(B, KeyError):
            def __init__(self, *, code):
                super().__init__(code)
                self.code = code
        """,
        "A(code=3), A(code=3).code, A.__mro__[1].__name__, issubclass(A, KeyError)",
    ),
]
