"""Identify the run that a checkpoint belongs to: model, data, optimizer, and other facts that
decide the losses.

Files are known by their content, and options by what they mean: two that mean the same are equal.
Layout, number of steps, reports and paths may change during a run. No MLX, no MPI.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardmlx.common.digests import json_digest
from shardmlx.config.checks import STEADY, steady_schedule
from shardmlx.config.objective import ObjectiveOptions, facts_of
from shardmlx.config.options import declared
from shardmlx.engine.batches import WANTED, Sample
from shardmlx.errors import UserError, refusing
from shardmlx.modelfiles.safetensors_header import MODEL_FILES, ReadBytes, read_bytes
from shardmlx.modelfiles.sources import CONFIG_FILE

SAME_OPTIONS = (
    "fine_tune_type",
    "num_layers",
    "lora_parameters",
    "unfreeze_all",
    "batch_size",
    "grad_accumulation_steps",
    "max_seq_length",
    "max_grad_norm",
    "master_weights",
    "sum_dtype",
    "dtype",
    "seed",
    *(each.name for each in declared(ObjectiveOptions)),
)
"""The options that must stay the same in a run, compared by name."""

_PROBES = 16
_PROBE_BYTES = 1 << 16
_READERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that its options do not say.

    ``layers`` is the number of the model's, and ``stored_dtype`` the type of all its weights, if
    they have one. ``start`` and ``objective`` are digests of the file that training starts from and
    of an own objective's module. ``usual_settings`` are those that the optimizer has by default.
    ``open_schedule`` is a schedule of which some follows from the number of steps, without this.
    """

    layers: int | None = None
    stored_dtype: str | None = None
    start: str | None = None
    objective: str | None = None
    usual_settings: Mapping[str, Any] = field(default_factory=dict)
    open_schedule: Mapping[str, Any] | None = None


NO_FACTS = RunFacts()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFacts:
    """Facts of a set of samples: how many there are, the ``longest`` that is known, in tokens, a
    digest of which answers are wanted, and one of all tokens; or, where not all rows have become
    tokens, of what the rows hold (``content``), and of the tokens of some (``looked_at``)."""

    samples: int
    longest: int
    labels: str | None = None
    sha256: str | None = None
    content: str | None = None
    looked_at: str | None = None

    @classmethod
    def of(cls, samples: Iterable[Sample], known: np.ndarray | None = None) -> SetFacts:
        """Return the facts of samples that are tokens, of which so much is ``known``."""
        digest = hashlib.sha256()
        count = 0
        longest = 0
        for sample in samples:
            digest.update(_packed(sample))
            count += 1
            longest = max(longest, len(sample[0]))
        return cls(
            samples=count,
            longest=longest,
            labels=labels_digest(known),
            sha256=digest.hexdigest(),
        )

    def as_json(self) -> dict[str, Any]:
        """Return what makes the set another one."""
        facts = {key: value for key, value in asdict(self).items() if value is not None}
        del facts["longest"]
        return facts


