"""`calculator`: arithmetic that a model writes, without running anything: the expression's syntax tree is walked.

Named in a tools' YAML as `function: agents.tools.shipped.calculator.calculator`. Invariant: only numbers and what is
listed here are computed, and no result has more than BITS bits, so any expression costs microseconds.
Raises ValueError, ArithmeticError or OverflowError with words for the model.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

MAX_CHARS = 500
BITS = 4096
"""Most bits of a whole number: 1233 digits."""
MAX_FACTORIAL = 400
DIGITS = 15
"""Digits of a broken number's result, so that 0.1 + 0.2 reads 0.3."""


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly where it is of whole numbers.

    Args:
        expression: for example `(16 - 3 - 4) * 2`; knows + - * / // % **, parentheses, pi, e, and the functions abs, ceil, comb,
            cos, exp, factorial, floor, gcd, log, log10, max, min, round, sin, sqrt, tan.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(
            f"an expression must have at most {MAX_CHARS} characters, got {len(expression)}; do it in steps"
        )
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.{DIGITS}g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return _checked(OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            try:
                return _checked(FUNCTIONS[name](*map(_value, arguments)))
            except TypeError as error:
                raise ValueError(f"{name}: {error}") from None
    raise ValueError(f"{ast.unparse(node)!r:.60} is not known here; known are numbers, {KNOWN}")


def _checked(value: object) -> Number:
    if not isinstance(value, int | float):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise OverflowError(f"numbers must have at most {BITS} bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError("the result is too large")
    return value


def _power(base: Number, exponent: Number) -> object:
    """Refused before it is computed where it has more bits for sure, which leaves at most twice as many."""
    if isinstance(base, int) and isinstance(exponent, int) and (base.bit_length() - 1) * abs(exponent) > BITS:
        raise OverflowError(f"numbers must have at most {BITS} bits, {base!r:.20} ** {exponent!r:.20} has more")
    return base**exponent


def _factorial(number: Number) -> int:
    if not 0 <= number <= MAX_FACTORIAL:
        raise OverflowError(f"factorial takes 0 to {MAX_FACTORIAL}, got {number!r:.20}")
    return math.factorial(_whole(number))


def _comb(total: Number, chosen: Number) -> int:
    if not max(total, chosen) <= BITS:
        raise OverflowError(f"comb takes numbers up to {BITS}")
    return math.comb(_whole(total), _whole(chosen))


def _whole(number: Number) -> int:
    if number != int(number):
        raise ValueError(f"{number!r:.20} must be a whole number")
    return int(number)


def _rounded(number: Number, digits: Number = 0) -> Number:
    return round(number, max(-BITS, min(BITS, _whole(digits)))) if digits else round(number)


CONSTANTS: dict[str, float] = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    **{
        name: getattr(math, name)
        for name in ["ceil", "cos", "exp", "floor", "gcd", "log", "log10", "sin", "sqrt", "tan"]
    },
    **{function.__name__: function for function in (abs, max, min)},
    "comb": _comb,
    "factorial": _factorial,
    "round": _rounded,
}
KNOWN = f"+ - * / // % **, {', '.join([*CONSTANTS, *sorted(FUNCTIONS)])}"
