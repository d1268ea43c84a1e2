"""Every small change of a module's source: a comparison, a sign, a constant, a condition, a statement, a word of a query.

Called by `sampled_run` on the text of a file. Invariant: each mutant is one replaced piece of that text, which still compiles.
What no test could notice is not drawn: annotations, docstrings, error words, log lines, decorators of records, names of
threads and tasks, assertions. It runs nothing.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
OTHER_FUNCTION = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "max",
    "zeros": "ones",
    "ones": "zeros",
}
QUERY = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE)\b")
QUERY_WORDS = [
    (r"(?<=\s)<(?=\s)", "<="),
    (r"(?<=\s)<=(?=\s)", "<"),
    (r"(?<=\s)!=(?=\s)", "="),
    (r"(?<= )=(?= )(?! excluded)", "!="),
    (r"\bmax\(", "min("),
    (r"\bmin\(", "max("),
    (r"\bIS NOT NULL\b", "IS NULL"),
    (r"\bIS NULL\b", "IS NOT NULL"),
    (r" \+ 1\b", " + 2"),
    (r"(?<=[\w\)]) DESC\b", ""),
    (r"\bDISTINCT ", ""),
    (r" AND (?![^']*\bBETWEEN\b)", " OR "),
    (r" LIMIT (\?|\d+)", ""),
    (r"(?<=ORDER BY )(\w+\.)?(\w+)(?! DESC)", r"\g<0> DESC"),
]
"""In SQL: what is found -> what is put there."""
UNDRAWN_KEYWORDS = frozenset({"strict", "name", "daemon", "device", "encoding"})
"""Of calls: to leave them out or change them is not noticed where the program is right."""
NO_ORDER = frozenset(
    {"min", "max", "minimum", "maximum", "array_equal", "equal", "compare_digest", "isinstance", "execute"}
)
"""Functions whose first two arguments may change places, or cannot without an error."""
WORDS_ONLY = re.compile(r"^(logger\.\w+|warnings\.warn|typing\.cast|TypeVar|\w*(Error|Exception))$")
"""Calls whose arguments are for people."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    module: str
    """Path from the root."""
    function: str
    """Qualified name of what it is in, empty at the top of the module."""
    line: int
    kind: str
    before: str
    """The changed lines, as they were, without the space around them."""
    after: str
    source: str
    """The whole changed text."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names it as long as its lines stay."""
        return self.module, self.function, self.before, self.after

    def diff(self, original: str) -> str:
        """A unified diff without context."""
        lines = difflib.unified_diff(
            original.splitlines(), self.source.splitlines(), self.module, f"{self.module} ({self.kind})", "", "", 0, ""
        )
        return "\n".join(lines)


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of this text, in its order, without doubles."""
    found: dict[str, Mutant] = {}
    for change in _Changes(source).all():
        text = change.apply(source)
        if text == source or text in found or not _compiles(text):
            continue
        before, after = _changed_lines(source, text)
        found[text] = Mutant(module, change.function, change.line, change.kind, before, after, text)
    return list(found.values())


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is a text: any other operator than its own is an error at once."""
    return any(
        isinstance(each, ast.JoinedStr) or (isinstance(each, ast.Constant) and isinstance(each.value, str))
        for each in (node.left, node.right)
    )


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _changed_lines(source: str, text: str) -> tuple[str, str]:
    before, after = source.splitlines(), text.splitlines()
    while before and after and before[0] == after[0]:
        del before[0], after[0]
    while before and after and before[-1] == after[-1]:
        del before[-1], after[-1]
    return tuple(" ".join(line.strip() for line in lines).strip() for lines in (before, after))  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _Change:
    start: int
    end: int
    """Characters of the source that are replaced."""
    text: str
    line: int
    kind: str
    function: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


