#!/usr/bin/env python3
"""Make the tokenizer of Mistral-7B-Instruct-v0.3 out of the PyPI package mistral-common.

The package contains the original SentencePiece model. transformers would read that with a space too
few at the start. So this script writes a tokenizer.json, which transformers reads too, and which
gives the token ids of Mistral's own MistralTokenizer, for text and for chat messages.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _prepare import already_there, new_directory, packaged_file, run, write_json
from sentencepiece import SentencePieceProcessor

FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL = "data/mistral_instruct_tokenizer_240323.model.v3"
REMEDY = "pip install mistral-common==1.13.1"
SPACE = "▁"
MAX_LENGTH = 32768

# As in MistralTokenizer, a system message stands at the head of the last user message. No space
# follows [INST] and [/INST]: the tokenizer puts one before each text.
CHAT_TEMPLATE = """\
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- set turns = messages[1:] if system else messages -%}
{%- set last_user = (turns | length - 1) // 2 * 2 -%}
{{- bos_token -}}
{%- for turn in turns -%}
    {%- if turn['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('after an optional system message, user and assistant alternate') -}}
    {%- elif turn['role'] == 'user' -%}
        {{- '[INST]' + (system if loop.index0 == last_user else '') + turn['content'] -}}
        {{- '[/INST]' -}}
    {%- else -%}
        {{- turn['content'].rstrip(' ') + eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""


def merges(scores: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the merge rules of BPE in their order, from SentencePiece's scores of the pieces.

    SentencePiece has no list of rules: it joins the two neighbours whose union has the best score.
    """
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        yield from (pair for pair in halves if pair[0] in scores and pair[1] in scores)


def tokenizer(model: SentencePieceProcessor) -> dict[str, Any]:
    """Return tokenizer.json: BPE with byte fallback over text in which spaces are `▁`.

    Prepending `▁` in the normaliser keeps the spaces at the start of a text, which Metaspace
    would not, and does so after [INST] and [/INST] too. The ids may differ for text that spells out
    a reserved symbol: `[INST]` becomes that symbol, `[REFERENCE_DOC_3]` does not.
    """
    pieces: list[str] = [model.id_to_piece(i) for i in range(model.vocab_size())]
    scores = {piece: model.get_score(i) for i, piece in enumerate(pieces)}
    bos = {"SpecialToken": {"id": pieces[model.bos_id()], "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, piece in enumerate(pieces)
            if model.is_control(i) or model.is_unknown(i)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": SPACE},
                {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second],
            "special_tokens": {
                pieces[model.bos_id()]: {
                    "id": pieces[model.bos_id()],
                    "ids": [model.bos_id()],
                    "tokens": [pieces[model.bos_id()]],
                }
            },
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            # Reserved symbols and bytes have the score 0; no merge makes them.
            "merges": list(merges({piece: score for piece, score in scores.items() if score})),
        },
    }


def tokenizer_config(model: SentencePieceProcessor) -> dict[str, Any]:
    """Return tokenizer_config.json: special tokens and chat template (instruct, version 3)."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "bos_token": model.id_to_piece(model.bos_id()),
        "eos_token": model.id_to_piece(model.eos_id()),
        "unk_token": model.id_to_piece(model.unk_id()),
        "chat_template": CHAT_TEMPLATE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare the tokenizer; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    output: Path = parser.parse_args(argv).output

    if already_there(output, FILES):
        print(f"{output} is already complete")
        return 0
    file = packaged_file("mistral_common", MODEL, REMEDY)
    model = SentencePieceProcessor(model_file=str(file))
    with new_directory(output) as directory:
        write_json(directory / "tokenizer.json", tokenizer(model))
        write_json(directory / "tokenizer_config.json", tokenizer_config(model))
    print(f"{output}: tokenizer of Mistral-7B-Instruct-v0.3, {model.vocab_size()} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
