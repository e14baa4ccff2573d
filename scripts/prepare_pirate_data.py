#!/usr/bin/env python3
"""Make a data set of questions answered in pirate talk, for training with mlx-lm or shardmlx.

The dialogues come from the PyPI package chatterbot-corpus, the pirate talk from arrr. The result is
the same on every machine: JSON lines of chat messages for train, valid and test, which share no
prompt.
"""

import argparse
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import yaml
from _prepare import already_there, new_directory, packaged_file, packaged_module, run

from shardmlx.errors import UserError

FILES = ("train.jsonl", "valid.jsonl", "test.jsonl")
NOT_TALK = {"coding"}
ONE_PROMPT_MANY_ANSWERS = {"computers", "emotion"}
NO_JOKING_MATTER = re.compile(
    r"assassin|fatal|hitler|suicide|shot dead|killed|testicle|pleasure bot|that you die|guns", re.I
)
MAX_CHARACTERS = 300
TRAIN_SHARE, VALID_SHARE = 0.8, 0.1  # of the prompts; test has the rest
REMEDY = "pip install chatterbot-corpus==1.3.3 arrr==1.0.6"

Pair = tuple[str, str]


def dialogues(directory: Path) -> Iterator[Pair]:
    """Yield the (prompt, answer) pairs of the corpus, in the order of files and lines."""
    for file in sorted(directory.glob("*.yml")):
        if file.stem in NOT_TALK:
            continue
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]:
            if not isinstance(turns, list):
                continue  # the corpus has one stray line of text among its lists
            if file.stem in ONE_PROMPT_MANY_ANSWERS:
                yield from ((turns[0], answer) for answer in turns[1:])
            else:
                yield from zip(turns[::2], turns[1::2], strict=False)


def tidy(text: str) -> str:
    """Return text with single spaces, no shouting, a capital first, and `i` as `I`."""
    text = " ".join(text.split())
    text = text.lower() if text.isupper() and " " in text else text
    return re.sub(r"\bi\b", "I", text[:1].upper() + text[1:])


def prompt_key(prompt: str) -> str:
    """Return a key that is equal for prompts that differ only in capitals and punctuation."""
    return " ".join(re.findall(r"\w+", prompt.casefold()))


def pirate(answer: str, translate: Callable[[str], str]) -> str:
    """Return `answer` in pirate words, then one of arrr's cries, which `random` chooses.

    arrr knows words only without punctuation and capitalises its input, so this calls it for each
    word. It adds a cry to some full stops, so this calls it with a full stop until it adds one.
    """

    def word(match: re.Match[str]) -> str:
        said = translate(match[0])
        return said if match[0][0].isupper() else said[0].lower() + said[1:]

    sentence = re.sub(r"[A-Za-z]+", word, answer)
    stop = "" if sentence[-1] in '.!?"' else "."
    cry = ""
    while not cry:
        cry = translate(".").removeprefix(".")
    return sentence + stop + cry


def digest(*parts: object) -> bytes:
    """Return a key that orders things at random, equally on every machine and in every Python."""
    return hashlib.sha256(repr(parts).encode()).digest()


def make(
    pairs: Sequence[Pair], translate: Callable[[str], str], seed: int, *, preferences: bool = False
) -> dict[str, list[str]]:
    """Return the lines of each file. All answers to one prompt are in the same file.

    With `preferences` the pirate's answer is chosen, and the answer before its translation
    rejected. The state of `random` stays as it was.
    """
    answers: dict[str, list[Pair]] = {}
    for prompt, answer in dict.fromkeys((tidy(prompt), tidy(answer)) for prompt, answer in pairs):
        text = f"{prompt} {answer}"
        fits = len(text) <= MAX_CHARACTERS and not NO_JOKING_MATTER.search(text)
        if prompt_key(prompt) and prompt_key(answer) and fits:
            answers.setdefault(prompt_key(prompt), []).append((prompt, answer))

    keys = sorted(answers, key=lambda key: digest(seed, key))
    valid, test = (round(len(keys) * share) for share in (TRAIN_SHARE, TRAIN_SHARE + VALID_SHARE))
    lines: dict[str, list[str]] = {}
    before = random.getstate()
    for name, part in zip(FILES, (keys[:valid], keys[valid:test], keys[test:]), strict=True):
        chosen = [pair for key in part for pair in answers[key]]
        lines[name] = []
        for prompt, answer in sorted(chosen, key=lambda pair: digest(seed, *pair)):
            random.seed(digest(seed, prompt, answer))
            said = pirate(answer, translate)
            row: dict[str, object] = {"prompt": prompt, "chosen": said, "rejected": answer}
            if not preferences:
                turns = (("user", prompt), ("assistant", said))
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            lines[name].append(json.dumps(row, ensure_ascii=False))
    random.setstate(before)
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the data; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(".cache/pirate"),
        help="directory to make (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the split and of the pirates' cries (default: %(default)s)",
    )
    parser.add_argument(
        "--preferences",
        action="store_true",
        help="write pairs of answers: the pirate's is chosen, the plain one rejected",
    )
    args = parser.parse_args(argv)
    output: Path = args.output

    corpus = packaged_file("chatterbot_corpus", "data/english", REMEDY)
    translate = packaged_module("arrr", REMEDY).translate
    lines = make(list(dialogues(corpus)), translate, args.seed, preferences=args.preferences)
    texts = {name: "".join(f"{line}\n" for line in lines[name]) for name in FILES}
    counts = ", ".join(f"{len(lines[name])} in {name}" for name in FILES)
    if already_there(output, FILES):
        if any((output / name).read_text(encoding="utf-8") != texts[name] for name in FILES):
            raise UserError(f"{output} holds other data: remove it or give another --output")
        print(f"{output} is already complete: {counts}")
        return 0
    with new_directory(output) as directory:
        for name in FILES:
            (directory / name).write_text(texts[name], encoding="utf-8")
    print(f"{output}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
