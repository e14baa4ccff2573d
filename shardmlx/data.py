"""Data sets, read and tokenised as mlx-lm does, with errors that name file and line.

Only rank 0 reads data; the other ranks get their batches from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import CacheDataset, create_dataset, load_dataset
from mlx_lm.utils import load_tokenizer

from shardmlx.batches import Sample
from shardmlx.config import TrainConfig
from shardmlx.errors import UserError, one_line

Progress = Callable[[str, Sequence[Any]], Iterator[Any]]
"""Iterates over a sequence while showing how far it is; the text says over what."""


@dataclass(frozen=True, slots=True)
class DataSets:
    """Tokenised samples; a set that the run does not need is empty."""

    train: list[Sample] = field(default_factory=list)
    valid: list[Sample] = field(default_factory=list)
    test: list[Sample] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    def sizes(self) -> dict[str, int]:
        """Number of samples in each set."""
        return {"train": len(self.train), "valid": len(self.valid), "test": len(self.test)}


def read_tokenizer(model_path: Path, trust_remote_code: bool, eos: Any) -> TokenizerWrapper:
    """The model's tokenizer, as mlx-lm sets it up."""
    try:
        return load_tokenizer(
            model_path,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=eos,
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(
            f"{model_path} holds no tokenizer that transformers can read: {one_line(error)}"
        ) from None


def read_data(
    config: TrainConfig,
    tokenizer: TokenizerWrapper,
    max_positions: int | None,
    progress: Progress = lambda text, items: iter(items),
) -> DataSets:
    """Read and tokenise what the run needs. ``max_positions`` is the model's own limit."""
    sets: dict[str, list[Sample]] = {}
    warnings = []
    for name, (rows, where) in _read_rows(config, tokenizer).items():
        samples = _tokenise(rows, where, progress(f"tokenising {name}", range(len(rows))))
        _check_lengths(samples, where, config, max_positions)
        too_long = sum(len(tokens) > config.max_seq_length for tokens, _ in samples)
        if too_long:
            longest = max(len(tokens) for tokens, _ in samples)
            warnings.append(
                f"{where(None)}: {too_long} of {len(samples)} sequences are longer than "
                f"--max-seq-length {config.max_seq_length} and are cut (the longest has {longest})"
            )
        only_prompts = sum(
            start >= min(len(tokens), config.max_seq_length) for tokens, start in samples
        )
        if only_prompts:
            warnings.append(
                f"{where(None)}: of {only_prompts} of {len(samples)} sequences only the prompt is "
                f"within --max-seq-length {config.max_seq_length}: nothing is learnt from them"
            )
        if len(samples) < config.batch_size:
            raise UserError(
                f"{where(None)} has {len(samples)} samples, fewer than --batch-size "
                f"{config.batch_size}: lower the batch size or add data"
            )
        sets[name] = _in_order(rows, samples)
    if config.train and "valid" not in sets:
        warnings.append(f"{config.data} has no validation set: training without validation")
    return DataSets(**sets, warnings=tuple(warnings))


Where = Callable[[int | None], str]
"""Names a row of a data set, or with None the set itself."""


def _read_rows(config: TrainConfig, tokenizer: TokenizerWrapper) -> dict[str, tuple[Any, Where]]:
    """The data sets that the run needs and that exist, as mlx-lm's own data-set objects."""
    needed = (["train", "valid"] if config.train else []) + (["test"] if config.test else [])
    directory = Path(config.data)
    if config.hf_dataset is not None or not directory.exists():
        found = _read_from_hub(config, tokenizer)
        names: dict[str, Where] = {
            name: lambda i, name=name: _row_of_hub(config.data, name, i)  # type: ignore[misc]
            for name in needed
        }
    elif directory.is_dir():
        found = {
            name: _read_file(directory / f"{name}.jsonl", config, tokenizer) for name in needed
        }
        names = {
            name: lambda i, name=name: _row_of_file(directory / f"{name}.jsonl", i)  # type: ignore[misc]
            for name in needed
        }
    else:
        raise UserError(f"--data {directory} is a file: name the directory with train.jsonl")
    for name in set(needed) - {"valid"}:
        if not len(found[name]):
            raise UserError(
                f"{names[name](None)} is missing or empty: --data {config.data} must hold it"
            )
    return {name: (found[name], names[name]) for name in needed if len(found[name])}


def _row_of_file(path: Path, i: int | None) -> str:
    return str(path) if i is None else f"{path}:{i + 1}"


def _row_of_hub(data: str, name: str, i: int | None) -> str:
    return f"{data}, {name} set" + ("" if i is None else f", row {i}")


def _read_file(path: Path, config: TrainConfig, tokenizer: TokenizerWrapper) -> Any:
    if not path.exists():
        return []
    try:
        # In bytes: text has line ends, such as U+2028, that are none in JSON.
        with path.open("rb") as file:
            rows = [_parse(line, f"{path}:{number}") for number, line in enumerate(file, 1)]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    if not rows:
        return []
    return _create(rows, str(path), config, tokenizer)


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode().rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise UserError(f"{where} is not JSON: {what} at column {error.colno}") from None
    if not isinstance(row, Mapping):
        raise UserError(f"{where} is no JSON object: write one object on each line")
    return row


def _create(rows: Any, where: str, config: TrainConfig, tokenizer: TokenizerWrapper) -> Any:
    try:
        return create_dataset(rows, tokenizer, config)
    except ValueError as error:
        if config.mask_prompt and config.text_feature in rows[0]:
            raise UserError(
                f"{where}: --mask-prompt needs prompts, and this is plain text: "
                "drop the flag, or write prompt and completion"
            ) from None
        keys = ", ".join(map(repr, rows[0])) or "none"
        raise UserError(
            f"{where}: no format that mlx-lm knows has the keys {keys}: write messages, "
            "prompt and completion, or text"
        ) from error


def _read_from_hub(config: TrainConfig, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    try:
        train, valid, test = load_dataset(config, tokenizer)
    except ImportError:
        raise UserError(
            f"--data {config.data}: there is no such directory; to read it from Hugging Face, "
            "pip install datasets"
        ) from None
    except Exception as error:
        raise UserError(
            f"--data {config.data}: there is no such directory, and Hugging Face does not give it: "
            f"{one_line(error)}"
        ) from None
    return {"train": train, "valid": valid, "test": test}


def _tokenise(rows: Any, where: Where, indices: Iterator[int]) -> list[Sample]:
    samples: list[Sample] = []
    for i in indices:
        try:
            tokens, start = rows.process(rows[i])
        except Exception as error:
            # Whatever a template or a tokenizer raises, the row is to blame.
            what = f"has no key {error}" if isinstance(error, KeyError) else one_line(error)
            raise UserError(f"{where(i)} cannot be tokenised: {what}") from None
        if not len(tokens):
            raise UserError(f"{where(i)} is empty: take the line out")
        samples.append((list(tokens), start))
    return samples


def _in_order(rows: Any, samples: Sequence[Sample]) -> list[Sample]:
    """As mlx-lm cuts them into batches: it sorts rows, stably, by what it takes for their length,
    which for rows of JSON is the number of their keys."""
    length = CacheDataset(rows).itemlen
    return [samples[i] for i in sorted(range(len(samples)), key=length)]


def _check_lengths(
    samples: Sequence[Sample], where: Where, config: TrainConfig, max_positions: int | None
) -> None:
    for i, (tokens, start) in enumerate(samples):
        length = min(len(tokens), config.max_seq_length)
        if max_positions is not None and length > max_positions:
            raise UserError(
                f"{where(i)} has {len(tokens)} tokens, and the model's limit is {max_positions}: "
                f"use --max-seq-length {max_positions} to cut it"
            )
        if len(tokens) > config.max_seq_length and config.long_sequences == "error":
            raise UserError(
                f"{where(i)} has {len(tokens)} tokens, more than --max-seq-length "
                f"{config.max_seq_length}: raise it, split the text, or use --long-sequences cut"
            )
        if start >= length and config.long_sequences == "error":
            raise UserError(
                f"{where(i)}: the prompt alone has {start} tokens, so nothing is left to learn "
                f"within --max-seq-length {config.max_seq_length}: raise it or take the line out"
            )
