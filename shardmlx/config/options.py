"""Options of a command: declared once as dataclass fields, given by flag or YAML file.

A command's options are a frozen dataclass, an ``Options``, whose fields are made by ``option``, or
by ``section``: a dataclass of further options, which code takes as a whole. Default, unit, help
text and limits of an option stand there and nowhere else: the command line, its help and
docs/options.md are made from the fields. Flags and YAML files know no sections, and name each
option flatly: ``from_flat`` builds the options out of these names.
"""

from __future__ import annotations

import json
import math
import os
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields, replace
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
    choices: Collection[str | int] | None = None
    parse: Callable[[str], Any] | None = None  # text as written -> value
    no: str | None = None  # the word that means False, which YAML takes for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """An option of a dataclass or of its sections, in the words of a command line: ``kinds`` are
    the types of its values, ``usual`` is its default, ``REQUIRED`` if it must be given."""

    name: str
    rules: Option
    kinds: tuple[type, ...]
    usual: Any

    @property
    def default(self) -> str | None:
        """The default in words; None where the option must be given."""
        if self.usual is REQUIRED or self.rules.unset is not None:
            return None if self.usual is REQUIRED else self.rules.unset
        return _in_words(self.usual)

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


def section(cls: type[DataclassInstance], **others: Any) -> Any:
    """Make a dataclass field that is a section of the options; ``others`` are options that take the
    place of those of the same name in it."""
    return field(default_factory=partial(_usual_section, cls, others), metadata={"section": others})


def declared(cls: type[DataclassInstance]) -> tuple[Declared, ...]:
    """Return the options of a dataclass and of its sections, in the order of the fields."""
    of_class: Any = cls  # mypy does not take a frozen dataclass for hashable
    return _declared(of_class)


@cache
def _declared(cls: Any) -> tuple[Declared, ...]:
    hints = get_type_hints(cls)
    found: list[Declared] = []
    for each in fields(cls):
        others = each.metadata.get("section")
        if others is None:
            own = Declared(
                name=each.name,
                rules=each.metadata["option"],
                kinds=_alternatives(hints[each.name]),
                usual=_usual(each),
            )
            found.append(own)
            continue
        for inner in declared(hints[each.name]):
            other = others.get(inner.name)
            if other is not None:
                inner = replace(inner, rules=other.metadata["option"], usual=_usual(other))
            found.append(inner)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a command. An instance checks itself: ``OptionError`` names the option."""

    @classmethod
    def from_flat(cls, **values: Any) -> Self:
        """Build the options out of values by their names, as a command line or a YAML file gives
        them; an option that is left out has its default. Mappings and lists are copied.

        Raises ``OptionError``, and ``TypeError`` for an unknown name or one that is missing.
        """
        known = declared(cls)
        if unknown := values.keys() - {each.name for each in known}:
            raise TypeError(f"{cls.__name__} has no option {', '.join(sorted(unknown))}")
        given = {each.name: values.get(each.name, each.usual) for each in known}
        if missing := [name for name, value in given.items() if value is REQUIRED]:
            raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")
        checked = {each.name: checked_value(each, given[each.name]) for each in known}
        options: Self = _built(cls, cls.settled(checked))
        return options

    @classmethod
    def settled(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return flat values with those that follow from others. Raises ``OptionError``."""
        return values

    def flat(self) -> dict[str, Any]:
        """Return the value of each option by its name, in the order of ``declared``."""
        return _flat(self)

    def changed(self, **values: Any) -> Self:
        """Return the same options but for these, by their names. Raises as ``from_flat``."""
        return self.from_flat(**{**self.flat(), **values})

    def __post_init__(self) -> None:
        values = self.flat()
        # Numbers as text, and a home as ~, are for command lines and files.
        checked = {
            each.name: checked_value(each, values[each.name]) for each in declared(type(self))
        }
        for name, value in self.settled(checked).items():
            refuse(name, f"is {values[name]!r}", f"give {value!r}", when=value != values[name])


def _built(cls: type[Any], values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    own = {
        each.name: _built(hints[each.name], values)
        if "section" in each.metadata
        else values[each.name]
        for each in fields(cls)
    }
    return cls(**own)


def _flat(options: DataclassInstance) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for each in fields(options):
        value = getattr(options, each.name)
        values |= _flat(value) if "section" in each.metadata else {each.name: value}
    return values


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
                value = checked_value(part, values.pop(part.name))
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


def _usual_section(cls: type[DataclassInstance], others: Mapping[str, Field[Any]]) -> Any:
    """Return a section with its defaults, ``others`` among them; ``TypeError`` if one has none."""
    usual = {each.name: each.usual for each in declared(cls)}
    usual |= {name: _usual(each) for name, each in others.items()}
    if missing := [name for name, value in usual.items() if value is REQUIRED]:
        raise TypeError(f"{cls.__name__} lacks {', '.join(missing)}")
    return _built(cls, usual)


def _usual(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _in_words(value: Any) -> str:
    """Return a default in words."""
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


def checked_value(each: Declared, value: Any) -> Any:
    """Return the value of an option as its type. Raises ``OptionError``."""
    value = _parsed(each, value)
    if value is None and types.NoneType in each.kinds:
        return None
    # A bool is an int to Python, but 'iters: true' is a mistake.
    if float in each.kinds and is_number(value):
        value = float(value)
    _check_kind(each, value)
    if isinstance(value, str):
        value = _checked_text(each, value)
    if each.kinds == (list,) and not all(map(_is_text, value)):
        raise OptionError(each.name, f"is {value!r}", "give a list of texts")
    if isinstance(value, (dict, list)):
        return _plain_copy(each.name, value)
    _check_limits(each, value)
    return value


def _parsed(each: Declared, value: Any) -> Any:
    """Return the value that a text means."""
    if value is False and each.rules.no is not None:
        return each.rules.no
    if isinstance(value, str) and each.rules.parse is not None:
        try:
            return each.rules.parse(value)
        except ValueError as error:
            raise OptionError(each.name, f"is {value!r}", str(error)) from None
    return value


def _check_kind(each: Declared, value: Any) -> None:
    is_bool = isinstance(value, bool)
    fits = bool in each.kinds if is_bool else isinstance(value, each.kinds)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        wanted = " or ".join(_KINDS[kind] for kind in each.kinds if kind in _KINDS)
        raise OptionError(each.name, f"is {value!r}", _choices(each.rules) or f"give {wanted}")


def _checked_text(each: Declared, value: str) -> str:
    """Return a text, with the home directory for ``~`` in paths."""
    if each.rules.metavar in _PATHS:
        is_empty = value == "" and each.name != "adapter_path"  # which means none
        refuse(each.name, "is empty", "name one, or leave it out", when=is_empty)
        return with_home(each.name, value)
    refuse(each.name, f"is {value!r}", "give text in UTF-8", when=not _is_text(value))
    return value


def _check_limits(each: Declared, value: Any) -> None:
    name = each.name
    rules = each.rules
    if rules.choices and value not in rules.choices:
        raise OptionError(name, f"is {value!r}", _choices(rules))
    if rules.minimum is not None and value < rules.minimum:
        raise OptionError(name, f"is {value}", f"give {rules.minimum} or more")
    if rules.maximum is not None and value > rules.maximum:
        raise OptionError(name, f"is {value}", f"give {rules.maximum} or less")
    if rules.above is not None and value <= rules.above:
        raise OptionError(name, f"is {value}", f"give more than {rules.above}")
    if rules.below is not None and value >= rules.below:
        raise OptionError(name, f"is {value}", f"give less than {rules.below:g}")


def _choices(rules: Option) -> str:
    return f"choose from {', '.join(map(str, rules.choices))}" if rules.choices else ""


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
