"""Data sets, read and tokenised as mlx-lm does, with errors that name file and line.

Only rank 0 reads data; the other ranks get their batches from it.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import CacheDataset, create_dataset, load_dataset

from shardmlx.config.specs import DataOptions
from shardmlx.engine.batches import Sample, Samples
from shardmlx.errors import UserError, one_line, unknown_token
from shardmlx.training.data_files import find_data_file, parse_rows, row_name
from shardmlx.training.data_rows import check_row

Progress = Callable[[str, Sequence[Any]], Iterator[Any]]
"""Iterates over a sequence while showing how far it is; the text says over what."""


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
    """Read and tokenise what the run needs. ``max_positions`` is the model's own limit, and
    ``vocabulary`` the number of tokens that it knows.
    """
    sets: dict[str, Samples] = {}
    warnings = []
    for name, parts in _find_sets(options, tokenizer).items():
        where = parts[0].where
        tokenised = [_tokenise(name, part, progress) for part in parts]
        for part, each in zip(parts, tokenised, strict=True):
            _check_lengths(each, part.where, options, max_positions)
            if vocabulary is not None:
                _check_tokens(each, part.where, vocabulary, options.max_seq_length)
        weights = [part.weight if name == "train" else 1 for part in parts]
        samples = _mixed(tokenised, [_order(part.rows) for part in parts], weights)
        too_long = int((samples.lengths > options.max_seq_length).sum())
        if too_long:
            warnings.append(
                f"{where(None)}: {too_long} of {len(samples)} sequences are longer than "
                f"--max-seq-length {options.max_seq_length} and are cut (the longest has "
                f"{samples.lengths.max()})"
            )
        ends = np.minimum(samples.lengths, options.max_seq_length)
        only_prompts = int((samples.starts >= ends).sum())
        if only_prompts:
            warnings.append(
                f"{where(None)}: of {only_prompts} of {len(samples)} sequences only the prompt is "
                f"within --max-seq-length {options.max_seq_length}: nothing is learnt from them"
            )
        if len(samples) < options.batch_size:
            raise UserError(
                f"{where(None)} has {len(samples)} samples, fewer than --batch-size "
                f"{options.batch_size}",
                "lower the batch size or add data",
            )
        sets[name] = samples
    if options.train and "valid" not in sets:
        warnings.append(f"{options.data} has no validation set: training without validation")
    return DataSets(**sets, warnings=tuple(warnings))


Where = Callable[[int | None], str]
"""Names a row of a data set, or with None the set itself."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A set of the data, or a part of it: its rows, as mlx-lm's own data-set object.

    ``weight`` is how often each row comes in training.
    """

    where: Where
    rows: Any = ()
    weight: float = 1


def _find_sets(options: DataOptions, tokenizer: TokenizerWrapper) -> dict[str, list[_Found]]:
    """Find the data sets that the run needs and that exist; a mixture has several parts."""
    needed = (["train", "valid"] if options.train else []) + (["test"] if options.test else [])
    directory = Path(options.data)
    if options.hf_dataset is not None:
        given = options.hf_dataset
        parts = [_read_mixed(each, options, tokenizer) for each in _entries(given)]
    elif not directory.exists():
        parts = [_read_from_hub(options.data, options, tokenizer)]
    elif directory.is_dir():
        parts = [
            {
                name: _read_file(find_data_file(directory, name), options, tokenizer)
                for name in needed
            }
        ]
    else:
        raise UserError(f"--data {directory} is a file", "name the directory with train.jsonl")
    for name in set(needed) - {"valid"}:
        for part in parts:
            if not len(part[name].rows):
                raise UserError(
                    f"{part[name].where(None)} is missing or empty",
                    f"--data {options.data} must hold it",
                )
    found = {name: [part[name] for part in parts if len(part[name].rows)] for name in needed}
    for several in found.values():
        if len(several) > 1:  # as mlx-lm orders the rows of all of them
            several.sort(key=lambda part: len(part.rows[0]))
    return {name: several for name, several in found.items() if several}


def _entries(given: Mapping[str, Any] | Sequence[Any]) -> list[Mapping[str, Any]]:
    return [given] if isinstance(given, Mapping) else list(given)


def _row_of_file(path: Path, i: int | None) -> str:
    return str(path) if i is None else row_name(path, i)


def _row_of_hub(data: str, name: str, i: int | None) -> str:
    return f"{data}, {name} set" + ("" if i is None else f", row {i}")


def _read_file(path: Path, options: DataOptions, tokenizer: TokenizerWrapper) -> _Found:
    where = functools.partial(_row_of_file, path)
    if not path.exists():
        return _Found(where)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "give a file that you may read"
        ) from None
    rows = parse_rows(path, content)
    if not rows:
        return _Found(where)
    return _Found(where, _create(rows, str(path), options, tokenizer))


def _create(rows: Any, where: str, options: DataOptions, tokenizer: TokenizerWrapper) -> Any:
    try:
        return create_dataset(rows, tokenizer, options)
    except ValueError as error:
        if options.mask_prompt and options.text_feature in rows[0]:
            raise UserError(
                f"{where}: --mask-prompt needs prompts, and this is plain text",
                "drop the flag, or write prompt and completion",
            ) from None
        keys = ", ".join(map(repr, rows[0])) or "none"
        raise UserError(
            f"{where}: no format that mlx-lm knows has the keys {keys}",
            "write messages, prompt and completion, or text",
        ) from error


def _read_mixed(
    entry: Mapping[str, Any], options: DataOptions, tokenizer: TokenizerWrapper
) -> dict[str, _Found]:
    """Read one data set of ``hf_dataset``, alone or in a mixture."""
    alone = SimpleNamespace(
        hf_dataset=dict(entry),
        data=entry["path"],
        train=options.train,
        test=options.test,
        mask_prompt=options.mask_prompt,
    )
    return _read_from_hub(entry["path"], alone, tokenizer, float(entry.get("weight", 1)))


def _read_from_hub(
    data: str, options: Any, tokenizer: TokenizerWrapper, weight: float = 1
) -> dict[str, _Found]:
    """Read the data set of mlx-lm's ``options`` with the ``datasets`` package."""
    is_path = getattr(options, "hf_dataset", None) is None
    try:
        sets = load_dataset(options, tokenizer)
    except ImportError:
        if is_path:
            raise UserError(
                f"--data {data}: there is no such directory",
                "name another, or, to read it from Hugging Face, pip install datasets",
            ) from None
        raise UserError(
            f"hf_dataset {data} needs the datasets package", "pip install datasets"
        ) from None
    except Exception as error:
        if is_path:
            raise UserError(
                f"--data {data}: there is no such directory, and Hugging Face does not give "
                f"it: {one_line(error)}",
                "name another",
            ) from None
        raise UserError(
            f"hf_dataset {data}: {one_line(error)}", "look at its path, config and splits"
        ) from None
    return {
        name: _Found(functools.partial(_row_of_hub, data, name), rows, weight=weight)
        for name, rows in zip(("train", "valid", "test"), sets, strict=True)
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


def _tokenise(name: str, found: _Found, progress: Progress) -> Samples:
    rows, where = found.rows, found.where
    tokens = array("i")
    bounds = []
    for i in progress(f"tokenising {name}", range(len(rows))):
        begin, row = len(tokens), rows[i]
        check_row(rows, row, where(i))
        try:
            ids, start = rows.process(row)
            tokens.extend(ids)
        except Exception as error:
            # Whatever a template or a tokenizer raises, the row is to blame.
            what = f"it has no key {error}" if isinstance(error, KeyError) else one_line(error)
            raise UserError(
                f"{where(i)} cannot be tokenised: {what}", "mend the row, or take it out"
            ) from None
        if len(tokens) == begin:
            raise UserError(f"{where(i)} gives no token", "take the row out")
        bounds.append((begin, len(tokens), start))
    return Samples(np.frombuffer(tokens, np.int32), np.array(bounds, np.int64))


def _order(rows: Any) -> np.ndarray:
    """Return the order in which mlx-lm cuts rows into batches. It sorts them, stably, by what it
    takes for their length, which for rows of JSON is the number of their keys."""
    length = CacheDataset(rows).itemlen
    return np.array(sorted(range(len(rows)), key=length), np.int64)


def _check_tokens(samples: Samples, where: Where, vocabulary: int, most: int) -> None:
    """Raise ``UserError`` for a row with a token that the model does not know among the first
    ``most``: the others are cut off."""
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
    for i, (whole, start) in enumerate(
        zip(samples.lengths.tolist(), samples.starts.tolist(), strict=True)
    ):
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
                "raise it, split the text, or use --long-sequences cut",
            )
        if start >= length and options.long_sequences == "error":
            raise UserError(
                f"{where(i)}: the prompt alone has {start} tokens, so nothing is left to learn "
                f"within --max-seq-length {options.max_seq_length}",
                "raise it or take the line out",
            )
