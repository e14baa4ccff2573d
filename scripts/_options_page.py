"""The pages of options, made of what the commands declare."""

from __future__ import annotations

from collections.abc import Iterator

from shardmlx.config.commands import BY_NAME
from shardmlx.config.inference import InferenceConfig
from shardmlx.config.options import Declared, declared, written
from shardmlx.config.profile import ProfileOptions
from shardmlx.config.train import TrainConfig
from shardmlx.planning.plan_command import PlanOptions

PAGES = {
    "options.md": ("train", "report", "plan", "profile", "launch"),
    "options-others.md": (
        *("hub", "export", "evaluate", "generate", "chat", "serve"),
        *("inspect", "schedule", "doctor"),
    ),
}
"""The commands of each page."""

OF_A_RUN = (PlanOptions, ProfileOptions)
"""Options that have those of a training run among them."""

_MADE = """\
This page is made from the code, as `--help` is: `python scripts/docs.py` writes it anew."""

_HEADS = {
    "options.md": f"""\
# Options of training, planning and launching

The options of `train`, `report`, `plan`, `profile` and `launch`, with their units and defaults; see
also [options of the other commands](options-others.md). {_MADE}

`train` reads options from a YAML file too, with `-c FILE`. There an option has its name without
dashes, and with `_` for `-`: `--batch-size 8` is `batch_size: 8`. A flag wins over the file.
`--mask-prompt` switches on, and `--no-mask-prompt` off. A SIZE has a unit, like `12GiB` or `500MB`.
Every command also has `--version`, `--help` and `--help-all`: `train --help` lists what most runs
need.
""",
    "options-others.md": f"""\
# Options of the other commands

The options of `hub`, `export`, `evaluate`, `generate`, `chat`, `serve`, `inspect`, `schedule`
and `doctor`, with their units and defaults. Options of training: [options](options.md). {_MADE}

`generate`, `chat` and `serve` read options from a YAML file too, with `-c FILE`, as `train` does.
""",
}

_YAML = """\
### LoRA and the learning rate in YAML

A file of `mlx_lm.lora` can be used as it is. This one has what only YAML can say in full:

```yaml
model: mistralai/Mistral-7B-Instruct-v0.3
data: my-data
iters: 1000
learning_rate: 1e-5
lora_parameters:
  rank: 16
  scale: 20.0        # of the adapters' output; or alpha, which is scale x rank
  dropout: 0.05
  keys: ["self_attn.q_proj", "self_attn.v_proj"]   # without keys: all linear layers
optimizer: adamw
optimizer_config:
  adamw:
    weight_decay: 0.01
lr_schedule:
  name: cosine_decay
  arguments: [1e-5, 900, 1e-7]   # from, in so many updates (or: run), to
  warmup: 100                    # updates in which the rate rises
  warmup_init: 0.0               # from here
```

A part of `lora_parameters` that is left out has its default. `--lora-rank 16` gives one by flag,
and `lora_rank: 16` in the file: see the adapters above.

The optimizer and its schedule by flags: `--optimizer adamw --lr-schedule cosine_decay:1e-5,900,1e-7
--warmup 100`. Schedules and their arguments, in the order in which they are written:

| schedule | arguments |
|---|---|
| `cosine_decay` | from, updates, to (0 if left out) |
| `linear_schedule` | from, to, updates |
| `exponential_decay` | from, factor of each update |
| `step_decay` | from, factor, updates between two factors |

In the place of the updates of `cosine_decay` and `linear_schedule`, `run` means those of the run
after its warm-up, with `--epochs` too: `arguments: [1e-5, run, 1e-7]`. Without any arguments they
fall from `--learning-rate` to 0 over the run. `mlx_lm.lora` takes numbers alone.
"""


def page(name: str) -> str:
    """Return the text of a page of ``PAGES``."""
    parts = [_HEADS[name]]
    for command in (BY_NAME[each] for each in PAGES[name]):
        own = command.line.options
        parts.append(f"## {command.name}\n\n`shardmlx {command.name}`: {command.help}.\n")
        options = list(written(own))
        if own in OF_A_RUN:
            shared = {each.name: each for each in written(TrainConfig)}
            options = [each for each in options if each != shared.get(each.name)]
            parts.append("Takes the options of [train](#train) too, and these:\n")
        elif issubclass(own, InferenceConfig):
            shared = {each.name: each for each in declared(InferenceConfig)}
            options = [each for each in options if each != shared.get(each.name)]
            what = (
                "Takes the options that [generate, chat and serve](#generate-chat-and-serve) share"
            )
            parts.append(f"{what}, and these:\n")
        parts += _tables(options)
        if command.name == "train":
            parts.append(_YAML)
        if command.name == "serve":
            parts.append(
                "## generate, chat and serve\n\nThese options are the same in all three:\n"
            )
            different = {"max_tokens"}
            all_options = declared(InferenceConfig)
            parts += _tables([each for each in all_options if each.name not in different])
    return "\n".join(parts)


def _tables(options: list[Declared]) -> Iterator[str]:
    """Yield a table for each group of options, those of the YAML file last."""
    found = dict.fromkeys(each.rules.group for each in options if each.rules.flag)
    groups = sorted(found, key=lambda group: group is not None)
    for group in groups:
        some = [each for each in options if each.rules.flag and each.rules.group == group]
        if group is not None and len(groups) > 1:
            yield f"**{group[0].upper()}{group[1:]}**\n"
        yield _table(some)
    in_file = [each for each in options if not each.rules.flag]
    if in_file:
        yield "**In the YAML file only**\n"
        yield _table(in_file)


def _table(options: list[Declared]) -> str:
    rows = [
        f"| {_name(each)} | {_value(each)} | {_cell(each.default or 'must be given')} | "
        f"{_cell(each.rules.help)} |"
        for each in options
    ]
    return "\n".join(["| option | value | default | |", "|---|---|---|---|", *rows, ""])


def _name(each: Declared) -> str:
    if each.rules.positional:
        return f"`{each.metavar}`"
    if not each.rules.flag:
        return f"`{each.name}`"
    return ", ".join(f"`{flag}`" for flag in each.flags)


def _value(each: Declared) -> str:
    if bool in each.kinds:
        return "switch"
    if each.rules.choices is not None:
        return ", ".join(f"`{choice}`" for choice in each.rules.choices)
    if not each.rules.flag:
        return "mapping" if dict in each.kinds else _cell(each.metavar or "text")
    return _cell(each.metavar)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")
