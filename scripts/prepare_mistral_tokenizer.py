#!/usr/bin/env python3
"""Make the tokenizer of Mistral-7B-Instruct-v0.3 out of the PyPI package mistral-common.

The package carries the original SentencePiece model. transformers reads tokenizer.json, and reads
the original with a space too few at the start; so this writes a tokenizer.json that gives, for
text and for chat messages, the token ids of Mistral's own MistralTokenizer.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _prepare import already_there, new_directory, packaged_file, run
from sentencepiece import SentencePieceProcessor

FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL = "data/mistral_instruct_tokenizer_240323.model.v3"
REMEDY = "pip install 'shardmlx[tokenizer]'"
SPACE = "▁"

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


def merges(ranks: dict[str, float]) -> Iterator[tuple[str, str]]:
    """The merge rules of BPE, first ones first, out of SentencePiece's scores of the pieces.

    SentencePiece has no list of rules: it joins the neighbours whose whole has the best score.
    """
    for piece in sorted(ranks, key=lambda piece: -ranks[piece]):
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        yield from (pair for pair in halves if pair[0] in ranks and pair[1] in ranks)


def tokenizer(model: SentencePieceProcessor) -> dict[str, Any]:
    """tokenizer.json: BPE with byte fallback over text in which spaces are `▁`."""
    ids = range(model.vocab_size())
    pieces: list[str] = [model.id_to_piece(i) for i in ids]
    ordinary = [
        i
        for i in ids
        if not (model.is_control(i) or model.is_unknown(i) or model.is_byte(i))
        and model.get_score(i) != 0
    ]
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": i,
                "content": pieces[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i in ids
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
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 0}},
            ],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [model.bos_id()], "tokens": ["<s>"]}},
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
            "merges": list(merges({pieces[i]: model.get_score(i) for i in ordinary})),
        },
    }
