"""Options of a command: declared once as dataclass fields, given by flag or YAML file.

A command's options are a frozen dataclass whose fields are made by ``option``. Default, help
text and limits of an option stand there and nowhere else: the command line is made from the
fields, and the instance checks itself with ``check_options``.
"""

from __future__ import annotations

import argparse
import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import (
    TYPE_CHECKING,
    Any,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import shardmlx
from shardmlx.common.cli import OneLineParser
from shardmlx.common.yaml_reader import check_keys, did_you_mean, read_yaml
from shardmlx.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)


class OptionError(UserError):
    """An option whose value cannot be used; ``complaint`` reads on from the option's name."""

    def __init__(self, name: str, complaint: str, remedy: str = "") -> None:
        super().__init__(f"{name} {complaint}", remedy)
        self.name = name
        self.complaint = complaint


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The rules of an option, beside its name, type and default."""

    help: str
    group: str | None = None  # heading in --help
    flag: bool = True  # False: in the YAML file only
    short: str | None = None
    minimum: float | None = None
    above: float | None = None
    choices: Sequence[str] | None = None
    parse: Callable[[str], Any] | None = None  # text as written -> value


def option(default: Any, help: str, **rules: Any) -> Any:
    """Make a dataclass field that is an option; ``rules`` are the fields of ``Option``."""
    metadata = {"option": Option(help=help, **rules)}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def check_options(options: DataclassInstance) -> None:
    """Convert and check every field of a frozen dataclass in place: call it when it is built.

    Mappings and lists are copied, so that nobody else holds what the instance holds.
    Raises ``OptionError``.
    """
    hints = get_type_hints(type(options))
    for each in fields(options):
        value = _checked(each, hints[each.name], getattr(options, each.name))
        object.__setattr__(options, each.name, value)


def build_parser(
    cls: type[DataclassInstance], prog: str, description: str, rank: int = 0
) -> argparse.ArgumentParser:
    """Build the command line of an options dataclass. Parsed, it holds only the flags that were
    given.

    It raises ``UserError`` where argparse would print usage and exit; ``--help`` and
    ``--version`` print on rank 0 and exit with status 0 on every rank.
    """
    hints = get_type_hints(cls)
    yaml_only = [each.name for each in fields(cls) if not _rules(each).flag]
    parser = _Parser(
        rank=rank,
        prog=prog,
        description=description,
        epilog=f"In the YAML file only: {', '.join(yaml_only)}." if yaml_only else None,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shardmlx {shardmlx.__version__}")
    flags = [each for each in fields(cls) if _rules(each).flag]
    names_of_groups = dict.fromkeys(_rules(each).group for each in flags)
    groups = {name: parser.add_argument_group(name) for name in names_of_groups}
    for each in flags:
        rules = _rules(each)
        names = [rules.short] if rules.short else []
        names.append(_flag(each.name))
        kinds = _alternatives(hints[each.name])
        how: dict[str, Any] = {"help": _help(each)}
        if bool in kinds:
            how["action"] = argparse.BooleanOptionalAction
        elif rules.parse is None:
            how["type"] = next(kind for kind in (int, float, str) if kind in kinds)
        if rules.choices is not None:
            how["metavar"] = "{" + ",".join(rules.choices) + "}"
        groups[rules.group].add_argument(*names, **how)
    return parser


def load_options(
    cls: type[Options], parser: argparse.ArgumentParser, argv: Sequence[str], rank: int = 0
) -> Options:
    """Build the options: flags beat the YAML file of ``--config``, which beats the defaults.

    A key of the file without a value (``key:`` or ``key: null``) counts as not given. Other ranks
    than 0, whose options rank 0's replace, read no file, and take from the flags only how long they
    wait for rank 0. ``UserError`` names the flag, or the file and its key.
    """
    if rank:
        flags = vars(parser.parse_known_args(argv)[0])
        return cls(**{key: value for key, value in flags.items() if key == "timeout"})
    options, _ = load_given_options(cls, parser, argv)
    return options


def load_given_options(
    cls: type[Options], parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[Options, frozenset[str]]:
    """Build the options as ``load_options``, and name those that flags or file gave."""
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        word = next((word for word in unknown if word.startswith("-")), unknown[0])
        known = [_flag(each.name)[2:] for each in fields(cls) if _rules(each).flag]
        remedy = (
            did_you_mean(word.partition("=")[0].lstrip("-"), known) or f"see {parser.prog} --help"
        )
        raise UserError(f"unknown argument {word!r}", remedy)
    flags = vars(namespace)
    path = flags.get("config")
    written: dict[str, Any] = {}
    if path is not None:
        written = read_yaml(path)
        known = [each.name for each in fields(cls)]
        check_keys(written, known, str(path), f"take it out, or see {parser.prog} --help")
    given = {key: value for key, value in written.items() if value is not None} | flags
    try:
        return cls(**given), frozenset(given)
    except OptionError as error:
        if error.name in flags:
            raise UserError(f"{_flag(error.name)} {error.complaint}", error.remedy) from None
        if error.name in given:
            raise UserError(f"{path}: {error.problem}", error.remedy) from None
        raise


class _Parser(OneLineParser):
    """Names the program whose help to see."""

    def error(self, message: str) -> NoReturn:
        raise UserError(" ".join(message.split()), f"see {self.prog} --help")


def _rules(each: Field[Any]) -> Option:
    rules = each.metadata["option"]
    if not isinstance(rules, Option):
        raise TypeError(f"field {each.name} was not made by option()")
    return rules


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _help(each: Field[Any]) -> str:
    text = _rules(each).help
    if each.default is not MISSING and each.default is not None and each.default is not False:
        text += f" (default: {each.default})"
    return text.replace("%", "%%")


_KINDS: Mapping[type, str] = types.MappingProxyType(
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
    }
)


def _alternatives(hint: Any) -> tuple[type, ...]:
    """Return types of values: ``int | None`` -> (int, NoneType), ``Sequence[str]`` -> (list,)."""
    alternatives = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    origins = (get_origin(each) or each for each in alternatives)
    return tuple({Mapping: dict, Sequence: list}.get(each, each) for each in origins)


def _checked(each: Field[Any], hint: Any, value: Any) -> Any:
    name, rules = each.name, _rules(each)
    if isinstance(value, str) and rules.parse is not None:
        try:
            value = rules.parse(value)
        except ValueError as error:
            raise OptionError(name, f"is {value!r}: {error}") from None
    kinds = _alternatives(hint)
    if value is None and types.NoneType in kinds:
        return None
    # A bool is an int to Python, but 'iters: true' is a mistake.
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    fits = bool in kinds if isinstance(value, bool) else isinstance(value, kinds)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
        raise OptionError(name, f"is {value!r}", f"give {wanted}")
    if isinstance(value, (dict, list)):
        return _plain_copy(name, value)
    if rules.choices is not None and value not in rules.choices:
        raise OptionError(name, f"is {value!r}", f"choose from {', '.join(rules.choices)}")
    if rules.minimum is not None and value < rules.minimum:
        raise OptionError(name, f"is {value}", f"give {rules.minimum} or more")
    if rules.above is not None and value <= rules.above:
        raise OptionError(name, f"is {value}", f"give more than {rules.above}")
    return value


def _plain_copy(name: str, value: Any) -> Any:
    """Copy JSON-able data: what is accepted can be written to adapter_config.json."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(
            name, f"is {value!r}: give plain numbers, text, lists and mappings ({error})"
        ) from None
