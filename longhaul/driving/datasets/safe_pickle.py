"""Pickles that hold plain values and arrays of numbers, read without running anything of them.

A pickle is a program. This reader is Python's own unpickler in pure Python (the one in C allocates whatever a forged
length asks for) without every instruction that makes objects of classes, and the few names that files of scenarios do
need are answered with stand-ins of ours: nothing of the file is ever imported, called or set. Arrays are made from
their bytes, by dtypes of plain numbers and text only. Trees of parameters, as JAX programs pickle them, have names of
their own: `PARAMETERS`. A few references can stand for more values than there is
memory; so keys are plain, and what a file stands for is counted before anybody looks at it.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from longhaul.driving.datasets.log import Malformed

WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of Python and NumPy where a document has another structure than expected."""


class Bag(dict):
    """Stands for defaultdict and OrderedDict; what they are made with is passed over."""

    __slots__ = ()

    def __init__(self, *_: object) -> None:
        super().__init__()


class Blank:
    """Stands for a class that is only named (`ndarray`, the `int` of a defaultdict) or an object of no interest."""

    __slots__ = ()

    def __init__(self, *_: object) -> None:
        pass


class Latin(bytes):
    """Stands for _codecs.encode(text, "latin1") and bytes(), as which the oldest pickles spell bytes."""

    __slots__ = ()

    def __new__(cls, text: object = "", *_: object) -> Latin:
        if not isinstance(text, str):
            raise Malformed("bytes made of something else than text")
        return super().__new__(cls, text.encode("latin1"))


class Dtype:
    """Stands for numpy.dtype: its name and, in the state, its byte order."""

    __slots__ = ("name", "order")

    def __init__(self, name: object = "", *_: object) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1]

    def real(self) -> np.dtype:
        """The dtype, if it is one of plain numbers or text."""
        name = self.name if isinstance(self.name, str) else ""
        if not PLAIN.fullmatch(name):
            raise Malformed("an array of something else than numbers and text")
        return np.dtype(name).newbyteorder(">" if self.order == ">" else "<")


PLAIN = re.compile(r"b1|[iu][1248]|f[248]|[SU][1-9][0-9]{0,3}")
"""The dtypes that an array may have."""


class Array:
    """Stands for an array, or a scalar of NumPy, until `values` makes it."""

    __slots__ = ("parts",)

    def __init__(self, *arguments: Any) -> None:
        self.parts: Any = None  # of _reconstruct(ndarray, (0,), b"b"): a state follows
        if len(arguments) == 2:  # scalar(dtype, bytes)
            self.parts = (1, (), arguments[0], False, arguments[1])
        elif len(arguments) in (4, 5):  # _frombuffer(bytes, dtype, shape, order, axes)
            self.parts = (1, arguments[2], arguments[1], arguments[3] == "F", arguments[0])

    def __setstate__(self, state: Any) -> None:
        self.parts = state

    def __int__(self) -> int:
        return int(self.real().item())

    def __float__(self) -> float:
        return float(self.real().item())

    def real(self) -> np.ndarray:
        """The array; read-only. `Malformed` where its parts do not fit together."""
        try:
            return self._real()
        except (struct.error, *WRONG) as error:
            raise Malformed(f"an array that does not fit together: {str(error)[:100]}") from error

    def plain(self) -> list[Any]:
        """Its values as a list; this way arrays of objects are read too."""
        if self.parts and isinstance(self.parts[-1], list):
            return self.parts[-1]
        return self.real().tolist()

    def _real(self) -> np.ndarray:
        _, shape, dtype, fortran, data = self.parts
        if not isinstance(dtype, Dtype) or not isinstance(data, bytes):
            raise Malformed("an array of something else than numbers")
        array = np.frombuffer(data, dtype.real())
        whole = all(isinstance(size, int) and size >= 0 for size in shape)
        if not whole or math.prod(shape) != len(array):
            raise Malformed(f"an array of {len(array)} numbers has a shape for more, or fewer")
        return array.reshape(shape, order="F" if fortran else "C")


class DeviceArray(Array):
    """Stands for an array of JAX: (a NumPy array's maker, its arguments, its state, what JAX adds)."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        self.parts = arguments[2] if len(arguments) == 4 else None


class Frozen(dict):
    """Stands for Flax's FrozenDict, made of a dict."""

    __slots__ = ()

    def __init__(self, content: object = (), *_: object) -> None:
        super().__init__(content if isinstance(content, dict) else ())