def tokens_digest(samples: Iterable[Sample]) -> str:
    """Return a digest of samples' tokens, and of where their losses start."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(_packed(sample))
    return digest.hexdigest()


def _packed(sample: Sample) -> bytes:
    tokens, start = sample
    return np.array([len(tokens), start, *tokens], np.int64).tobytes()


def labels_digest(known: np.ndarray | None) -> str | None:
    """Return a digest of which answers are wanted, if an objective knows of that."""
    if known is None:
        return None
    wanted = known[:, WANTED] > 0
    return hashlib.sha256(wanted.tobytes()).hexdigest()


def identity_of(
    options: Mapping[str, Any],
    model_path: Path,
    train: SetFacts,
    valid: SetFacts,
    read: ReadBytes | None = None,
    facts: RunFacts = NO_FACTS,
) -> dict[str, Any]:
    """Return the identity of a run with these options of ``train``, as JSON; ``read`` reads weights
    that ``model_path`` lacks."""
    identity = {
        "model": {
            "name": options["model"],
            "sha256": _model(model_path, read),
            "layers": facts.layers,
            "dtype": facts.stored_dtype,
        },
        "start": {"name": options["resume_adapter_file"], "sha256": facts.start},
        "data": {
            "name": options["data"],
            "train": train.as_json(),
            "valid": valid.as_json(),
            "longest": max(train.longest, valid.longest),
        },
        "optimizer": {
            "name": options["optimizer"],
            "learning_rate": options["learning_rate"],
            "lr_schedule": options["lr_schedule"],
            "open_schedule": facts.open_schedule,
            "settings": options["optimizer_config"].get(options["optimizer"]) or {},
            "usual_settings": facts.usual_settings,
        },
        "objective": facts.objective,
        "options": {name: options[name] for name in SAME_OPTIONS},
    }
    result: dict[str, Any] = json.loads(json.dumps(identity))
    return result


def check_identity(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str | Path
) -> list[str]:
    """Raise `UserError` unless the checkpoint at ``where`` is of the same run. Return what a user
    should know of one that is."""
    with refusing(f"{where} does not say which run it is of", "take another one"):
        difference = next(_differences(ours, theirs), None)
        notes = [] if difference is not None else [*_notes(ours, theirs)]
    if difference is not None:
        problem, same = difference
        raise UserError(
            f"{where} {problem}", f"resume with {same}, or start anew with another --checkpoint-dir"
        )
    return notes


def start_digest(identity: Mapping[str, Any]) -> str:
    """Return a digest of what decides what a run's starting model says of its data: the same where
    files have been moved, or only the optimizer differs."""
    model = identity["model"]
    data = identity["data"]
    return json_digest(
        [
            model["sha256"],
            identity["start"]["sha256"],
            data["train"],
            data["valid"],
            _meant(identity["options"], identity),
        ]
    )


def set_digest(facts: SetFacts, most: int) -> str:
    """Return a digest of what a model is given of a set: the first ``most`` tokens of its samples,
    the answers among them, and which of these are wanted."""
    # Where not all rows have become tokens, one of the others may be the longest.
    limit = min(most, facts.longest) if facts.content is None else most
    return json_digest([facts.as_json(), limit])


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how the checkpoint's run differs from ours, and what would be the same."""
    now = ours["model"]
    then = theirs["model"]
    if now["sha256"] != then["sha256"]:
        what = f"{then['name']}, not {now['name']}"
        if now["name"] == then["name"]:
            what = f"{now['name']} had other weights or another config.json then"
        yield f"is a checkpoint of another model: {what}", "that model"
    yield from _differences_of_start(ours, theirs)
    now = ours["optimizer"]
    then = theirs["optimizer"]
    is_open = now["open_schedule"] is not None and _open(now) == _open(then)
    if _meant_optimizer(now, now, is_open) != _meant_optimizer(then, now, is_open):
        yield f"was made with the optimizer {_optimizer(then)}, not {_optimizer(now)}", "that"
    meant_now, meant_then = (_meant(each["options"], ours) for each in (ours, theirs))
    for name, value in ours["options"].items():
        # A checkpoint of an older release lacks options that it did not know.
        if meant_then.get(name, meant_now[name]) != meant_now[name]:
            yield f"was made with {name} {theirs['options'][name]}, not {value}", "that"
    # Last, since another option, such as max_seq_length, can be why the tokens are others.
    yield from _differences_of_data(ours["data"], theirs["data"])


