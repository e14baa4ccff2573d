"""Data sets, read and tokenised as mlx-lm does, with errors that name file and line.

Only rank 0 reads data; the other ranks get their batches from it.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import CacheDataset, create_dataset, load_dataset

from shardmlx.common.digests import file_digest
from shardmlx.config.specs import DataOptions
from shardmlx.engine.batches import Sample, Samples
from shardmlx.errors import UserError, one_line
from shardmlx.training.data_rows import check_row
from shardmlx.training.token_cache import DataCache, Tokenised

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
    tokenizer: Callable[[], TokenizerWrapper],
    max_positions: int | None,
    progress: Progress = lambda text, items: iter(items),
    cache: DataCache | None = None,
) -> DataSets:
    """Read and tokenise what the run needs. ``max_positions`` is the model's own limit.

    Sets that ``cache`` has are not tokenised again, and if it has all, ``tokenizer`` is not called.
    """
    sets: dict[str, Samples] = {}
    warnings = []
    for name, found in _find_sets(options, functools.cache(tokenizer), cache).items():
        where, tokenised = found.where, found.tokenised
        if tokenised is None:
            indices = progress(f"tokenising {name}", range(len(found.rows)))
            tokenised = Tokenised(_tokenise(found.rows, where, indices), _order(found.rows))
            if cache is not None and found.digest is not None:
                cache.keep(found.digest, tokenised)
        samples = tokenised.samples
        _check_lengths(samples, where, options, max_positions)
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
        sets[name] = samples[tokenised.order]
    if options.train and "valid" not in sets:
        warnings.append(f"{options.data} has no validation set: training without validation")
    return DataSets(**sets, warnings=tuple(warnings))


Where = Callable[[int | None], str]
"""Names a row of a data set, or with None the set itself."""

GetTokenizer = Callable[[], TokenizerWrapper]


@dataclass(frozen=True, slots=True)
class _Found:
    """A set of the data: its rows, as mlx-lm's own data-set object, or what became of them in an
    earlier run. ``digest`` is of the bytes of the rows, where they are those of a file."""

    where: Where
    rows: Any = ()
    digest: str | None = None
    tokenised: Tokenised | None = None

    @property
    def is_empty(self) -> bool:
        return self.tokenised is None and not len(self.rows)


def _find_sets(
    options: DataOptions, tokenizer: GetTokenizer, cache: DataCache | None
) -> dict[str, _Found]:
    """Find the data sets that the run needs and that exist."""
    needed = (["train", "valid"] if options.train else []) + (["test"] if options.test else [])
    directory = Path(options.data)
    if options.hf_dataset is not None or not directory.exists():
        rows = _read_from_hub(options, tokenizer)
        found = {
            name: _Found(functools.partial(_row_of_hub, options.data, name), rows[name])
            for name in needed
        }
    elif directory.is_dir():
        found = {
            name: _read_file(directory / f"{name}.jsonl", options, tokenizer, cache)
            for name in needed
        }
    else:
        raise UserError(f"--data {directory} is a file", "name the directory with train.jsonl")
    for name in set(needed) - {"valid"}:
        if found[name].is_empty:
            raise UserError(
                f"{found[name].where(None)} is missing or empty",
                f"--data {options.data} must hold it",
            )
    return {name: found[name] for name in needed if not found[name].is_empty}


def _row_of_file(path: Path, i: int | None) -> str:
    return str(path) if i is None else f"{path}:{i + 1}"


def _row_of_hub(data: str, name: str, i: int | None) -> str:
    return f"{data}, {name} set" + ("" if i is None else f", row {i}")


def _read_file(
    path: Path, options: DataOptions, tokenizer: GetTokenizer, cache: DataCache | None
) -> _Found:
    where = functools.partial(_row_of_file, path)
    if not path.exists():
        return _Found(where)
    digest = hashlib.sha256()
    try:
        # In bytes: text has line ends, such as U+2028, that are none in JSON.
        with path.open("rb") as file:
            if cache is not None:
                tokenised = cache.find(file_digest(file))
                if tokenised is not None:
                    return _Found(where, tokenised=tokenised)
                file.seek(0)
            rows = []
            for number, line in enumerate(file, 1):
                digest.update(line)
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                rows.append(_parse(line, f"{path}:{number}"))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror or error}", "give a file that you may read"
        ) from None
    if not rows:
        return _Found(where)
    return _Found(where, _create(rows, str(path), options, tokenizer()), digest.hexdigest())


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text: {error.reason} at byte {error.start}", "save it as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise UserError(
            f"{where} is not JSON: {what} at column {error.colno}", "mend the line, or take it out"
        ) from None
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets in brackets.
        raise UserError(
            f"{where} cannot be read: {one_line(error)}", "mend the line, or take it out"
        ) from None
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is no JSON object", "write one object on each line")
    return row


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


def _read_from_hub(options: DataOptions, tokenizer: GetTokenizer) -> dict[str, Any]:
    own = tokenizer()
    try:
        train, valid, test = load_dataset(options, own)
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
    return {"train": train, "valid": valid, "test": test}


def _tokenise(rows: Any, where: Where, indices: Iterator[int]) -> Samples:
    tokens = array("i")
    bounds = []
    for i in indices:
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
