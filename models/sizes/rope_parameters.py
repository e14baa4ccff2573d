"""Translate transformers 5's fields of rotary embeddings to mlx-lm's. No MLX, no MPI.

transformers 5 writes base, scaling and rotated share into ``rope_parameters``, once, or once for
each type of layers; the code of most families of mlx-lm reads ``rope_theta``, ``rope_scaling`` and
``partial_rotary_factor`` at the top, and takes defaults if these are missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from shardmlx.errors import UserError

SAID = "rope_parameters"
FULL, WINDOWED = "full_attention", "sliding_attention"
"""Types of layers that ``rope_parameters`` may distinguish."""

_OF_TRAINING = "original_max_position_embeddings"
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "mrope": (),
    "proportional": (),
    "su": ("long_factor", _OF_TRAINING),
    "longrope": ("long_factor", _OF_TRAINING),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _OF_TRAINING),
    "yarn": (_OF_TRAINING, "factor"),
    "deepseek_yarn": ("factor",),
    "telechat3-yarn": ("factor",),
}
"""The types that mlx-lm knows, and the numbers that each requires."""
_NOT_SCALING = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""Keys of ``rope_parameters`` that no ``rope_scaling`` replaces: the last weights queries."""
_OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    "mimo_v2_flash": {"rope_local_base_freq": "swa_rope_theta"},
    "plamo3": {"rope_local_base_freq": "rope_local_theta"},
}


def with_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with mlx-lm's fields of ropes; ``UserError`` for an unknown type."""
    fields = _with_older(config)
    if isinstance(fields.get("text_config"), Mapping):
        fields["text_config"] = with_rope(fields["text_config"])
    of_full = rope_of(fields, FULL)
    of_windowed = rope_of(fields, WINDOWED)
    if of_full is None and of_windowed is None:
        return fields
    found: dict[str, Any] = {}
    kinds = fields.get("layer_types") or []
    shares = {part.get("partial_rotary_factor") for part in (of_full, of_windowed) if part}
    if len(shares) == 1 and None not in shares:
        found["partial_rotary_factor"] = shares.pop()
        found["rotary_dim"] = rotated(fields, found["partial_rotary_factor"])
    if tells_layers_apart(fields):
        # mlx-lm's code of Gemma 3 derives the type of a layer from its number alone.
        period = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
        if kinds and all((kind == FULL) == (i % period == 0) for i, kind in enumerate(kinds, 1)):
            found["sliding_window_pattern"] = period
        if of_windowed and "rope_theta" in of_windowed:
            found["rope_local_base_freq"] = of_windowed["rope_theta"]
    if of_full is not None:
        found["rope_scaling"] = scaling_of(fields, of_full)
        found["rope_theta"] = of_full.get("rope_theta", fields.get("rope_theta"))
        if found["rope_theta"] is None:
            raise _refused(f"{SAID} has no rope_theta", "add it")
        if _OF_TRAINING in of_full and fields.get(_OF_TRAINING) is None:
            found[_OF_TRAINING] = of_full[_OF_TRAINING]
    elif FULL in (kinds or [FULL]):
        raise _refused(f"{SAID} has no {FULL}", "add it")
    names = _OTHER_NAMES.get(str(fields.get("model_type")), {})
    return fields | {names.get(key, key): value for key, value in found.items()}


def rope_of(fields: Mapping[str, Any], layer_type: str) -> Mapping[str, Any] | None:
    """Return the ``rope_parameters`` of layers of a type; None without any."""
    said = fields.get(SAID)
    if said is None:
        return None
    if isinstance(said, Mapping):
        for key, value in said.items():
            if isinstance(value, Mapping) and key not in (FULL, WINDOWED):
                known = f"only {FULL} and {WINDOWED} are known"
                raise _refused(f"{SAID} names {key!r} layers", known)
        if tells_layers_apart(fields):
            said = said.get(layer_type) or {}
    if not isinstance(said, Mapping):
        raise _refused(f"{SAID} is {said!r}", "it must be an object")
    rope = {key: value for key, value in said.items() if value is not None}
    for key in {"rope_theta", "partial_rotary_factor", "factor"} & rope.keys():
        if not isinstance(rope[key], (int, float)) or not 0 < rope[key] < math.inf:
            raise _refused(f"{key} of {SAID} is {rope[key]!r}", "it must be a number above 0")
    return rope or None


