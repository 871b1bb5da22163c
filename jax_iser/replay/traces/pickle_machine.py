"""A reader of pickles that hold data, which runs none of them.

A pickle is a program. It is stepped through here by a few opcodes that build containers, numbers
and text. The only names that it may use are those that a subclass lists, and they are tokens here,
never imported. Everything else is refused with the reason.
"""

from __future__ import annotations

import pickletools
from typing import ClassVar, NamedTuple

from jax_iser.replay.traces.errors import TraceError


class Name(NamedTuple):
    """A name that a pickle refers to, as `module name`."""

    text: str


_MARK = object()


class Machine:
    """Steps through a pickle; knows data, refuses code.

    A method `_OPCODE` handles an opcode; a subclass adds those that make its own objects.

    Attributes:
      names: the names that a pickle may use.
      field: what holds the pickle, for messages.
    """

    names: ClassVar[frozenset[str]] = frozenset()
    field: ClassVar[str] = "data.pkl"

    def __init__(self, path, program: bytes):
        self.path, self.program = path, program
        self.stack: list = []
        self.memo: dict = {}

    def run(self):
        """What the pickle holds.

        Raises:
          TraceError: on anything but containers, numbers, text and what the subclass knows.
        """
        try:
            for opcode, argument, _ in pickletools.genops(self.program):
                if opcode.name == "STOP":
                    return self._single()
                handler = getattr(self, f"_{opcode.name.lower()}", None)
                if handler is None:
                    raise self.refusal(f"pickle opcode {opcode.name}")
                handler(argument)
        except TraceError:
            raise
        except Exception as error:  # a pickle can be broken in any way
            raise self.refusal(f"a broken pickle ({type(error).__name__}: {error})") from None
        raise self.refusal("a pickle without an end")

    def refusal(self, found) -> TraceError:
        """The error to raise for what was found."""
        expected = "containers of numbers, text and tensors only"
        return TraceError(self.path, self.field, found, expected)

    def _single(self):
        if len(self.stack) != 1:
            raise self.refusal("a pickle of several values")
        return self.stack[0]

    def _since_mark(self):
        at = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def push(self, value):
        """Puts a value on the stack."""
        self.stack.append(value)

    # Data: the argument is the value.
    def _proto(self, _):
        pass

    _frame = _proto
    _binint = _binint1 = _binint2 = _long1 = _binfloat = push
    _binunicode = _short_binunicode = _binunicode8 = push

    def _none(self, _):
        self.push(None)

    def _newtrue(self, _):
        self.push(True)

    def _newfalse(self, _):
        self.push(False)

    def _mark(self, _):
        self.push(_MARK)

    # Containers.
    def _empty_list(self, _):
        self.push([])

    def _empty_dict(self, _):
        self.push({})

    def _empty_tuple(self, _):
        self.push(())

    def _tuple(self, _):
        self.push(tuple(self._since_mark()))

    def _tuple1(self, _):
        self._tail(1)

    def _tuple2(self, _):
        self._tail(2)

    def _tuple3(self, _):
        self._tail(3)

    def _tail(self, count):
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(values)

    def _append(self, _):
        value = self.stack.pop()
        self._top_list().append(value)

    def _appends(self, _):
        values = self._since_mark()
        self._top_list().extend(values)

    def _top_list(self):
        if type(self.stack[-1]) is not list:
            raise self.refusal("values appended to what is no list")
        return self.stack[-1]

    def _setitem(self, _):
        value, key = self.stack.pop(), self.stack.pop()
        self._top_dict()[key] = value

    def _setitems(self, _):
        values = self._since_mark()
        self._top_dict().update(zip(values[::2], values[1::2], strict=True))

    def _top_dict(self):
        if type(self.stack[-1]) is not dict:
            raise self.refusal("items set on what is no dict")
        return self.stack[-1]

    # Memo.
    def _binput(self, index):
        self.memo[index] = self.stack[-1]

    _long_binput = _binput

    def _memoize(self, _):
        self.memo[len(self.memo)] = self.stack[-1]

    def _binget(self, index):
        self.push(self.memo[index])

    _long_binget = _binget

    # Names are tokens.
    def _global(self, text):
        if text not in self.names:
            raise self.refusal(f"the name {text.replace(' ', '.')}, which is code")
        self.push(Name(text))

    def _stack_global(self, _):
        name, module = self.stack.pop(), self.stack.pop()
        self._global(f"{module} {name}")
