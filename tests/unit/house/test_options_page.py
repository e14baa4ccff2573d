"""Each option of a command says enough for the pages of options."""

from __future__ import annotations

from shardmlx.config.commands import COMMANDS
from shardmlx.config.options import Declared, written

OPTIONS = [(command.name, each) for command in COMMANDS for each in written(command.line.options)]


def wrong_with(each: Declared) -> list[str]:
    """Return what an option leaves unsaid. A switch has no unit, a choice its words; in the file
    only, a mapping its keys."""
    wanted = {
        "a unit": bool(each.metavar) or not each.rules.flag or bool in each.kinds,
        "a default, or that it must be given": each.default != "",
        "help": bool(each.rules.help),
        "help without a full stop": not each.rules.help.endswith("."),
        "help without its default": "(default" not in each.rules.help,
    }
    return [what for what, is_there in wanted.items() if not is_there]


def test_an_option_has_a_unit_and_a_default_or_must_be_given() -> None:
    wrong = {f"{command} {each.name}": wrong_with(each) for command, each in OPTIONS}
    assert len(wrong) > 200
    assert {name: lacks for name, lacks in wrong.items() if lacks} == {}


def test_one_name_means_one_thing() -> None:
    """The same option has the same unit in all commands."""
    units: dict[str, set[str]] = {}
    for _, each in OPTIONS:
        if each.rules.flag and each.rules.choices is None and not each.rules.positional:
            units.setdefault(each.name, set()).add(each.metavar)
    assert {name: found for name, found in units.items() if len(found) > 1} == {}
