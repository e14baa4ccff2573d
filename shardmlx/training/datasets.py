"""Data sets, read and tokenised as mlx-lm does, with errors that name file and line.

Only rank 0 reads data; the other ranks get their batches from it.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.specs import DataOptions, FeatureKeys
from shardmlx.engine.batches import Sample, Samples, padded_width
from shardmlx.errors import UserError, one_line, unknown_token
from shardmlx.training.data_files import find_data_file, parse_rows, row_name, similar_files
from shardmlx.training.data_rows import find_format

Progress = Callable[[str, Sequence[Any]], Iterator[Any]]
"""Iterates over a sequence and shows progress; the text names the sequence."""


@dataclass(frozen=True, slots=True)
class DataSets:
    """Tokenised samples; a set that the run does not need is empty."""

    train: Sequence[Sample] = ()
    valid: Sequence[Sample] = ()
    test: Sequence[Sample] = ()
    warnings: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Number of samples in each set."""
        return {"train": len(self.train), "valid": len(self.valid), "test": len(self.test)}


def read_data(
    options: DataOptions,
    tokenizer: TokenizerWrapper,
    max_positions: int | None,
    progress: Progress = lambda text, items: iter(items),
    *,
    vocabulary: int | None = None,
) -> DataSets:
    """Read and tokenise the sets that the run needs. ``max_positions`` is the model's own limit,
    and ``vocabulary`` the number of tokens that it knows.

    Raises ``UserError``, also for a set without a token that counts in the loss.
    """
    sets: dict[str, Samples] = {}
    found, warnings = _find_sets(options)
    for name, parts in found.items():
        where = parts[0].where
        tokenised, orders = [], []
        for part in parts:
            samples, order = _tokenise(name, part, tokenizer, options.mask_prompt, progress)
            _check_lengths(samples, part.where, options, max_positions)
            if vocabulary is not None:
                _check_tokens(samples, part.where, vocabulary, options.max_seq_length)
            tokenised.append(samples)
            orders.append(order)
        weights = [part.weight if name == "train" else 1 for part in parts]
        samples = _mixed(tokenised, orders, weights)
        warnings += _look_for_losses(samples, where(None), options.max_seq_length)
        if len(samples) < options.batch_size:
            raise UserError(
                f"{where(None)} has {len(samples)} samples, fewer than --batch-size "
                f"{options.batch_size}",
                "lower the batch size or add data",
            )
        sets[name] = samples
    return DataSets(**sets, warnings=tuple(warnings))


def longest_input(samples: Sequence[Sample], max_seq_length: int) -> int:
    """Return T of the longest micro-batch that these samples can make."""
    longest = max(len(tokens) for tokens, _ in samples)
    return min(padded_width(longest), max_seq_length) - 1


