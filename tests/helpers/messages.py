"""Every sentence that shardmlx says to a user who gave bad input, read from the sources.

``python -m tests.helpers.messages`` writes them, at a release, into the file that is read through.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from tests.helpers.sources import ROOT, nodes

GOLDEN = ROOT / "tests/unit/house/messages.txt"
ROOTS = {"UserError", "ApiError", "AgreedFailure", "Stopped", "refused", "refuse"}
"""Errors that say something to the user, beside their subclasses."""
TOPS = ("shardmlx", "models", "partitioners")


def sentences() -> str:
    """Return the sentences under the name of their file, in the order of the source.

    A value that is put in stands in braces, as in an f-string. A remedy follows " -> ".
    """
    parts = []
    files = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py"))]
    errors = _errors(files)
    for path in files:
        said = list(_said(path, errors))
        if said:
            parts.append("\n".join([f"# {path.relative_to(ROOT)}", *said, ""]))
    return "\n".join(parts)


def _errors(files: Iterable[Path]) -> set[str]:
    """Return the names of ``ROOTS`` and of all their subclasses."""
    classes = [each for path in files for each in nodes(path) if isinstance(each, ast.ClassDef)]
    found, count = set(ROOTS), 0
    while len(found) > count:
        count = len(found)
        found |= {each.name for each in classes if found & {*map(ast.unparse, each.bases)}}
    return found


def _said(path: Path, errors: Collection[str]) -> Iterator[str]:
    calls = [each for each in nodes(path) if isinstance(each, ast.Call)]
    for call in sorted(calls, key=lambda each: (each.lineno, each.col_offset)):
        if isinstance(call.func, ast.Name) and call.func.id in errors:
            yield " -> ".join(text_of(each) for each in call.args)


def text_of(node: ast.expr) -> str:
    """Return a text as its f-string would be written; any other value in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value).encode("unicode_escape").decode()
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each) for each in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "{" + ast.unparse(node.value if isinstance(node, ast.FormattedValue) else node) + "}"


if __name__ == "__main__":
    GOLDEN.write_text(sentences(), encoding="utf-8")