def tells_layers_apart(fields: Mapping[str, Any]) -> bool:
    """Return whether ``rope_parameters`` has an object for each type of layers."""
    return not {FULL, WINDOWED}.isdisjoint(fields[SAID])


def type_of(rope: Mapping[str, Any]) -> str:
    """Return the type of a rotary embedding by either of its names in config.json."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def rotated(fields: Mapping[str, Any], share: float) -> int:
    """Return the number of rotated elements of a head, for this share."""
    width = fields.get("head_dim")
    if width is None:
        if not isinstance(heads := fields.get("num_attention_heads"), int) or heads < 1:
            raise _refused(f"num_attention_heads is {heads!r}", "it must be a whole number above 0")
        width = fields.get("hidden_size", 0) // heads
    return int(width * share)


def scaling_of(fields: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``rope_scaling`` with which mlx-lm computes like transformers, or None."""
    kind = type_of(rope)
    if kind not in _NEEDED:
        raise _refused(f"{SAID} is of type {kind!r}", f"known are {', '.join(_NEEDED)}")
    if kind == "default":
        return None
    scaling = dict(rope)
    longest = fields.get("max_position_embeddings")
    trained = scaling.get(_OF_TRAINING, fields.get(_OF_TRAINING, longest))
    if _OF_TRAINING in _NEEDED[kind] and trained is not None:
        scaling[_OF_TRAINING] = trained
        if kind == "yarn" and longest is not None:
            scaling.setdefault("factor", longest / trained)
    for key in _NEEDED[kind]:
        if key not in scaling:
            raise _refused(f"{SAID} of type {kind} has no {key}", "add it")
    if "factor" in scaling:
        scaling["factor"] = float(scaling["factor"])
    if kind == "yarn":
        scaling |= _attention_of_yarn(scaling)
    elif kind in ("longrope", "su") and "attention_factor" in scaling:
        factor = scaling["attention_factor"]
        raise _refused(f"{SAID} has attention_factor {factor!r}", f"mlx-lm's {kind} takes none")
    kept = {key: value for key, value in scaling.items() if key not in _NOT_SCALING}
    if kind == "proportional" and "partial_rotary_factor" in rope:
        kept["partial_rotary_factor"] = rope["partial_rotary_factor"]
    # Families of mlx-lm read one name of the type or the other.
    return {"rope_type": kind, "type": kind, **kept}


def _with_older(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with ``rope_scaling`` merged in, which overrides in transformers."""
    said = fields.get(SAID)
    old = fields.get("rope_scaling")
    if not isinstance(said, Mapping) or not isinstance(old, Mapping) or not old:
        return dict(fields)
    if said.keys() & {FULL, WINDOWED}:
        full = said.get(FULL) or {}
        kept = {key: value for key, value in full.items() if key not in ("rope_type", "type")}
        return {**fields, SAID: {**said, FULL: {**kept, **old}}}
    beside = {key: fields.get(key, said.get(key)) for key in _BESIDE_SCALING}
    kept = {key: value for key, value in beside.items() if value is not None}
    return {**fields, SAID: {**kept, **old}}


def _attention_of_yarn(scaling: Mapping[str, Any]) -> dict[str, float]:
    """Return the ``mscale`` with which mlx-lm's yarn weights attention as transformers' does.

    transformers takes ``attention_factor``, else the ratio if both scales are there, else that of
    1. mlx-lm takes the ratio, with 1 and 0 for missing scales, and none for a factor up to 1.
    """
    if (factor := scaling["factor"]) <= 1:
        return {}
    weight = partial(_weight_of_yarn, factor)
    above = scaling.get("mscale", 1)
    below = scaling.get("mscale_all_dim", 0)
    ratio = weight(above) / weight(below)
    both = scaling.get("mscale") and below
    wanted = scaling.get("attention_factor", ratio if both else weight(1))
    if math.isclose(wanted, ratio):
        return {}
    return {"mscale": (wanted * weight(below) - 1) / (0.1 * math.log(factor))}


def _weight_of_yarn(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1


def _refused(problem: str, remedy: str) -> UserError:
    return UserError(f"config.json: {problem}", remedy)
