"""Methods that other processes call: what travels, read from their signatures. Pure.

Used by `service`, which has the methods, and `client`, which calls them. A remote method's arguments travel as an object of its
parameters' names; both sides read the types from the signature, so that what is not of these types is refused before it runs.

    client:  METHOD arguments (number: of the call; 0: no answer is wanted) | calls [SentCall] | abort (of a call) | ack (a batch)
    service: answer Answer (of the call) | items [Item] (number: of the batch) | beat state

Invariants: an array arrives as it was, bit for bit; an error arrives as the kind that it was, where that is one of `ERRORS`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

import buffers.errors
from buffers.errors import UnderstudyError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
E = TypeVar("E", bound=UnderstudyError)

BEAT_S = 1.0
"""Seconds between two messages that say that a side is there."""
MAX_UNREAD = 32
"""Batches of items that a client has not acknowledged; further ones wait, and go together."""
ACK_EVERY = 8
"""Batches that are acknowledged together."""
SentCall = tuple[int, str, msgspec.Raw]
"""One of several calls that are sent together: its number, its method's name, its arguments."""
NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))
_NOT_SENT = {"self", "db", "call", "sender"}
"""Parameters that the other side does not give."""

ERRORS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(buffers.errors).items()
    if isinstance(kind, type) and issubclass(kind, UnderstudyError)
} | {kind.__name__: kind for kind in (ArithmeticError, LookupError, OverflowError, TypeError, ValueError)}


def known_error(kind: type[E]) -> type[E]:
    """Declare an error that arrives as what it is; it must have defaults for all but its text."""
    ERRORS[kind.__name__] = kind
    return kind


class RemoteError(msgspec.Struct, array_like=True, frozen=True):
    """An error on its way: the name of its kind, its text, and its plain attributes."""

    kind: str
    text: str
    attributes: dict[str, str | int | bool | None] = {}

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in ERRORS), None)
        if kind is None:
            return cls(UnderstudyError.__name__, f"{type(error).__name__}: {error}")
        plain = {name: value for name, value in vars(error).items() if isinstance(value, str | int | bool | None)}
        return cls(kind, str(error), plain)

    def error(self) -> Exception:
        """The error that it was, or one of the nearest kind that is known here."""
        error = ERRORS.get(self.kind, UnderstudyError)(self.text)
        for name in self.attributes.keys() & vars(error).keys():
            setattr(error, name, self.attributes[name])
        return error

    def raised(self) -> UnderstudyError:
        """`error`, which is an UnderstudyError whatever the method raised."""
        error = self.error()
        return error if isinstance(error, UnderstudyError) else UnderstudyError(f"{self.kind}: {self.text}")


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """What a method answered, or raised, and its service's state then."""

    value: msgspec.Raw
    error: RemoteError | None
    state: msgspec.Raw


class Item(msgspec.Struct, array_like=True, frozen=True):
    """One item of a call's stream, or its end by an error."""

    number: int
    value: msgspec.Raw
    error: RemoteError | None
    is_last: bool


@dataclass(frozen=True, slots=True)
class Later(Generic[T]):
    """A method's answer that is made once these futures are done."""

    futures: Sequence[Future[Any]]
    answer: Callable[[], T]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service as others call it. `answer`: of what it answers, or of each item where it is a stream."""

    name: str
    answer: msgspec.msgpack.Decoder[Any]
    is_stream: bool
    takes_sender: bool


def remote(function: F) -> F:
    """Mark a method of a `Service` that other processes may call. With a parameter `call: Call[T]` it is a stream of T; `sender` is
    the connection that asks."""
    function.__dict__["is_remote"] = True
    return function


@cache
def method_of(function: Callable[..., Any]) -> Method:
    """What travels for this method, by its annotations."""
    hints = get_type_hints(function)
    answer = get_args(hints["call"])[0] if "call" in hints else hints["return"]
    if get_origin(answer) is Later:
        answer = get_args(answer)[0]
    return Method(function.__name__, decoder_of(answer), "call" in hints, "sender" in hints)


def arguments_of(function: Callable[..., Any], data: msgspec.Raw | bytes) -> dict[str, Any]:
    """The arguments that were sent for this function. Raises ValueError (msgspec's) where they are not of its types."""
    values = _arguments(function).decode(data)
    return {name: getattr(values, name) for name in values.__struct_fields__}


@cache
def _arguments(function: Callable[..., Any]) -> msgspec.msgpack.Decoder[Any]:
    hints = get_type_hints(function)
    sent = [each for each in inspect.signature(function).parameters.values() if each.name not in _NOT_SENT]
    fields = [
        (each.name, hints[each.name]) if each.default is each.empty else (each.name, hints[each.name], each.default)
        for each in sorted(sent, key=lambda each: each.default is not each.empty)
    ]
    return decoder_of(msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True))


def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Reads what `pack` made of a value of this type."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_array_of)


def pack(value: Any) -> msgspec.Raw:
    """A value on its way; arrays as their bytes, so that one of more than one dimension arrives flat. Raises TypeError, ValueError
    or OverflowError for what cannot travel."""
    return msgspec.Raw(msgspec.msgpack.encode(value, enc_hook=_bytes_of))


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"what is sent must be numbers, text, lists, objects or arrays, got {type(value).__name__}")


def _array_of(kind: Any, data: Any) -> Any:
    return np.frombuffer(data, dtype=get_args(get_args(kind)[1])[0])