def mean_lengths(
    samples: Sequence[Sample], batch_size: int, max_seq_length: int
) -> tuple[int, int, float]:
    """Return the mean lengths of rows, with the padding of a micro-batch of one row and without,
    and the share of the latter that counts in the loss."""
    bounds = np.array([(max(2, len(tokens)), max(1, start)) for tokens, start in samples])
    bounds = bounds[: max(1, len(bounds) // batch_size) * batch_size]
    lengths, starts = bounds.T
    padded, exact = (
        np.minimum(each, max_seq_length) - 1 for each in (padded_width(lengths), lengths)
    )
    counted = np.maximum(exact + 1 - starts, 0)
    means = round(float(padded.mean())), round(float(exact.mean()))
    return *means, float(counted.sum() / exact.sum())


Where = Callable[[int | None], str]
"""Names a row of a data set, or with None the set itself."""


_SPLITS = {"train": "train[:80%]", "valid": "train[-10%:]", "test": None}
"""The splits of ``hf_dataset`` that are read by default, as in mlx-lm."""


@dataclass(frozen=True, slots=True)
class _RawSet:
    """A set of the data, or a part of it, as rows with the text to learn under ``keys``.

    ``weight`` is how often each row comes in training; ``adds_nulls`` is for ``find_format``.
    ``others`` names other files if there are no rows.
    """

    where: Where
    keys: FeatureKeys
    rows: Sequence[Mapping[str, Any]] = ()
    adds_nulls: bool = False
    weight: float = 1
    others: str = ""


def _find_sets(options: DataOptions) -> tuple[dict[str, list[_RawSet]], list[str]]:
    """Find the data sets that the run needs and that exist; a mixture has several parts. Also
    return messages about missing ones."""
    needed = (["train", "valid"] if options.train else []) + (["test"] if options.test else [])
    directory = Path(options.data)
    if options.hf_dataset is not None:
        given = options.hf_dataset
        parts = [
            {name: _read_entry(each, name) for name in needed}
            for each in ([given] if isinstance(given, Mapping) else given)
        ]
    elif not directory.exists():
        parts = [_read_from_hub(options)]
    elif directory.is_dir():
        parts = [{name: _read_file(directory, name, options) for name in needed}]
    else:
        raise UserError(f"--data {directory} is a file", "name the directory with train.jsonl")
    warnings = []
    for name in needed:
        for part in (each[name] for each in parts):
            if not len(part.rows) and name != "valid":
                raise UserError(
                    f"{part.where(None)} is missing or empty{part.others}",
                    f"--data {options.data} must hold it",
                )
        if not any(len(each[name].rows) for each in parts):
            others = parts[0][name].others if parts else ""
            warnings.append(
                f"{options.data} has no validation set{others}: training without validation"
            )
    found = {name: [part[name] for part in parts if len(part[name].rows)] for name in needed}
    for several in found.values():
        if len(several) > 1:  # mlx-lm orders the rows of all of them together
            several.sort(key=lambda part: len(part.rows[0]))
    return {name: several for name, several in found.items() if several}, warnings


def _row_of_file(path: Path, i: int | None) -> str:
    return str(path) if i is None else row_name(path, i)


def _row_of_hub(data: str, name: str, i: int | None) -> str:
    return f"{data}, {name} set" + ("" if i is None else f", row {i}")


def _read_file(directory: Path, name: str, options: DataOptions) -> _RawSet:
    path = find_data_file(directory, name)
    where = functools.partial(_row_of_file, path)
    if not path.exists():
        others = similar_files(directory, name)
        said = f", and there is {', '.join(others)}, which is not read" if others else ""
        return _RawSet(where, options, others=said)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "give a file that you may read"
        ) from None
    return _RawSet(where, options, parse_rows(path, content), path.suffix == ".parquet")


def _read_entry(entry: Mapping[str, Any], name: str) -> _RawSet:
    """Read one data set of ``hf_dataset``, alone or in a mixture. Its keys are its own."""
    keys = FeatureKeys(**{each: key for each, key in entry.items() if each.endswith("_feature")})
    path, how = entry["path"], entry.get("config") or {}
    key = f"{name}_split"
    split = entry.get(key, _SPLITS[name])
    try:
        from datasets import load_dataset

        rows = load_dataset(path, split=split, **how)
    except ImportError:
        raise UserError(
            f"hf_dataset {path} needs the datasets package", "pip install datasets"
        ) from None
    except Exception as error:
        given = "" if split is None else f", {key} {split}"
        raise UserError(
            f"hf_dataset {path}{given}: {one_line(error)}", f"look at path, config and {key}"
        ) from None
    if split is None:
        raise UserError(
            f"hf_dataset {path} names no {key}, and has the splits {', '.join(sorted(rows))}",
            f"name one as {key}",
        )
    where = functools.partial(_row_of_hub, path, name)
    return _RawSet(where, keys, rows, adds_nulls=True, weight=float(entry.get("weight", 1)))


def _read_from_hub(options: DataOptions) -> dict[str, _RawSet]:
    """Return the sets of the hub's data set in ``--data``. Raises ``UserError``."""
    try:
        from datasets import load_dataset

        found = load_dataset(options.data)
    except ImportError:
        raise UserError(
            f"--data {options.data}: there is no such directory",
            "name another, or, to read it from Hugging Face, pip install datasets",
        ) from None
    except Exception as error:
        raise UserError(
            f"--data {options.data}: there is no such directory, and Hugging Face does not give "
            f"it: {one_line(error)}",
            "name another",
        ) from None
    others = f", and has the splits {', '.join(sorted(found))}: name them in hf_dataset"
    return {
        name: _RawSet(
            functools.partial(_row_of_hub, options.data, name),
            options,
            found.get(name, ()),
            adds_nulls=True,
            others="" if name in found else others,
        )
        for name in _SPLITS
    }


def _mixed(
    parts: Sequence[Samples], orders: Sequence[np.ndarray], weights: Sequence[float]
) -> Samples:
    """Return the samples of all parts, each in its order, one part after the other.

    A part of n samples is there with ``weight`` times n of them, evenly repeated or left out.
    """
    begins = np.cumsum([0, *(len(part.tokens) for part in parts)])
    bounds = []
    for part, order, weight, begin in zip(parts, orders, weights, begins[:-1], strict=True):
        n = len(order)
        count = max(1, round(weight * n))
        chosen = part.bounds[order[np.arange(count) * n // count]]
        bounds.append(chosen + np.array([begin, begin, 0]))
    tokens = [part.tokens for part in parts]
    return Samples(
        tokens[0] if len(tokens) == 1 else np.concatenate(tokens), np.concatenate(bounds)
    )


def _tokenise(
    name: str, found: _RawSet, tokenizer: TokenizerWrapper, mask_prompt: bool, progress: Progress
) -> tuple[Samples, np.ndarray]:
    """Return the samples of a set, and the order in which mlx-lm cuts them into batches: it sorts
    rows, stably, by the number of their keys, which it takes for their length."""
    rows, where = found.rows, found.where
    tokenise = find_format(
        rows[0],
        found.keys,
        tokenizer,
        where(None),
        mask_prompt=mask_prompt,
        adds_nulls=found.adds_nulls,
    )
    tokens = array("i")
    bounds, keys = [], []
    for i in progress(f"tokenising {name}", range(len(rows))):
        begin, row = len(tokens), rows[i]
        ids, start = tokenise(row, where(i))
        tokens.extend(ids)
        if len(tokens) == begin:
            raise UserError(f"{where(i)} gives no token", "take the row out")
        bounds.append((begin, len(tokens), start))
        keys.append(len(row))
    order = np.argsort(np.array(keys), kind="stable")
    return Samples(np.frombuffer(tokens, np.int32), np.array(bounds, np.int64)), order


def _look_for_losses(samples: Samples, where: str, most: int) -> Iterator[str]:
    """Yield messages about sequences that are cut at ``most`` tokens, and about those without a
    token that counts in the loss. Raises ``UserError`` if all lack one."""
    is_cut = samples.lengths > most
    if is_cut.any():
        yield (
            f"{where}: {is_cut.sum()} of {len(samples)} sequences are longer than "
            f"--max-seq-length {most} and are cut (the longest has {samples.lengths.max()})"
        )
    counts = samples.counted(most) > 0
    for nothing, why, remedy in (
        (
            ~counts & is_cut,
            f"of {{}} of {len(samples)} sequences only the prompt is within --max-seq-length "
            f"{most}",
            "raise it",
        ),
        (
            ~counts & ~is_cut,
            f"{{}} of {len(samples)} sequences have no token to learn: their answers are empty, or "
            "their texts are one token",
            "write answers",
        ),
    ):
        if nothing.any() and not counts.any():
            raise UserError(f"{where}: {why.format(nothing.sum())}, and no other has any", remedy)
        if nothing.any():
            yield f"{where}: {why.format(nothing.sum())}: nothing is learnt from them"


def _check_tokens(samples: Samples, where: Where, vocabulary: int, most: int) -> None:
    """Raise ``UserError`` for a token unknown to the model among the first ``most`` of a row: the
    others are cut off."""
    unknown = np.flatnonzero((samples.tokens < 0) | (samples.tokens >= vocabulary))
    begins = samples.bounds[:, 0]
    rows = np.searchsorted(begins, unknown, side="right") - 1
    seen = unknown - begins[rows] < most
    if seen.any():
        row, token = int(rows[seen][0]), int(samples.tokens[unknown[seen][0]])
        raise unknown_token(where(row), token, vocabulary)


def _check_lengths(
    samples: Samples, where: Where, options: DataOptions, max_positions: int | None
) -> None:
    for i, whole in enumerate(samples.lengths.tolist()):
        length = min(whole, options.max_seq_length)
        if max_positions is not None and length > max_positions:
            raise UserError(
                f"{where(i)} has {whole} tokens, and the model's limit is {max_positions}",
                f"use --max-seq-length {max_positions} to cut it",
            )
        if whole > options.max_seq_length and options.long_sequences == "error":
            raise UserError(
                f"{where(i)} has {whole} tokens, more than --max-seq-length "
                f"{options.max_seq_length}",
                "raise it, split the text, or use long_sequences: cut",
            )
