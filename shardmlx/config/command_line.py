"""Command lines made from options dataclasses, and options read from flags and YAML files."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import shardmlx
from shardmlx.common.environment import LAUNCHED
from shardmlx.common.passed_stdin import is_path_of_stdin
from shardmlx.common.yaml_reader import did_you_mean, read_yaml
from shardmlx.compat import HelpOfWholeWords
from shardmlx.config.commands import BY_NAME
from shardmlx.config.options import (
    Declared,
    OptionError,
    Options,
    declared,
    flag_of,
    with_home,
    with_parts,
    written,
)
from shardmlx.config.other_words import command_here, option_here
from shardmlx.distributed.processes import under_mpirun
from shardmlx.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Own = TypeVar("Own", bound=Options)

_FALSE = ("false", "f")
"""The words that mlx_lm takes for False; all others are True to it."""


@dataclass(frozen=True, slots=True)
class Given:
    """The options that were given, by flag and in the YAML file, by their names."""

    flags: Mapping[str, Any]
    file: Mapping[str, Any]

    @property
    def names(self) -> frozenset[str]:
        """The names of the options."""
        return frozenset(self.flags) | frozenset(self.file)


class CommandParser(argparse.ArgumentParser):
    """A parser that raises ``UserError`` where argparse would print its usage and exit."""

    examples: tuple[str, ...] = ()

    def format_help(self) -> str:
        """Return argparse's help, with the examples below it."""
        return "\n  ".join([f"{super().format_help()}\nexamples:", *self.examples]) + "\n"

    def print_help(self, file: Any = None) -> None:
        """Print it; argparse would pass over what cannot be written."""
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError`` with what argparse found wrong."""
        raise UserError(" ".join(message.split()), f"see {self.prog} --help")


class _Version(argparse.Action):
    """Prints the version and exits; argparse would pass over what cannot be written."""

    help = "show program's version number and exit"

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"shardmlx {shardmlx.__version__}")
        parser.exit()


def _add(add: Callable[..., argparse.Action], each: Declared) -> argparse.Action:
    how: dict[str, Any] = {"help": each.help.replace("%", "%%")}
    if each.rules.positional:
        return add(each.name, metavar=each.metavar, **how, **_type(each))
    if bool in each.kinds and each.rules.takes_value:
        how |= {"nargs": "?", "const": True, "metavar": "BOOL", "type": _truth}
        add(f"--no-{each.flag[2:]}", dest=each.name, action="store_false", help=argparse.SUPPRESS)
        return add(*each.flags, **how)
    if bool in each.kinds:
        return add(*each.flags, action=argparse.BooleanOptionalAction, **how)
    if list in each.kinds:
        how |= {"action": "extend", "nargs": "+"}
    return add(*each.flags, metavar=each.metavar, **how, **_type(each))


def _type(each: Declared) -> dict[str, Any]:
    if each.rules.parse is not None or list in each.kinds:
        return {}
    return {"type": next(kind for kind in (int, float, str) if kind in each.kinds)}


def _truth(text: str) -> bool:
    return text.lower() not in _FALSE


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine(Generic[Own]):
    """The command line of a command, made from the dataclass of its options.

    Help lists ``groups`` first, and only the options in ``shown``. Flags that are ``refused`` have
    a reason; keys of a YAML file that are ``passed_over`` have a hint what to write instead.
    ``needs`` are options of which flags or file give at least one, and ``needs_remedy`` says what
    to give. Rank 0 calls ``check`` with the options of a run. One of ``commands`` follows, if any.
    """

    options: type[Own]
    command: str
    description: str
    groups: Sequence[str] = ()
    shown: Collection[str] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ()
    epilog: str = ""
    needs: Collection[str] = ()
    needs_remedy: str = ""
    check: Callable[[Own], None] | None = None

    def parser(self, *, shows_all: bool = False) -> CommandParser:
        """Build the parser, whose result holds only the flags that were given.

        ``--help-all`` is another word for ``--help`` of a parser that ``shows_all``.
        """
        options = written(self.options)
        shows_all |= self.shown is None
        parser = CommandParser(
            prog=f"shardmlx {self.command}",
            usage=self._usage(options),
            description=self.description,
            epilog=self._epilog(options) if shows_all else self.epilog,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            exit_on_error=False,
            formatter_class=HelpOfWholeWords,
        )
        parser.examples = BY_NAME[self.command].examples
        parser.add_argument("--version", action=_Version, nargs=0, help=_Version.help)
        flags = [each for each in options if each.rules.flag]
        self._add_flags(parser, flags, flags if shows_all else self._shown(flags))
        text = argparse.SUPPRESS
        if self.shown is not None:
            text = f"show {len(flags)} options and exit"
        parser.add_argument("--help-all", action="help", help=text)
        return parser

    def _usage(self, options: Sequence[Declared]) -> str:
        words = [f"shardmlx {self.command}"]
        words += [each.metavar for each in options if each.rules.positional]
        words.append("[OPTIONS]")
        if self.commands:
            words.append("COMMAND [OPTIONS OF COMMAND]")
        return " ".join(words)

    def _epilog(self, options: Sequence[Declared]) -> str:
        """Return the end of the help, with the options that have no flag."""
        only_in_file = ", ".join(each.name for each in options if not each.rules.flag)
        if not only_in_file:
            return self.epilog
        return f"{self.epilog} In the YAML file only: {only_in_file}.".strip()

    def _shown(self, flags: Sequence[Declared]) -> Sequence[Declared]:
        """Return those of the flags that the short help lists."""
        return [each for each in flags if each.name in (self.shown or ())]

    def _add_flags(
        self, parser: CommandParser, flags: Sequence[Declared], shown: Sequence[Declared]
    ) -> None:
        names = dict.fromkeys([*self.groups, *(each.rules.group for each in flags)])
        places = {name: parser.add_argument_group(name).add_argument for name in names if name}
        for each in flags:
            action = _add(places.get(each.rules.group or "", parser.add_argument), each)
            if each not in shown:
                action.help = argparse.SUPPRESS
            for other in each.rules.also:
                parser.add_argument(other, dest=each.name, help=argparse.SUPPRESS, **_type(each))

    def load(self, argv: Sequence[str], rank: int = 0) -> Own:
        """Build the options: flags beat the YAML file of ``--config``, which beats the defaults.

        A key of the file without a value (``key:`` or ``key: null``) counts as not given. Other
        ranks than 0, whose options rank 0's replace, read no file, and take from the flags only
        how long they wait for rank 0; for ``--help`` they exit too, and print nothing.
        ``UserError`` names the flag, or the file and its key.
        """
        if rank:
            with redirect_stdout(StringIO()):
                flags, _ = self._parsed(self.parser(), argv)
            known = declared(self.options)
            needed = {each.name for each in known if each.default is None} | {"timeout"}
            return self.options.from_flat(**{key: flags[key] for key in flags.keys() & needed})
        options, _ = self.load_given(argv)
        if self.check is not None:
            self.check(options)
        return options

    def load_given(self, argv: Sequence[str], *, on_ranks: bool | None = None) -> tuple[Own, Given]:
        """Build the options as ``load``, and return those that flags and file gave. Ranks read
        files, ``on_ranks``, by default if this is one."""
        parser = self.parser(shows_all="--help-all" in argv)
        flags, unknown = self._parsed(parser, argv)
        if unknown:
            raise self._unknown(unknown, argv)
        if on_ranks is None:
            on_ranks = under_mpirun()
        if on_ranks:
            self._refuse_stdin(flags)
        options, given = self._build(flags)
        if on_ranks:
            self._refuse_stdin(given.file)
        if self.needs and given.names.isdisjoint(self.needs):
            raise UserError(f"{self.command} has no {next(iter(self.needs))}", self.needs_remedy)
        return options, given

    def load_before(self, argv: Sequence[str]) -> tuple[Own, str, tuple[str, ...]]:
        """Build the options before one of ``commands``, and return it and its own words too."""
        before = list(takewhile(lambda word: word not in self.commands, argv))
        command, *words = argv[len(before) :] or [""]
        known = {flag: each for each in declared(self.options) for flag in each.flags}
        last = known.get(before[-1]) if before else None
        if last is not None and last.metavar and command:
            remedy = f"give it: shardmlx {self.command} {last.flag} {last.metavar} {command} ..."
            raise UserError(f"{before[-1]} has no value before {command}", remedy)
        options, _ = self.load_given(before, on_ranks=True)
        if not command:
            raise UserError(f"{self.command} has no command", f"give {', '.join(self.commands)}")
        return options, command, tuple(words)

    def _parsed(
        self, parser: CommandParser, argv: Sequence[str]
    ) -> tuple[dict[str, Any], list[str]]:
        """Return the values of flags, by option, and the words that the parser does not know."""
        try:
            namespace, unknown = parser.parse_known_args(argv)
        except argparse.ArgumentError as error:
            raise self._refused(error) from None
        return vars(namespace), unknown

    def _unknown(self, unknown: Sequence[str], argv: Sequence[str]) -> UserError:
        """Return the error for words of ``argv`` that the parser does not know."""
        word = unknown[0]
        flag = word.partition("=")[0]
        if flag in self.refused:
            return UserError(f"{flag} is not here", self.refused[flag])
        known = written(self.options)
        if word.startswith("-") or "=" in word:
            remedy = option_here(flag, known, self.command, as_flag=True)
        else:
            remedy = self._place_of(word, argv[argv.index(word) - 1])
        flags = [each.flag[2:] for each in known if each.rules.flag and not each.rules.positional]
        remedy = remedy or did_you_mean(flag.lstrip("-"), flags, "--")
        return UserError(f"unknown argument {word!r}", remedy or f"see {self._help}")

    @property
    def _help(self) -> str:
        return f"shardmlx {self.command} --help"

    def _place_of(self, word: str, before: str) -> str:
        """Return where a word belongs that stands without a flag, or after the switch ``before``;
        empty where nothing is known."""
        if self.commands:
            similar = command_here(word) or did_you_mean(word, self.commands)
            is_hostfile = not similar and Path(word).is_file()
            return f"give --hostfile {word}" if is_hostfile else similar
        names = {each.name: each for each in written(self.options)}
        switch = names.get(before.lstrip("-").replace("-", "_"))
        if switch is not None and bool in switch.kinds:
            return f"{before} is a switch, without a value; --no-{switch.flag[2:]} is off"
        is_file = word.endswith((".yaml", ".yml"))
        if is_file and "config" in names:
            return f"give -c {word}"
        is_model = "/" in word or Path(word).is_dir()
        if is_model and "model" in names and not names["model"].rules.positional:
            return f"give --model {word}"
        return f"give --prompt {shlex.quote(word)}" if "prompt" in names else ""

    def _refused(self, error: argparse.ArgumentError) -> UserError:
        """Return the error for a flag without its value, or with one of another kind."""
        flag = (error.argument_name or "").rpartition("/")[2]
        each = next((each for each in written(self.options) if each.flag == flag), None)
        if each is None:
            return UserError(str(error), f"see {self._help}")
        if error.message.startswith("expected"):
            choices = ", ".join(map(str, each.rules.choices or ()))
            wanted = f"choose from {choices}" if choices else f"give {each.metavar}"
            return UserError(f"{flag} has no value", f"{wanted}: {each.rules.help}")
        _, colon, value = error.message.partition("value: ")
        problem = f"{flag} is {value}" if colon else str(error)
        kind = "a whole number" if int in each.kinds else "a number"
        return UserError(problem, f"give {kind}" if colon else f"see {self._help}")

    def _refuse_stdin(self, values: Mapping[str, Any]) -> None:
        """Raise ``UserError`` for a path of stdin: mpirun does not tell ranks its end, so that they
        would wait for it."""
        for each in declared(self.options):
            value = values.get(each.name)
            if is_path_of_stdin(value):
                fact = f"{each.flag} {value}: ranks are not told where stdin ends"
                raise UserError(fact, "give a file")

    def _build(self, flags: Mapping[str, Any]) -> tuple[Own, Given]:
        known = written(self.options)
        path = flags.get("config") and with_home("config", flags["config"])
        given = Given(flags, {} if path is None else self._read_file(path))
        values = {**given.file, **given.flags}
        for each in known:
            if each.rules.excludes is not None and each.name in values:
                _exclude(each, given, values, path)
        for each in known:
            if each.default is None and each.name not in values:
                raise UserError(f"{each.flag} is missing", f"see {self._help}")
        try:
            values = with_parts(self.options, values, flags)
            return self.options.from_flat(**values), given
        except OptionError as error:
            raise self._placed(error, flags, None if error.name not in values else path) from None

    def _placed(self, error: OptionError, flags: Mapping[str, Any], path: str | None) -> UserError:
        """Return the error of an option with its place: its flag, or else the file at ``path``."""
        if error.name in flags:
            each = next(each for each in written(self.options) if each.name == error.name)
            name = each.metavar if each.rules.positional else each.flag
            return UserError(f"{name} {error.complaint}", error.remedy)
        if path is not None:
            return UserError(f"{path}: {error.problem}", error.remedy)
        return error

    def _read_file(self, path: str) -> dict[str, Any]:
        """Return the options in a YAML file."""
        content = read_yaml(path)
        for key in content.keys() & self.passed_over.keys():
            del content[key]
            if LAUNCHED not in os.environ:  # launch has said it
                said = f"{path}: {key} is passed over, as mlx_lm.lora does: {self.passed_over[key]}"
                print(f"shardmlx: {said}", file=sys.stderr, flush=True)
        known = written(self.options)
        names = [each.name for each in known]
        for key in content:
            if key not in names:
                remedy = (
                    option_here(str(key), known, self.command, as_flag=False)
                    or did_you_mean(str(key), names)
                    or self.refused.get(flag_of(str(key)))
                    or f"take it out, or see {self._help}"
                )
                raise UserError(f"{path}: unknown key {key!r}", remedy)
        return {key: value for key, value in content.items() if value is not None}


def _exclude(each: Declared, given: Given, values: dict[str, Any], path: str | None) -> None:
    """Let one of two options win that exclude each other: a flag over the file at ``path``. Raises
    ``UserError`` where both are given in the same place."""
    other = str(each.rules.excludes)
    if each.name in given.flags and other in given.flags:
        raise UserError(f"{each.flag} is given, and {flag_of(other)} too", "leave one out")
    if each.name in given.file and other in given.file:
        raise UserError(f"{path}: {each.name} is given, and {other} too", "leave one out")
    if each.name in values and other in values:
        del values[each.name if other in given.flags else other]


def words_of(cls: type[DataclassInstance], flags: Mapping[str, Any]) -> list[str]:
    """Return the command line that gives ``flags``, each by its long name."""
    words: list[str] = []
    known = {each.name: each for each in written(cls)}
    for name, value in flags.items():
        each = known[name]
        if bool in each.kinds:
            words.append(each.flag if value else f"--no-{each.flag[2:]}")
        else:
            words += [each.flag, *map(str, value if isinstance(value, list) else [value])]
    return words