class Record(Blank):
    """Stands for a named tuple, whose content is passed over: the state of an optimiser."""

    __slots__ = ()


BUILTINS = ("builtins", "__builtin__")
"""The module of Python's own names, and how pickles up to protocol 2 call it."""

NAMES: dict[tuple[str, str], type] = {
    **{(module, name): Blank for module in BUILTINS for name in ("int", "long", "float", "list", "dict", "set")},
    **{(module, "bytes"): Latin for module in BUILTINS},
    ("_codecs", "encode"): Latin,
    ("collections", "defaultdict"): Bag,
    ("collections", "OrderedDict"): Bag,
    ("numpy", "ndarray"): Blank,
    ("numpy", "dtype"): Dtype,
    **{(f"numpy.{core}.multiarray", name): Array for core in ("core", "_core") for name in ("_reconstruct", "scalar")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Array for core in ("core", "_core")},
}
"""Every name that a file may use, and what it gets."""

PARAMETERS: dict[tuple[str, str], type] = NAMES | {
    ("jax._src.array", "_reconstruct_array"): DeviceArray,
    ("flax.core.frozen_dict", "FrozenDict"): Frozen,
}
"""The same for trees of parameters. Beside them, every class of optax whose name ends in State is a `Record`."""

MOST_VALUES = 1 << 24
"""Values that a pickle may stand for; a file of real logs has some 100,000."""

MOST_DEPTH = 100
"""Containers within one another; files of real logs have 6 and 7, trees of parameters some more."""

MOST_BYTES = 384 << 20
"""Bytes of memory that a pickle's values may take, estimated by its instructions; other bytes look like them, so that
arrays count about seven times. Files of real logs have some MB."""

MEMORY: dict[int, int] = {
    **dict.fromkeys(b"])}(tld\x85\x86\x87" + pickle.MEMOIZE + pickle.REDUCE + pickle.NEWOBJ, 64),
    **dict.fromkeys(pickle.BINPUT + pickle.LONG_BINPUT + pickle.PUT, 64),
    **dict.fromkeys(pickle.EMPTY_SET + pickle.FROZENSET, 224),
    **dict.fromkeys(pickle.BININT2 + pickle.BINFLOAT + pickle.NONE + pickle.DUP + pickle.BINGET, 32),
}
"""Bytes of memory of what an instruction makes, at most about."""

PLAIN_KEYS = (str, int, float, bytes, type(None), Array)
"""Types that may be a key or an element of a set."""

CONTAINERS = (dict, list, tuple, set, frozenset, Array)

