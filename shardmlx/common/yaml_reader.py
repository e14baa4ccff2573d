"""Reads the YAML files that users write, and names every mistake with its file and line."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardmlx.errors import FAULTS, UserError, file_access, one_line

_LARGEST = 2**1000
"""Largest whole number: a larger one is no float, and certainly an error."""


class _Loader(yaml.SafeLoader):
    """Safe YAML in which ``1e-5`` is a number and a key given twice is an error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        value = super().construct_object(node, deep)
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise _fault(node, f"{reprlib.repr(node.value)} is too large a number")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        # A tag can make anything a mapping.
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _fault(key, f"key {key.value!r} is given twice")
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-5 for text: its numbers need a dot, and a sign before the exponent.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9_]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def _fault(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return the mapping that a YAML file holds; ``UserError`` names file and line of a mistake."""
    try:
        with file_access("read", path):
            text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 text (byte {error.start})"
        raise UserError(problem, "is it a YAML file?") from None
    try:
        content = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: {error.problem or error.context}", "fix the YAML") from None
    except (yaml.YAMLError, *FAULTS) as error:  # tags, like !!bool maybe, have their own
        raise UserError(f"{path}: {one_line(error)}", "fix the YAML") from None
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise UserError(f"{path} holds {found}", "write one 'key: value' a line")
    return content


def check_keys(mapping: Mapping[Any, Any], known: Iterable[str], where: str, help: str) -> None:
    """Raise ``UserError`` for the first key that is not ``known``: close matches, else ``help``."""
    known = tuple(known)
    for key in mapping:
        if key not in known:
            remedy = did_you_mean(str(key), known) or help
            raise UserError(f"{where}: unknown key {key!r}", remedy)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return ``did you mean a or b?``, with ``prefix`` before each; empty where none is close."""
    known = tuple(known)
    matches = [each for each in known if word and each.startswith(word)][:3]
    matches = matches or difflib.get_close_matches(word, known, n=3, cutoff=0.7)
    return f"did you mean {' or '.join(prefix + match for match in matches)}?" if matches else ""


def is_number(value: object) -> bool:
    """Return whether a value is a number; a truth value, an int to Python, is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
