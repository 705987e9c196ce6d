"""Syntax trees of sources, parsed once for all rules about our code."""

import ast
from functools import cache

from slipway.system.source_code import imported_modules


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source's syntax tree, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imports(source: str) -> frozenset[str]:
    """The dotted names that a source imports; see `imported_modules`."""
    return frozenset(imported_modules(nodes(source)))
