"""The affine maps at the head of an MLIR module, as functions of integers."""

import ast
import re
from collections.abc import Callable, Sequence

AffineMap = Callable[[Sequence[int]], tuple[int, ...]]

_OPERATORS = {"floordiv": "//", "ceildiv": "@", "mod": "%"}


def parse(text: str) -> AffineMap:
    """`(d0)[s0] -> (s0 * 4 + d0, 7)` as a function of the operands `[d0, s0]`.

    Raises:
        ValueError: the text is no such map.
    """
    match = re.fullmatch(r"\s*\(([^)]*)\)\s*(?:\[([^\]]*)\])?\s*->\s*\((.*)\)\s*", text)
    if match is None:
        raise ValueError(f"text must be an affine map, got {text!r}")
    names = [name.strip() for group in match.group(1, 2) if group for name in group.split(",") if name.strip()]
    body = re.sub(r"\b(floordiv|ceildiv|mod)\b", lambda word: _OPERATORS[word.group()], match.group(3))
    tree = ast.parse(f"({body},)", mode="eval").body
    assert isinstance(tree, ast.Tuple)
    results = [_compile(node) for node in tree.elts]

    def evaluate(operands: Sequence[int]) -> tuple[int, ...]:
        values = dict(zip(names, operands, strict=True))
        return tuple(result(values) for result in results)

    return evaluate


def _compile(node: ast.expr) -> Callable[[dict[str, int]], int]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
        return lambda values: value
    if isinstance(node, ast.Name):
        name = node.id
        return lambda values: values[name]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _compile(node.operand)
        return lambda values: -inner(values)
    if isinstance(node, ast.BinOp):
        left, right, kind = _compile(node.left), _compile(node.right), type(node.op)
        if kind is ast.Add:
            return lambda values: left(values) + right(values)
        if kind is ast.Sub:
            return lambda values: left(values) - right(values)
        if kind is ast.Mult:
            return lambda values: left(values) * right(values)
        if kind is ast.FloorDiv:
            return lambda values: left(values) // right(values)
        if kind is ast.MatMult:
            return lambda values: -(-left(values) // right(values))
        if kind is ast.Mod:
            return lambda values: left(values) % right(values)
    raise ValueError(f"affine expression not understood: {ast.unparse(node)}")
