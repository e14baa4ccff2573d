"""Write the parts of docs/ that the program itself makes, where it now makes others.

    python scripts/docs.py [--check] [PAGE.md ...]

Made are the pages of options, and in the other pages all between ``<!-- made: WHAT -->`` and
``<!-- end -->``. WHAT is ``console``: the outputs of the commands that a block shows after ``$``;
``output``: the output of the command in the block before; or a table: ``fits``, ``lengths``,
``large``, ``blog``, ``shares``, ``examples``, ``types``. Commands run in a directory of small
configurations; nothing is loaded. A test compares the short ones; ``--check`` compares all and
writes nothing.

The testbed keeps tiny configurations of all model types; the code of each, run over stand-ins,
gives its row in the table of types.
"""

from __future__ import annotations

import _root

import io
import json
import re
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path

import _fits
from _options_page import PAGES, page

from shardmlx.errors import UserError
from shardmlx.main import main as shardmlx
from shardmlx.modelfiles.parts import read_shape
from testbed.family_configs import CONFIGS
from testbed.further_configs import FURTHER
from testbed.undeclared_configs import UNDECLARED

DOCS = _root.ROOT / "docs"

PART = re.compile(r"<!-- made: (\w+) -->\n(.*?)<!-- end -->\n", re.DOTALL)
BLOCK = re.compile(r"```[\w ]*\n(.*?)```\n", re.DOTALL)
UNKNOWN = {"phi3small"}
"""Types whose code ends the process on a CPU."""


KINDS = {
    name: config
    for name, config in {**CONFIGS, **UNDECLARED, **FURTHER}.items()
    if name not in UNKNOWN
}


def abilities(name: str) -> str:
    """Return what can be done with a type."""
    try:
        return read_shape(KINDS[name]).abilities
    except UserError:
        return "cannot run; `inspect` says why"


def types(only: str = "") -> str:
    """Return the table as Markdown."""
    rows: dict[str, list[str]] = {}
    for name in KINDS:
        rows.setdefault(abilities(name), []).append(f"`{name}`")
    lines = [
        f"| {what} | {', '.join(sorted(names, key=lambda name: name.strip('`').lower()))} |"
        for what, names in sorted(rows.items(), key=lambda row: -len(row[1]))
    ]
    return "\n".join(["| can | `model_type` |", "|---|---|", *lines, ""])


TABLES = {
    "fits": _fits.common,
    "lengths": _fits.lengths,
    "large": _fits.large,
    "blog": _fits.blog,
    "shares": _fits.shares,
    "examples": _fits.examples,
    "types": types,
}


def made(text: str, tables: bool = True) -> str:
    """Return a page with its made parts anew; without ``tables`` those stay as they are."""
    parts: list[str] = []
    end = 0
    for part in PART.finditer(text):
        what, old = part.group(1), part.group(2)
        if what == "console":
            new = f"```\n{_console(_only_block(old))}```\n"
        elif what == "output":
            before = BLOCK.findall(text[: part.start()])[-1]
            new = f"```\n{_output(before)}```\n"
        else:
            new = TABLES[what]() if tables else old
        parts += [text[end : part.start(2)], new]
        end = part.end(2)
    return "".join([*parts, text[end:]])


def _only_block(text: str) -> str:
    (block,) = BLOCK.findall(text)
    return str(block)


def _console(block: str) -> str:
    """Return the commands of a block, each with its output."""
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)\n", block, re.MULTILINE)
    return "\n".join(f"$ {command}\n{_output(command)}" for command in commands)


def _output(command: str) -> str:
    """Return what a command prints, in a directory that has the configurations of the pages."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] != "shardmlx":
        raise ValueError(f"{command}: only commands of shardmlx can be run")
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as directory, chdir(directory):
        _write_inputs()
        with redirect_stdout(said), redirect_stderr(said):
            shardmlx(words[1:])
    return said.getvalue()


def _write_inputs() -> None:
    """Write what the commands name: models without weights, hostfiles, the demo's options."""
    models = {
        "mistral-7b": _fits.MODELS["Mistral-7B"],
        "mistral-7b-4bit": _fits.MODELS["Mistral-7B"] | _fits.BITS["4 bits"],
        "llama-3.3-70b-4bit": _fits.MODELS["Llama-3.3-70B"] | _fits.BITS["4 bits"],
    }
    for name, config in models.items():
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(config))
    tutorial = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    macs = re.search(r"cat > two-small-macs <<'END'\n(.*?)END\n", tutorial, re.DOTALL)
    if macs is not None:
        Path("two-small-macs").write_text(macs.group(1))
    for name in ("hostfiles", "scripts"):
        Path(name).symlink_to(_root.ROOT / name)


def main(argv: list[str]) -> int:
    """Write the pages, or with --check only name them; return 1 if that found one that differs."""
    names = [word for word in argv if word != "--check"]
    check = len(names) < len(argv)
    status = 0
    pages = [Path(name).resolve() for name in names] or sorted(DOCS.rglob("*.md"))
    for path in pages:
        old = path.read_text(encoding="utf-8")
        new = page(path.name) if path.name in PAGES else made(old)
        if new != old and check:
            print(f"{path.relative_to(DOCS)}: differs from what the program prints")
            status = 1
        elif new != old:
            path.write_text(new, encoding="utf-8")
            print(f"{path.relative_to(DOCS)}: written anew")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
