"""Keys of a message that say whether it counts in the loss. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmlx.errors import UserError
from shardmlx.training.row_notes import shown

_SWITCHES = {
    "train": False,
    "training": False,
    "trainable": False,
    "loss": False,
    "loss_mask": False,
    "weight": False,
    "masked": True,
}
"""Switches, and the value of each that means no. OpenAI, axolotl, ms-swift, verl and torchtune call
them so."""

_FINER_SWITCHES = ("train_detail", "training_detail", "loss_scale")
"""Keys that say which part of a message counts, or how much."""

_KEYS = frozenset(_SWITCHES).union(_FINER_SWITCHES)


def counts_by_itself(message: Mapping[str, Any], number: int, where: str) -> bool:
    """Return whether a message, the one with a ``number`` in the row ``where``, does not deny that
    it counts. Raises ``UserError`` if what it says of that is not read."""
    if _KEYS.isdisjoint(message):
        return True
    name = f"{where}: message {number}"
    for key in _FINER_SWITCHES:
        if key in message:
            raise UserError(
                f"{name} has {key}, which is not read",
                'take it out, and write "train": true or false for the whole message',
            )
    said = {key: message[key] for key in _SWITCHES if key in message}
    for key, value in said.items():
        if value not in (True, False):
            raise UserError(f"{name} has {key} {shown(value)}", "write true or false")
    answers = {value != _SWITCHES[key] for key, value in said.items()}
    if len(answers) > 1:
        words = " and ".join(f"{key} {shown(value)}" for key, value in said.items())
        raise UserError(f"{name} has {words}, which disagree", "keep one")
    return False not in answers


def without_switches(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without the keys that no template shall see."""
    if _SWITCHES.keys().isdisjoint(message):
        return message
    return {key: value for key, value in message.items() if key not in _SWITCHES}
