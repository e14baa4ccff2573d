"""Data sets, read on rank 0 and tokenised as mlx-lm does, with errors that name file and line."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.data import LAST, FeatureKeys, WantedData
from shardmlx.config.objective import SFT, facts_of, rows_together
from shardmlx.engine.batches import BASELINE, KNOWN, WANTED, Samples, padded_width, token_ids
from shardmlx.errors import UserError, file_access, one_line, unknown_token
from shardmlx.training.chat_template import ChatTemplate
from shardmlx.training.data_files import find_data_file, parse_rows, row_name, unread_files
from shardmlx.training.data_rows import Conversations, find_format
from shardmlx.training.preference_rows import PreferenceRows
from shardmlx.training.row_notes import RowNotes

Progress = Callable[[str, Sequence[Any]], Iterator[Any]]
"""Iterates over a sequence and shows progress; the text names the sequence."""


NO_SAMPLES = Samples(np.empty(0, np.int32), np.empty((0, 3), np.int64))


@dataclass(frozen=True, slots=True)
class DataSets:
    """Tokenised samples; a set that the run does not need is empty."""

    train: Samples = NO_SAMPLES
    valid: Samples = NO_SAMPLES
    test: Samples = NO_SAMPLES
    warnings: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "valid": len(self.valid), "test": len(self.test)}


def read_data(
    wanted: WantedData,
    tokenizer: TokenizerWrapper,
    max_positions: int | None,
    progress: Progress = lambda text, items: iter(items),
    *,
    vocabulary: int | None = None,
) -> DataSets:
    """Read and tokenise the run's sets, for a model's ``max_positions`` and ``vocabulary``. Raises
    ``UserError``, also for a set without a token that counts in the loss."""
    sets: dict[str, Samples] = {}
    found, warnings = _find_sets(wanted)
    for name, parts in found.items():
        where = parts[0].name
        tokenised = []
        for part in parts:
            samples, heads, notes = _tokenise(name, part, tokenizer, wanted, progress)
            warnings += notes
            _check(samples, part.name, wanted, max_positions, vocabulary)
            if wanted.objective != SFT:
                samples, cuts = _fitted(samples, heads, part.name, wanted)
                warnings += cuts
            elif not part.adds_nulls:  # a column is a key of all rows
                # mlx-lm cuts rows into batches by the number of their keys, which it takes for
                # their length.
                samples = samples[np.argsort([len(row) for row in part.rows], kind="stable")]
            tokenised.append(samples)
        weights = [part.weight if name == "train" else 1 for part in parts]
        samples = _mixed(tokenised, weights, rows_together(wanted.objective))
        warnings += _look_for_losses(samples, where, wanted.max_seq_length)
        if len(samples) < wanted.batch_size:
            raise UserError(
                f"{where} has {len(samples)} samples, fewer than --batch-size {wanted.batch_size}",
                "lower the batch size or add data",
            )
        sets[name] = samples
    return DataSets(**sets, warnings=tuple(warnings))


def in_one(sets: Sequence[DataSets]) -> DataSets:
    """Return the tokens of all sets in one, for what does not ask what is known of them."""

    def joined(parts: Sequence[Samples]) -> Samples:
        tokens = [Samples(each.tokens, each.bounds) for each in parts if len(each)]
        return _mixed(tokens, [1] * len(tokens), 1) if tokens else NO_SAMPLES

    return DataSets(
        train=joined([each.train for each in sets]),
        valid=joined([each.valid for each in sets]),
        test=joined([each.test for each in sets]),
    )


def longest_input(samples: Samples, max_seq_length: int) -> int:
    """Return T of the longest micro-batch that these samples can make."""
    return min(padded_width(int(samples.lengths.max())), max_seq_length) - 1


def mean_lengths(
    samples: Samples, batch_size: int, max_seq_length: int, widths: Sequence[int] = ()
) -> tuple[int, int, float]:
    """Return mean lengths, padded as single rows and not, and the latter's share in the loss."""
    samples = samples[: max(1, len(samples) // batch_size) * batch_size]
    lengths = np.maximum(samples.lengths, 2)
    padded, exact = (
        np.minimum(each, max_seq_length) - 1 for each in (padded_width(lengths), lengths)
    )
    if widths:
        inputs = np.array(widths) - 1
        padded = inputs[np.searchsorted(inputs, padded)]
    share = samples.counted(max_seq_length).sum() / exact.sum()
    return round(float(padded.mean())), round(float(exact.mean())), float(share)


_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
"""The splits of ``hf_dataset`` that are read by default, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class _RawSet:
    """A set of the data, or a part of it: rows with the text to learn under ``keys``. ``name`` is
    its file, or its place on the hub; each row comes ``weight`` times in training. ``others`` names
    other files if there are no rows."""

    name: str
    keys: FeatureKeys
    rows: Sequence[Mapping[str, Any]] = ()
    adds_nulls: bool = False
    weight: float = 1
    others: str = ""


def _find_sets(wanted: WantedData) -> tuple[dict[str, list[_RawSet]], list[str]]:
    """Find the sets that the run needs, mixtures in parts; return messages of missing ones too."""
    options = wanted.options
    directory, given = Path(options.data), options.hf_dataset
    sources: list[Callable[[str], _RawSet]]
    if given is not None:
        entries = [given] if isinstance(given, Mapping) else given
        sources = [
            partial(_read_entry, each, f"hf_dataset {each['path']}", None) for each in entries
        ]
    elif not directory.exists():
        splits = {f"{name}_split": name for name in _SPLITS}
        entry = {"path": options.data, **splits, **asdict(options.features)}
        where = f"there is no directory {options.data}; as a Hugging Face data set it"
        sources = [partial(_read_entry, entry, where, "valid")]
    elif directory.is_dir():
        sources = [partial(_read_file, directory, options.features)]
    else:
        raise UserError(f"--data {directory} is a file", "name the directory with train.jsonl")
    sets, warnings = {}, []
    for name in ["train", "valid"] * wanted.train + ["test"] * options.test:
        parts = [read(name) for read in sources]
        found = [part for part in parts if len(part.rows)]
        for part in parts:
            if not len(part.rows) and name != "valid":
                raise UserError(
                    f"{part.name} is missing or empty{part.others}",
                    f"--data {options.data} must hold it",
                )
        if found:
            # mlx-lm orders the rows of all parts together.
            sets[name] = sorted(found, key=lambda part: len(part.rows[0]))
        else:
            others = parts[0].others if parts else ""
            warnings.append(
                f"{options.data} has no validation set{others}: training without validation"
            )
    return sets, warnings


def _read_file(directory: Path, keys: FeatureKeys, name: str) -> _RawSet:
    path = find_data_file(directory, name)
    if not path.exists():
        others = ", ".join(unread_files(directory))
        return _RawSet(str(path), keys, others=f", and {others} is not read" if others else "")
    with file_access("read", path, "give a file that you may read"):
        content = path.read_bytes()
    return _RawSet(str(path), keys, parse_rows(path, content), path.suffix == ".parquet")


def _read_entry(entry: Mapping[str, Any], where: str, optional: str | None, name: str) -> _RawSet:
    """Read a set of one data set of Hugging Face's package; the ``optional`` one may be missing."""
    keys = FeatureKeys(**{each: key for each, key in entry.items() if each.endswith("_feature")})
    path, split = entry["path"], entry.get(f"{name}_split", _SPLITS[name])
    remedy = f"name another, or look at path, config and {name}_split of hf_dataset"
    try:
        from datasets import load_dataset

        if split is None:
            raise ValueError(f"{name}_split has no default")
        rows = load_dataset(path, split=split, **(entry.get("config") or {}))
    except ImportError:
        raise UserError(
            f"{where} needs the datasets package", "pip install datasets, or name a directory"
        ) from None
    except Exception as error:
        problem = f"{where} gives no {name} set by split {split}: {one_line(error)}"
        if name != optional:
            raise UserError(problem, remedy) from None
        return _RawSet(where, keys, others=f" ({problem})")
    weight = float(entry.get("weight", 1))
    return _RawSet(f"{path}, {name} set", keys, rows, adds_nulls=True, weight=weight)


def _mixed(parts: Sequence[Samples], weights: Sequence[float], together: int) -> Samples:
    """Join the parts; one of n samples gives ``weight`` times n, evenly repeated or left out, and
    those that are ``together`` alike."""
    begins = np.cumsum([0, *(len(part.tokens) for part in parts)])
    bounds, known = [], []
    for part, weight, begin in zip(parts, weights, begins[:-1], strict=True):
        n = len(part) // together
        count = max(1, round(weight * n))
        firsts = together * (np.arange(count) * n // count)
        chosen = part[(firsts[:, None] + np.arange(together)).ravel()]
        bounds.append(chosen.bounds + np.array([begin, begin, 0]))
        known += [] if chosen.known is None else [chosen.known]
    tokens = [part.tokens for part in parts]
    return Samples(
        tokens[0] if len(tokens) == 1 else np.concatenate(tokens),
        np.concatenate(bounds),
        np.concatenate(known) if known else None,
    )


def _tokenise(
    name: str, found: _RawSet, tokenizer: TokenizerWrapper, wanted: WantedData, progress: Progress
) -> tuple[Samples, np.ndarray, list[str]]:
    """Return the samples of a set; how many tokens at the begin of each a cut from the left leaves,
    for those that need it; and warnings."""
    rows, facts = found.rows, facts_of(wanted.objective)
    notes = RowNotes(found.name)
    if facts is None:
        tokenise = find_format(
            rows[0],
            found.keys,
            tokenizer,
            found.name,
            loss_on=wanted.options.counts,
            adds_nulls=found.adds_nulls,
            notes=notes,
        )
    else:
        conversations = Conversations(ChatTemplate(tokenizer), LAST, found.adds_nulls, notes)
        preferences = PreferenceRows(conversations, found.keys, facts.is_paired)
        preferences.check_first(rows[0], found.name)
    tokens = array("i")
    bounds, heads, are_wanted = [], [], []
    for i in progress(f"tokenising {name}", range(len(rows))):
        where = row_name(found.name, i)
        row = rows[i]
        notes.take(row)
        answers = (
            [(tokenise(row, where), True)] if facts is None else preferences.tokenise(row, where)
        )
        head = 0
        if facts is not None and any(len(ids) > wanted.max_seq_length for (ids, _), _ in answers):
            head = preferences.head(row, where)
        for (ids, start), is_wanted in answers:
            begin = len(tokens)
            tokens.extend(ids)
            if len(tokens) == begin:
                raise UserError(f"{where} gives no token", "take the row out")
            bounds.append((begin, len(tokens), start))
            heads.append(head)
            are_wanted.append(is_wanted)
    known = None
    if facts is not None:
        known = np.full((len(bounds), KNOWN), np.nan)
        known[:, WANTED], known[:, BASELINE] = are_wanted, 0
    samples = Samples(np.frombuffer(tokens, np.int32), np.array(bounds, np.int64), known)
    return samples, np.array(heads), notes.warnings()


def _fitted(
    samples: Samples, heads: np.ndarray, where: str, wanted: WantedData
) -> tuple[Samples, list[str]]:
    """Cut prompts from the left, behind their ``heads``, until their answers fit in
    ``max_seq_length``, the same of both answers of a pair, and leave out answers that never do;
    return warnings too."""
    most, together = wanted.max_seq_length, rows_together(wanted.objective)
    starts = (samples.starts - heads).reshape(-1, together)
    too_long = np.maximum(samples.lengths - most, 0).reshape(-1, together).max(axis=1)
    fits = (starts.min(axis=1) > too_long) | (too_long == 0)
    cuts = np.repeat(too_long * fits, together)
    tokens = samples.tokens
    for i in np.flatnonzero(cuts * heads):
        # The head moves to the right, over what is cut.
        begin = samples.bounds[i, 0]
        head = tokens[begin : begin + heads[i]].copy()
        tokens[begin + cuts[i] : begin + cuts[i] + heads[i]] = head
    bounds = samples.bounds + cuts[:, None] * np.array([1, 0, -1])
    kept = Samples(tokens, bounds, samples.known)[np.repeat(fits, together).nonzero()[0]]
    what, warnings = "pairs" if together > 1 else "rows", []
    cut, lost = int(((too_long > 0) & fits).sum()), int((~fits).sum())
    if cut:
        warnings.append(
            f"{where}: the prompts of {cut} of {len(fits)} {what} are cut from the left, so that "
            f"the answers fit in --max-seq-length {most}; their system messages stay"
        )
    if lost:
        problem = (
            f"{where}: {lost} of {len(fits)} {what} have an answer that leaves no room for its "
            f"prompt in --max-seq-length {most}"
        )
        if lost == len(fits):
            raise UserError(problem, "raise it")
        warnings.append(f"{problem}: they are left out")
    return kept, warnings


def _look_for_losses(samples: Samples, where: str, most: int) -> Iterator[str]:
    """Yield warnings of cuts at ``most`` tokens and of no loss; ``UserError`` if all have none."""
    count, longest = len(samples), samples.lengths.max()
    if longest > most:
        yield (
            f"{where}: {(samples.lengths > most).sum()} of {count} sequences are longer than "
            f"--max-seq-length {most} and are cut (the longest has {longest})"
        )
    idle = int((samples.counted(most) == 0).sum())
    problem = (
        f"{where}: {idle} of {count} sequences have no token to learn: the answer is empty or "
        f"beyond --max-seq-length {most}, or a text is one token"
    )
    if idle == count:
        raise UserError(problem, "raise it, or write answers")
    if idle:
        yield f"{problem}: nothing is learnt from them"


def _check(
    samples: Samples,
    name: str,
    wanted: WantedData,
    max_positions: int | None,
    vocabulary: int | None,
) -> None:
    """Raise ``UserError`` for a row that is too long, or has a token unknown to the model."""
    lengths, most = samples.lengths, wanted.max_seq_length
    if max_positions is not None and max_positions < most and (lengths > max_positions).any():
        row = int((lengths > max_positions).argmax())
        raise UserError(
            f"{row_name(name, row)} has {lengths[row]} tokens, and the model's limit is "
            f"{max_positions}",
            f"use --max-seq-length {max_positions} to cut it",
        )
    if vocabulary is not None:
        unknown = np.flatnonzero(token_ids(samples.tokens) >= vocabulary)
        begins = samples.bounds[:, 0]
        rows = np.searchsorted(begins, unknown, side="right") - 1
        seen = unknown - begins[rows] < most  # the others are cut off
        if seen.any():
            row, token = int(rows[seen][0]), int(token_ids(samples.tokens[unknown[seen][0]]))
            raise unknown_token(row_name(name, row), token, vocabulary)
