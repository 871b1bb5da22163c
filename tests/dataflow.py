"""Which value of a program is made of which: the graph of an HLO module, read from its text.

Reads the text of lowered modules (`hlo_of`) and of compiled ones. Calls and fusions are inlined; a
loop's body is a graph of its own, whose parameters come from nowhere.
"""

from __future__ import annotations

import dataclasses
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLEE = re.compile(r"(?:to_apply|calls)=%?([\w.\-]+)")
_BODIES = re.compile(r"(?:condition|body)=%?([\w.\-]+)")


@dataclasses.dataclass(eq=False)
class Node:
    """One instruction.

    Attributes:
      opcode: of HLO, such as `custom-call`.
      target: of a custom call, else empty.
      operands: the nodes it takes, in order.
      index: of `get-tuple-element` and `parameter`, else None.
    """

    opcode: str
    target: str
    operands: list[Node]
    index: int | None

    def sources(self) -> set[Node]:
        """Everything that this is made of, itself included."""
        seen, todo = set(), [self]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += node.operands
        return seen


@dataclasses.dataclass
class _Line:
    """An instruction as it is written."""

    name: str
    opcode: str
    operands: list[str]
    index: int | None
    rest: str
    is_root: bool


def hlo_of(lowered) -> str:
    """The text of a lowered program before any optimisation."""
    return lowered.compiler_ir(dialect="hlo").as_hlo_text()


def _closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    raise ValueError(f"no bracket closes in {text}")


def _parse_line(line: str) -> _Line | None:
    match = _INSTRUCTION.match(line.strip())
    if not match:
        return None
    text = re.sub(r"/\*.*?\*/", "", match[3])
    # A shape, of one array or a tuple of them, then `opcode(operands), attributes`.
    text = text[_closing(text, 0) + 1 :] if text.startswith("(") else text[text.index(" ") :]
    text = text.strip()
    begin = text.index("(")
    end = _closing(text, begin)
    inner, opcode = text[begin + 1 : end], text[:begin]
    is_number = opcode == "parameter"
    # Older texts name an operand's shape ahead of it.
    operands = re.findall(r"(?:^|, ?)(?:[^,%]* )?%?([\w.\-]+)(?=,|$)", inner)
    index = re.search(r"index=(\d+)", text[end:])
    number = int(inner) if is_number else int(index[1]) if index else None
    leaf = opcode in ("parameter", "constant", "iota")
    return _Line(match[2], opcode, [] if leaf else operands, number, text[end:], bool(match[1]))


def _parse(text: str) -> tuple[dict[str, list[_Line]], str]:
    """Lines of each computation, and the name of the entry."""
    computations, entry, current = {}, "", None
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            current = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (parsed := _parse_line(line)):
            current.append(parsed)
    assert entry, f"no entry computation in {text[:200]}"
    return computations, entry


class Graph:
    """All nodes of a module.

    Attributes:
      nodes: of the entry, what it calls, and loops.
    """

    def __init__(self, text: str):
        self._computations, entry = _parse(text)
        self.nodes: list[Node] = []
        self._add(entry, None)

    def calls(self, target: str) -> list[Node]:
        """Custom calls of a target."""
        return [node for node in self.nodes if node.target == target]

    def _add(self, name: str, arguments: list[Node] | None) -> Node:
        """Adds a computation's nodes and returns its root."""
        found: dict[str, Node] = {}
        root = None
        for line in self._computations[name]:
            operands = [found[each] for each in line.operands if each in found]
            assert len(operands) == len(line.operands), f"{line}: an operand is not known"
            found[line.name] = self._node(line, operands, arguments)
            root = found[line.name] if line.is_root else root
        assert root is not None, f"computation {name} has no root"
        return root

    def _node(self, line: _Line, operands: list[Node], arguments: list[Node] | None) -> Node:
        if line.opcode == "parameter" and arguments is not None:
            return arguments[line.index]
        if line.opcode in ("call", "fusion"):
            return self._add(_CALLEE.search(line.rest)[1], operands)
        if line.opcode == "get-tuple-element" and operands[0].opcode == "tuple":
            return operands[0].operands[line.index]
        if line.opcode == "while":
            for body in _BODIES.findall(line.rest):
                self._add(body, None)
        target = re.search(r'custom_call_target="([^"]*)"', line.rest)
        node = Node(line.opcode, target[1] if target else "", operands, line.index)
        self.nodes.append(node)
        return node