def _differences_of_start(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    now = ours["start"]
    then = theirs.get("start")
    name = "resume_adapter_file"
    if then is None:  # An older release knew the name of the file alone.
        then = {"name": theirs["options"].get(name), "sha256": now["sha256"]}
        if then["name"] == now["name"]:
            return
    elif then["sha256"] == now["sha256"]:
        return
    what = f"{then['name']}, not {now['name']}"
    if then["name"] == now["name"]:
        what = f"{now['name']}, which had other weights then"
    yield f"was made with {name} {what}", "that file"


def _differences_of_data(
    now: Mapping[str, Any], then: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for name in ("train", "valid"):
        # A checkpoint of an older release does not know the labels.
        changed = [
            key for key in now[name] if then[name].get(key, now[name][key]) != now[name][key]
        ]
        if changed:
            what = {"labels": "labels", "content": "rows"}.get(changed[-1], "tokens")
            yield (
                f"is a checkpoint of a run on other data: its {name} set came from {then['name']} "
                f"with {then[name]['samples']} samples, now it is {now['name']} with "
                f"{now[name]['samples']}, and the {what} differ",
                "the same data and tokenizer",
            )


def _notes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield what has changed in a run that goes on all the same."""
    if _open(ours["optimizer"]) is not None:
        now, then = (each["optimizer"]["lr_schedule"] for each in (ours, theirs))
        if now["arguments"] != then["arguments"]:
            yield (
                f"lr_schedule {now['name']} follows --iters: its arguments are {now['arguments']} "
                f"from here on, and were {then['arguments']}"
            )
    now, then = (each["options"]["max_seq_length"] for each in (ours, theirs))
    if now != then and any("content" in ours["data"][name] for name in ("train", "valid")):
        yield (
            f"max_seq_length is {now} from here on, and was {then}: no row that was looked at is "
            "so long, but not all were"
        )
    if theirs.get("objective", ours["objective"]) != ours["objective"]:
        yield f"the module of objective {ours['options']['objective']} has changed since"


def _meant(options: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as all those that mean the same to the model and the data of a ``run``."""
    meant = dict(options)
    model = run["model"]
    layers = model["layers"]
    most = run["data"]["longest"]
    if layers is not None and options["num_layers"] == -1:
        meant["num_layers"] = layers
    if options.get("dtype") is None:
        meant["dtype"] = model["dtype"]
    if isinstance(options["max_seq_length"], int) and most:
        meant["max_seq_length"] = min(options["max_seq_length"], most)
    if (facts := facts_of(run["options"]["objective"])) is not None and "beta" in options:
        meant["beta"] = facts.beta if options["beta"] is None else options["beta"]
    if options["fine_tune_type"] == "full":
        meant["lora_parameters"] = None
    elif isinstance(lora := options["lora_parameters"], Mapping):
        lora = {key: value for key, value in lora.items() if value is not None}
        meant["lora_parameters"] = lora | {"keys": sorted(lora["keys"])} if "keys" in lora else lora
    return meant


def _meant_optimizer(
    optimizer: Mapping[str, Any], run: Mapping[str, Any], is_open: bool
) -> list[Any]:
    """Return an optimizer as all that mean the same; of an open schedule only what is asked."""
    settings = {**run["usual_settings"], **optimizer["settings"]}
    if is_open:
        return [optimizer["name"], settings, optimizer["learning_rate"], _open(optimizer)]
    schedule = dict(optimizer["lr_schedule"] or steady_schedule(optimizer["learning_rate"]))
    if not schedule.get("warmup"):
        schedule = {key: schedule[key] for key in schedule if not key.startswith("warmup")}
    elif not schedule.get("warmup_init"):
        schedule["warmup_init"] = 0
    arguments = schedule.get("arguments")
    if schedule["name"] == STEADY and arguments and arguments[0] == arguments[1]:
        schedule["arguments"] = arguments[:2]  # the rate stays, over however many steps
    if schedule["name"] == "cosine_decay" and arguments and len(arguments) == 2:
        schedule["arguments"] = [*arguments, 0]
    return [optimizer["name"], settings, schedule]


def _open(optimizer: Mapping[str, Any]) -> Any:
    return optimizer.get("open_schedule")


def _optimizer(optimizer: Mapping[str, Any]) -> str:
    rate = optimizer["lr_schedule"] or optimizer["learning_rate"]
    return f"{optimizer['name']} {optimizer['settings']} with the learning rate {rate}"


def _model(path: Path, read: ReadBytes | None) -> str:
    """Return a digest of the configuration, and of the weights' headers and samples."""
    digest = hashlib.sha256((path / CONFIG_FILE).read_bytes())
    with ThreadPoolExecutor(_READERS) as pool:
        for file in sorted(path.glob(MODEL_FILES)):
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            offsets = [i * max(0, size - _PROBE_BYTES) // (_PROBES - 1) for i in range(_PROBES)]
            probe = partial(read or partial(read_bytes, path), file.name)
            for data in pool.map(probe, offsets, [min(_PROBE_BYTES, size)] * _PROBES):
                digest.update(data)
    return digest.hexdigest()
