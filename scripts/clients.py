#!/usr/bin/env python3
"""Let client libraries talk to a real shardmlx.serve: a line for each client and feature.

Run scripts/clients.sh, which installs what this needs. A model of 135M parameters says what it
likes: forced calls must parse, structures must validate, and what is free must come without an
error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from _client_features import CLIENTS
from _serving import served

HERMES = """{% for message in messages %}{{ '<|im_start|>' }}
{%- if loop.first and tools %}system
{{ message.content if message.role == 'system' }}
Call functions as <tool_call>{"name": ..., "arguments": ...}</tool_call>: {{ tools | tojson }}
{%- if message.role != 'system' %}<|im_end|>
<|im_start|>{{ message.role }}
{{ message.content }}{% endif %}
{%- else %}{{ message.role }}
{{ message.content }}
{%- endif %}{% for tool_call in message.tool_calls %}<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
{#- tool_call.name #}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA = """{% if not tools is defined %}{% set tools = none %}{% endif %}
{%- for message in messages %}<|im_start|>
{{- 'ipython' if message.role == 'tool' else message.role }}
{% if tools and message.role == 'user' and (loop.first or loop.previtem.role == 'system') %}
Respond in the format {"name": function name, "parameters": arguments}. {{ tools | tojson }}
{% endif %}{% if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{%- else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {"generic": None, "own": HERMES, "llama3": LLAMA}
"""Chat templates, by the way in which a model with them knows tools; None is the model's own."""


def serving(python: str, model: Path) -> AbstractContextManager[str]:
    """Serve a model by the project's Python; give the address."""
    command = [python, "-m", "shardmlx.serve", "--model", str(model), "--port", "0", "--temp", "0"]
    return served([*command, "--any-model-name"])


@contextmanager
def with_template(model: Path, template: str | None) -> Iterator[Path]:
    """Yield a model's directory with another chat template."""
    if template is None:
        yield model
        return
    with tempfile.TemporaryDirectory() as made:
        for file in model.resolve().iterdir():
            Path(made, file.name).symlink_to(file)
        settings = json.loads((model / "tokenizer_config.json").read_text())
        Path(made, "tokenizer_config.json").unlink()
        Path(made, "tokenizer_config.json").write_text(
            json.dumps({**settings, "chat_template": template})
        )
        yield Path(made)


def run(way: str, address: str, names: list[str]) -> int:
    """Print a line for each feature of these clients; return how many failed."""
    import httpx

    (model,) = httpx.get(f"{address}/v1/models").json()["data"]
    assert model["tools"] == way, f"/v1/models says {model['tools']}, not {way}"
    failed = 0
    for name in names:
        for feature, use in CLIENTS[name](address):
            began = time.monotonic()
            try:
                use()
                result = "ok"
            except Exception as error:
                result = f"FAULT {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                failed += 1
            print(f"{way:8} {name:20} {feature:28} {result} {time.monotonic() - began:.1f} s")
            sys.stdout.flush()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--server", default=sys.executable, help="the Python of the server")
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    parser.add_argument("--ways", nargs="+", choices=TEMPLATES, default=list(TEMPLATES))
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    args = parser.parse_args()
    failed = 0
    for way in args.ways:
        with (
            with_template(args.model, TEMPLATES[way]) as model,
            serving(args.server, model) as address,
        ):
            failed += run(way, address, args.clients)
    print(f"{failed} failed" if failed else "all well")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
