"""Options of a command: declared once as dataclass fields, given by flag or YAML file.

A command's options are a frozen dataclass whose fields are made by ``option``. Default, unit, help
text and limits of an option stand there and nowhere else: the command line, its help and
docs/options.md are made from the fields, and the instance checks itself with ``check_options``.
"""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Self, Union, get_args, get_origin, get_type_hints

from shardmlx.common.yaml_reader import is_number
from shardmlx.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

REQUIRED: Any = MISSING
"""The default of an option that must be given."""


class OptionError(UserError):
    """An option whose value cannot be used; ``complaint`` reads on from the option's name."""

    def __init__(self, name: str, complaint: str, remedy: str = "") -> None:
        super().__init__(f"{name} {complaint}", remedy)
        self.name = name
        self.complaint = complaint


def refuse(name: str, complaint: str, remedy: str = "", *, when: object) -> None:
    """Raise ``OptionError`` when so."""
    if when:
        raise OptionError(name, complaint, remedy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The rules of an option, beside its name, type and default.

    ``metavar`` is the unit of the value, or what it names; ``unset`` says what applies, or by what
    rule a value is chosen, where none is given, if the default does not say it. ``also`` are flags
    of the same meaning in other programs. An option that ``excludes`` another takes its place.
    ``parts`` is a dataclass of options that are keys of this mapping, each after a first word.
    """

    help: str
    group: str | None = None  # heading in --help
    metavar: str | None = None
    unset: str | None = None
    flag: bool = True  # False: in the YAML file only
    positional: bool = False
    short: str | None = None
    also: tuple[str, ...] = ()
    excludes: str | None = None
    parts: type[DataclassInstance] | None = None
    takes_value: bool = False  # a switch that may be followed by True or False
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    choices: Sequence[str | int] | None = None
    parse: Callable[[str], Any] | None = None  # text as written -> value
    no: str | None = None  # the word that means False, which YAML takes for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A field of an options dataclass, in the words of a command line: ``kinds`` are the types of
    its values, ``default`` is None where the option must be given."""

    name: str
    rules: Option
    kinds: tuple[type, ...]
    default: str | None

    @property
    def flag(self) -> str:
        """The long flag."""
        return flag_of(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags, the short one first."""
        return (self.rules.short, self.flag) if self.rules.short else (self.flag,)

    @property
    def parts(self) -> tuple[Declared, ...]:
        """The options that are keys of this mapping."""
        return declared(self.rules.parts) if self.rules.parts else ()

    @property
    def key(self) -> str:
        """The key of a part in its mapping: ``rank`` of ``lora_rank``."""
        return self.name.partition("_")[2]

    def rivals(self, parts: Sequence[Declared]) -> list[str]:
        """Return the keys of a part and of those parts that cannot stand beside it."""
        pairs = ((each.name, each.rules.excludes) for each in parts)
        names = {name for pair in pairs if self.name in pair for name in pair}
        return [each.key for each in parts if each.name in names | {self.name}]

    @property
    def metavar(self) -> str:
        """The unit of the value, or what it names; empty for a switch."""
        if self.rules.metavar is not None:
            return self.rules.metavar
        if self.rules.choices is not None:
            return "{" + ",".join(map(str, self.rules.choices)) + "}"
        return "N" if int in self.kinds and bool not in self.kinds else ""

    @property
    def help(self) -> str:
        """The help text with the default."""
        if self.rules.positional:
            return self.rules.help
        default = "must be given" if self.default is None else f"default: {self.default}"
        return f"{self.rules.help} ({default})"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A part of a command's options. Parts have no slots, so that one can be made of several."""

    @classmethod
    def of(cls, options: object) -> Self:
        """Take the part out of ``options``; what these lack has its default."""
        names = (each.name for each in fields(cls))
        return cls(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def option(default: Any, help: str, **rules: Any) -> Any:
    """Make a dataclass field that is an option; ``rules`` are the fields of ``Option``."""
    metadata = {"option": Option(help=help, **rules)}
    if isinstance(default, (Mapping, list)):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def same_as(cls: type[DataclassInstance], name: str) -> Any:
    """Return a field that is an option of another dataclass, too."""
    return copy(next(each for each in fields(cls) if each.name == name))


def in_group(name: str) -> Callable[..., Any]:
    """Return ``option`` for the options of one group of ``--help``."""
    return partial(option, group=name)


@cache
def declared(cls: type[DataclassInstance]) -> tuple[Declared, ...]:
    """Return the options of an options dataclass, in the order of its fields."""
    hints = get_type_hints(cls)
    return tuple(
        Declared(
            name=each.name,
            rules=each.metadata["option"],
            kinds=_alternatives(hints[each.name]),
            default=_default(each),
        )
        for each in fields(cls)
    )


@cache
def written(cls: type[DataclassInstance]) -> tuple[Declared, ...]:
    """Return the options as flags and files give them: the parts of a mapping follow it."""
    return tuple(each for whole in declared(cls) for each in (whole, *whole.parts))


def with_parts(
    cls: type[DataclassInstance], given: Mapping[str, Any], flags: Collection[str]
) -> dict[str, Any]:
    """Return the values of options with each part in its mapping; a part that is among the
    ``flags`` wins over the mapping. Raises ``OptionError``, also for what is given twice."""
    values = dict(given)
    for whole in declared(cls):
        for part in whole.parts:
            if part.name in values:
                value = _checked(part, values.pop(part.name))
                wins = part.name in flags
                mapping = values.get(whole.name, {})
                values[whole.name] = _with_part(whole, mapping, part, value, wins=wins)
    return values


def _with_part(whole: Declared, mapping: Any, part: Declared, value: Any, *, wins: bool) -> Any:
    if not isinstance(mapping, Mapping):
        return mapping  # its own check names it
    twice = [key for key in part.rivals(whole.parts) if key in mapping]
    if twice and not wins:
        complaint = f"is {value}, and {whole.name} has {twice[0]} {mapping[twice[0]]}"
        raise OptionError(part.name, complaint, "leave one out")
    return {**{key: mapping[key] for key in mapping if key not in twice}, part.key: value}


def flag_of(name: str) -> str:
    """Return the flag of an option: ``--batch-size`` of ``batch_size``."""
    return "--" + name.replace("_", "-")


def check_options(options: DataclassInstance) -> None:
    """Convert and check every field of a frozen dataclass in place: call it when it is built.

    Mappings and lists are copied. Raises ``OptionError``.
    """
    for each in declared(type(options)):
        object.__setattr__(options, each.name, _checked(each, getattr(options, each.name)))


def _default(each: Field[Any]) -> str | None:
    """Return the default in words; None where there is none."""
    value = each.default if each.default_factory is MISSING else each.default_factory()
    unset: str | None = each.metadata["option"].unset
    if value is MISSING or unset is not None:
        return None if value is MISSING else unset
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value) if isinstance(value, dict) else str(value)


_PATHS = ("DIR", "FILE", "MODEL", "METRICS", "PROGRAM")
"""Metavars of options that name files, or may."""


def with_home(name: str, paths: str) -> str:
    """Return paths, with commas between, with the home directory for ``~``, or ``OptionError``."""
    expanded = ",".join(map(os.path.expanduser, paths.split(",")))
    remedy = f"write ./{paths} for a name with ~"
    refuse(name, f"is {paths!r}: nobody has that home", remedy, when=expanded.startswith("~"))
    return expanded


def split_names(text: str | None) -> list[str]:
    """Return the names in ``text``, which has commas between them."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


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


def _checked(each: Declared, value: Any) -> Any:
    """Return the value of an option as its type. Raises ``OptionError``."""
    name, rules, kinds = each.name, each.rules, each.kinds
    if value is False and rules.no is not None:
        value = rules.no
    if isinstance(value, str) and rules.parse is not None:
        try:
            value = rules.parse(value)
        except ValueError as error:
            raise OptionError(name, f"is {value!r}", str(error)) from None
    if value is None and types.NoneType in kinds:
        return None
    if value == "" and rules.metavar in _PATHS and name != "adapter_path":  # which means none
        raise OptionError(name, "is empty", "name one, or leave it out")
    # A bool is an int to Python, but 'iters: true' is a mistake.
    if float in kinds and is_number(value):
        value = float(value)
    fits = bool in kinds if isinstance(value, bool) else isinstance(value, kinds)
    choices = f"choose from {', '.join(map(str, rules.choices))}" if rules.choices else None
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        wanted = " or ".join(_KINDS[kind] for kind in kinds if kind in _KINDS)
        raise OptionError(name, f"is {value!r}", choices or f"give {wanted}")
    if rules.metavar in _PATHS and isinstance(value, str):
        value = with_home(name, value)
    elif isinstance(value, str) and not _is_text(value):
        raise OptionError(name, f"is {value!r}", "give text in UTF-8")
    if kinds == (list,) and not all(map(_is_text, value)):
        raise OptionError(name, f"is {value!r}", "give a list of texts")
    if isinstance(value, (dict, list)):
        return _plain_copy(name, value)
    if choices and value not in (rules.choices or ()):
        raise OptionError(name, f"is {value!r}", choices)
    if rules.minimum is not None and value < rules.minimum:
        raise OptionError(name, f"is {value}", f"give {rules.minimum} or more")
    if rules.maximum is not None and value > rules.maximum:
        raise OptionError(name, f"is {value}", f"give {rules.maximum} or less")
    if rules.above is not None and value <= rules.above:
        raise OptionError(name, f"is {value}", f"give more than {rules.above}")
    if rules.below is not None and value >= rules.below:
        raise OptionError(name, f"is {value}", f"give less than {rules.below:g}")
    return value


def _is_text(value: object) -> bool:
    """Return whether a value is text; a command line's bytes that are not UTF-8 are none."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _plain_copy(name: str, value: Any) -> Any:
    """Copy JSON-able data: what is accepted can be written to adapter_config.json."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        remedy = f"give plain numbers, text, lists and mappings ({error})"
        raise OptionError(name, f"is {value!r}", remedy) from None