REFUSED = (
    *(pickle.PERSID, pickle.BINPERSID, pickle.INST, pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX),
    *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
"""Instructions that no such file needs. NEWOBJ makes named tuples; `_load_record` stands for it."""


def _load_record(unpickler: Any) -> None:
    """The instruction NEWOBJ, for `Record` alone: the stand-in of a class, and arguments that it passes over."""
    if len(unpickler.stack) < 2 or unpickler.stack[-2] is not Record:
        raise Malformed("an object of a class")
    unpickler.stack[-2:] = [Record()]


def _load_state(unpickler: Any) -> None:
    """The instruction BUILD, for the stand-ins that take a state: of anything else it would set attributes."""
    made, state = unpickler.stack[-2:]
    if not isinstance(made, (Dtype, Array)):
        raise Malformed("attributes for something else than an array")
    made.__setstate__(state)
    unpickler.stack.pop()


def _load_bytes(unpickler: Any) -> None:
    """The instruction BYTEARRAY8, as bytes: it reads what is there and allocates nothing before."""
    (size,) = struct.unpack("<Q", unpickler.read(8))
    data = unpickler.read(min(size, sys.maxsize))
    if len(data) != size:
        raise Malformed(f"{size} bytes are announced and {len(data)} are there")
    unpickler.append(bytes(data))


def _hashing(code: bytes, keys: slice) -> Callable[[Any], None]:
    """The instruction `code`, which hashes `stack[keys]`, for plain ones alone: tuples of one another take for ever."""
    act = pickle._Unpickler.dispatch[code[0]]

    def load(unpickler: Any) -> None:
        if not all(isinstance(key, PLAIN_KEYS) for key in unpickler.stack[keys]):
            raise Malformed("a key that is neither a number nor text")
        act(unpickler)

    return load


class Unpickler(pickle._Unpickler):
    """Python's unpickler, able to make plain values and the stand-ins of `NAMES` alone."""

    dispatch: ClassVar = (
        {code: act for code, act in pickle._Unpickler.dispatch.items() if bytes([code]) not in REFUSED}
        | {pickle.BYTEARRAY8[0]: _load_bytes, pickle.NEWOBJ[0]: _load_record, pickle.BUILD[0]: _load_state}
        | {code[0]: _hashing(code, slice(None, None, 2)) for code in (pickle.SETITEMS, pickle.DICT)}
        | {code[0]: _hashing(code, slice(None)) for code in (pickle.ADDITEMS, pickle.FROZENSET)}
        | {pickle.SETITEM[0]: _hashing(pickle.SETITEM, slice(-2, -1))}
    )

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], type]):
        if (memory := len(data) + sum(size * data.count(code) for code, size in MEMORY.items())) > MOST_BYTES:
            raise Malformed(f"its values take {memory >> 20:,} MB; {MOST_BYTES >> 20} MB are possible")
        super().__init__(io.BytesIO(data))
        self.names = names
        self.room = 4 * len(data) + 1024  # of bytes made of text: once for each text, and some

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """The stand-in for a name; `Malformed` for any that such files do not need."""
        of_params = self.names is PARAMETERS
        if of_params and str(module).split(".")[0] == "optax" and str(name).endswith("State"):
            return Record
        try:
            found = self.names[module, name]
        except (KeyError, TypeError):
            who = "parameters need" if of_params else "scenario needs"
            raise Malformed(f"it asks for {module}.{name}, which no {who} and which is never run") from None
        return self._latin if found is Latin else found

    def _latin(self, text: object = "", *_: object) -> Latin:
        found = Latin(text)
        self.room -= len(found)
        if self.room < 0:
            raise Malformed("the same text is made bytes again and again")
        return found


def weigh(document: Any) -> int:
    """Number of values that `document` stands for, with repetitions.

    `Malformed` where they are more than `MOST_VALUES`, more than `MOST_DEPTH` within one another, or a container holds
    itself.
    """
    weights: dict[int, int] = {}  # of finished containers, by identity: all are alive as long as the document
    open_: set[int] = set()
    left: list[tuple[Any, bool]] = [(document, False)]
    while left:
        value, finished = left.pop()
        inner = _inner(value)
        if id(value) in weights or inner is None:
            continue
        if finished:
            open_.discard(id(value))
            weights[id(value)] = total = 1 + sum(
                weights.get(id(each)) or 1 + (len(each) // 8 if isinstance(each, str | bytes) else 0) for each in inner
            )
            if total > MOST_VALUES:  # at once: doubled further, the number itself would fill the memory
                raise Malformed(f"it stands for more than {MOST_VALUES} values")
            continue
        if id(value) in open_:
            raise Malformed("a value that holds itself")
        open_.add(id(value))
        if len(open_) > MOST_DEPTH:
            raise Malformed(f"it has more than {MOST_DEPTH} lists and dicts within one another")
        left.append((value, True))
        left += [(each, False) for each in inner if isinstance(each, CONTAINERS)]
    return weights.get(id(document), 1)


def _inner(value: Any) -> list[Any] | None:
    """Content of a container; None where `value` is none."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, Array):
        return list(value.parts) if isinstance(value.parts, tuple) else [value.parts]
    return None


def unpickle(data: bytes, names: Mapping[tuple[str, str], type] = NAMES) -> Any:
    """The plain values of a pickle, arrays as `Array`; `Malformed` where it holds anything else."""
    try:
        document = Unpickler(data, names).load()
        weigh(document)
        return document
    except Malformed:
        raise
    except (
        pickle.UnpicklingError,
        EOFError,
        MemoryError,
        ArithmeticError,
        AssertionError,
        struct.error,
        *WRONG,
    ) as error:
        raise Malformed(f"it is no usable pickle: {type(error).__name__}: {str(error)[:200]}") from error
