"""Syntax trees of sources, parsed once for all rules about our code."""

import ast
from functools import cache


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a source's syntax tree, in the order of `ast.walk`."""
    return tuple(ast.walk(ast.parse(source)))