class _Changes:
    """One walk over a module."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._inside: list[str] = []

    def all(self) -> Iterator[_Change]:
        yield from self._block(ast.parse(self._source).body)

    # Places

    def _at(self, line: int, column: int) -> int:
        """`column` is in bytes of UTF-8, as in `ast`."""
        text = self._lines[line - 1].encode()[:column].decode()
        return self._starts[line - 1] + len(text)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self._at(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._at(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def _change(self, node: ast.AST, text: str, kind: str) -> _Change:
        start, end = self._span(node)
        return _Change(start, end, text, node.lineno, kind, ".".join(self._inside))  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    # Statements

    def _block(self, body: list[ast.stmt]) -> Iterator[_Change]:
        for statement in body:
            yield from self._statement(statement)

    def _statement(self, node: ast.stmt) -> Iterator[_Change]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Assert | ast.Global | ast.Nonlocal | ast.Pass):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self._definition(node)
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        yield from self._left_out(node)
        if isinstance(node, ast.If | ast.While):
            yield self._change(node.test, f"not ({self._text(node.test)})", "condition")
        if isinstance(node, ast.AugAssign) and (other := ARITHMETIC.get(type(node.op))):
            changed = ast.AugAssign(node.target, other(), node.value)
            yield self._change(node, ast.unparse(changed), "arithmetic")
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from self._expression(node.value)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child)
            elif isinstance(child, ast.expr):
                yield from self._expression(child)
            else:  # handlers, cases, items of `with`
                for each in ast.iter_child_nodes(child):
                    yield from self._statement(each) if isinstance(each, ast.stmt) else ()
                    yield from self._expression(each) if isinstance(each, ast.expr) else ()

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[_Change]:
        self._inside.append(node.name)
        if isinstance(node, ast.ClassDef):
            if any("Protocol" in ast.unparse(base) for base in node.bases):
                self._inside.pop()
                return
        else:
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    yield from self._expression(default)
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    yield from self._expression(decorator)
        yield from self._block(node.body)
        self._inside.pop()

    def _left_out(self, node: ast.stmt) -> Iterator[_Change]:
        """The statement is not there."""
        if isinstance(node, ast.Expr):
            called = node.value.value if isinstance(node.value, ast.Await) else node.value
            if isinstance(called, ast.Call) and not WORDS_ONLY.match(ast.unparse(called.func)):
                yield self._change(node, "pass", "left out")
        elif isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Break | ast.Continue):
            yield self._change(node, "pass", "left out")
        elif isinstance(node, ast.Assign) and self._inside:
            if any(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
                yield self._change(node, "pass", "left out")
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
            yield self._change(node, "return None", "returned")

    # Expressions

    def _expression(self, node: ast.AST) -> Iterator[_Change]:
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield from self._query(node)
            return
        if isinstance(node, ast.Call) and WORDS_ONLY.match(ast.unparse(node.func)):
            for keyword in node.keywords:
                yield from self._expression(keyword.value)
            return
        yield from self._change_of(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.keyword) and child.arg in UNDRAWN_KEYWORDS:
                continue
            yield from self._expression(child)

    def _change_of(self, node: ast.AST) -> Iterator[_Change]:
        if isinstance(node, ast.Compare):
            for number, operator in enumerate(node.ops):
                ops = [*node.ops[:number], COMPARISONS[type(operator)](), *node.ops[number + 1 :]]
                yield self._put(node, ast.Compare(node.left, ops, node.comparators), "comparison")
        elif isinstance(node, ast.BinOp) and (other := ARITHMETIC.get(type(node.op))) and not _is_text(node):
            yield self._put(node, ast.BinOp(node.left, other(), node.right), "arithmetic")
        elif isinstance(node, ast.BoolOp):
            other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield self._put(node, ast.BoolOp(other_op, node.values), "and, or")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            yield self._put(node, node.operand, "sign")
        elif isinstance(node, ast.IfExp):
            yield self._change(node.test, f"not ({self._text(node.test)})", "condition")
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield self._change(test, f"not ({self._text(test)})", "condition")

    def _put(self, node: ast.AST, changed: ast.expr, kind: str) -> _Change:
        return self._change(node, f"({ast.unparse(changed)})", kind)

    def _constant(self, node: ast.Constant) -> Iterator[_Change]:
        if isinstance(node.value, bool):
            yield self._change(node, str(not node.value), "constant")
        elif isinstance(node.value, int):
            yield self._change(node, str(node.value + 1), "constant")
            yield self._change(node, f"({node.value - 1})", "constant")
        elif isinstance(node.value, float):
            yield self._change(node, repr(node.value + 1.0), "constant")

    def _call(self, node: ast.Call) -> Iterator[_Change]:
        first, second = [*node.args, None, None][:2]
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in NO_ORDER or isinstance(first, ast.Constant | ast.JoinedStr):
            second = None
        if (
            first is not None
            and second is not None
            and not any(isinstance(each, ast.Starred) for each in (first, second))
        ):
            start, end = self._span(first)[0], self._span(second)[1]
            between = self._source[self._span(first)[1] : self._span(second)[0]]
            text = self._text(second) + between + self._text(first)
            yield _Change(start, end, text, node.lineno, "swapped arguments", ".".join(self._inside))
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in UNDRAWN_KEYWORDS:
                rest = [other for other in node.keywords if other is not keyword]
                yield self._change(node, ast.unparse(ast.Call(node.func, node.args, rest)), f"without {keyword.arg}")
        if name in OTHER_FUNCTION:
            start, end = self._span(function)
            text = self._source[start:end].removesuffix(name) + OTHER_FUNCTION[name]
            yield _Change(start, end, text, node.lineno, "other function", ".".join(self._inside))

    def _query(self, node: ast.AST) -> Iterator[_Change]:
        start, end = self._span(node)
        text = self._source[start:end]
        if not QUERY.search(text):
            return
        for pattern, instead in QUERY_WORDS:
            for found in re.finditer(pattern, text):
                changed = found.expand(instead)
                line = node.lineno + text[: found.start()].count("\n")  # type: ignore[attr-defined]
                place = ".".join(self._inside)
                yield _Change(start + found.start(), start + found.end(), changed, line, "query", place)
