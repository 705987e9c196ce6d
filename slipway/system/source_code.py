"""Reduces source text to what Python runs, without comments, docstrings and blank lines.

The cuts are made by position, and the rest stays as written: syntax trees and token streams differ
between versions of Python, positions do not. Positions of strings come from `ast`, those of
comments from `tokenize`, which is trusted for their rows and texts only: up to Python 3.12.4 its
columns are wrong after a multi-line string with letters outside ASCII.
"""

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PACKAGES = ("slipway", "transforms")
# What reads the docstrings of the functions and classes that it is given.
_SHOW_DOCSTRINGS = {"bentoml", "click", "fastapi", "typer"}
_READ_DOCSTRINGS = {"__doc__", "getdoc", "model_json_schema"}
PART = "part:"
_HAVE_DEFAULTS = ("Params", "ParamsSection", "NetworkArguments")  # ends of names of base classes
_LOAD = "load_part"
_MODULE = re.compile(rf"((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?::\w+)?")
_STRINGS = (
    ast.JoinedStr,
    getattr(ast, "TemplateStr", ast.JoinedStr),
)  # t-strings: from Python 3.14
_HAVE_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """The code of a Python file without comments and docstrings, and the modules that it names."""

    text: str
    # "a" and "a.b" for `from a import b`, which may be a module or a name in one; "part:clean".
    modules: frozenset[str]


def read_source(source: str, *, defaults: bool = True) -> Source:
    """Reduce a Python file's text to what Python runs, and collect the modules that it names.

    With `defaults` False, the default values of params sections are left out, too. Raises
    SyntaxError or ValueError if this version of Python cannot parse it.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a user's code: Python itself warns when it is imported
        tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    cut = [*_docstrings(nodes), *([] if defaults else _defaults(nodes))]
    return Source(_without(cut, source, tree), frozenset(_modules(nodes)))


def imported_modules(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield each dotted name that the nodes import. `from a import b` yields `a` and `a.b`.

    A relative import keeps its leading dots.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            prefix = f"{module}." if node.module else module
            yield from (prefix + alias.name for alias in node.names)


def _modules(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the modules that a file imports, and Slipway's modules that its strings name.

    Strings name modules for `python -m` and `bentoml serve`. A call such as `load_part("clean")`
    yields "part:clean". A kind's record also names the modules of its parts in strings. These are
    not yielded, because only code that loads a part depends on the part's module.
    """
    yield from imported_modules(nodes)
    declared = set[ast.AST]()
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "parts":
            declared.update(ast.walk(node.value))
        if isinstance(node, ast.Call) and _loads_part(node.func):
            yield PART + ast.literal_eval(node.args[0])
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in declared:
            named = _MODULE.fullmatch(node.value)
            if named:
                yield named[1]


def _loads_part(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr == _LOAD


def _without(cut: list[ast.expr], source: str, tree: ast.Module) -> str:
    """Return the source without comments, and without the expressions `cut`."""
    lines = source.split("\n")
    in_string = set(_rows_that_end_in_a_string(tree))
    for expression in sorted(cut, key=lambda one: one.lineno, reverse=True):
        in_string -= set(range(expression.lineno, expression.end_lineno or 0))
        _cut(lines, expression)
    commented: set[int] = set()
    if "#" in source:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row = token.start[0] - 1
                lines[row] = lines[row].removesuffix(token.string).rstrip()
                in_string.discard(row + 1)
                commented.add(row + 1)
    kept: list[str] = []
    for row, line in enumerate(lines, start=1):
        ends_in_code, begins_in_code = row not in in_string, row - 1 not in in_string
        text = line.rstrip() if ends_in_code else line
        continues = row > 1 and lines[row - 2].endswith("\\")
        if text or not (ends_in_code and (begins_in_code or row in commented)) or continues:
            kept.append(text)
    return "\n".join(kept)


def _cut(lines: list[str], expression: ast.expr) -> None:
    """Remove one expression from `lines`, in place. `ast` counts columns in bytes of UTF-8."""
    first, last = expression.lineno - 1, (expression.end_lineno or 0) - 1
    before = lines[first].encode()[: expression.col_offset].decode()
    after = lines[last].encode()[expression.end_col_offset :].decode()
    lines[first : last + 1] = [""] * (last + 1 - first)
    lines[first] = before
    lines[last] = lines[last] + after


def _rows_that_end_in_a_string(tree: ast.Module) -> Iterator[int]:
    """Yield the lines, counted from 1, that end inside a string or between adjacent strings."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, _STRINGS) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
        ):
            yield from range(node.lineno, node.end_lineno or 0)
        else:  # the positions inside an f-string differ between versions
            waiting.extend(ast.iter_child_nodes(node))


def _docstrings(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the docstrings of a file, except those that the program itself may read or show."""
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    packages = {name.partition(".")[0] for name in imported_modules(nodes)}
    if _READ_DOCSTRINGS & (read | names - {"__doc__"}) or _SHOW_DOCSTRINGS & packages:
        return
    for node in nodes:
        if not isinstance(node, _HAVE_DOCSTRINGS) or not node.body:
            continue
        first, is_read = node.body[0], isinstance(node, ast.Module) and "__doc__" in names
        if isinstance(first, ast.Expr) and _is_text(first.value) and not is_read:
            yield first.value


def _defaults(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the values of attributes in sections of params.yaml and in arguments of networks."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id.endswith(_HAVE_DEFAULTS) for base in node.bases
        ):
            yield from (
                one.value for one in node.body if isinstance(one, ast.AnnAssign) and one.value
            )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
