"""The options that several commands have in common: each takes the ``group`` of its help."""

from __future__ import annotations

import sys
from functools import partial

from shardmlx.common.units import parse_bytes
from shardmlx.config.options import REQUIRED, option
from shardmlx.partitioners import partitioner_names

WEIGHTS = ("auto", "local", "rank0")
"""The ranks that read the model: each one that can, all of them, or rank 0 for all."""

AUTO = "auto"
"""The value of an option that is left to the run."""

OFF = "off"
"""The value of an option that does nothing."""

SIMPLEST = "1f1b"
"""The schedule of a run that does not know better."""

FASTEST, SMALLEST = "balanced", "memory"
"""The partitioner that ``auto`` asks first, and the one that it asks where that does not fit."""

model_argument = partial(
    option,
    REQUIRED,
    "directory, .safetensors file, or Hugging Face repository (OWNER/NAME); headers are enough",
    metavar="MODEL",
    positional=True,
)
"""The model as the first word of a command that reads headers alone."""

model = partial(
    option, help="model directory, or Hugging Face repository (OWNER/NAME)", metavar="MODEL"
)
"""The model of a command that loads weights, with a default of its own."""

revision = partial(
    option, None, "branch, tag or commit of a Hugging Face repository", metavar="NAME", unset="main"
)

config = partial(
    option,
    None,
    "YAML file with any of these options; flags win over it",
    metavar="FILE",
    short="-c",
)

weights = partial(
    option,
    "auto",
    "who reads the weights: each rank that has the model or can ask the hub, and rank 0 for "
    "the others; each its own; or rank 0 for all",
    choices=WEIGHTS,
)

weight_cache = partial(
    option,
    None,
    "directory in which a rank keeps the part of the model that it was sent",
    metavar="DIR",
    unset="they are not kept",
)

stage_map = partial(
    option, None, "YAML file that divides the layers; wins over --partitioner", metavar="FILE"
)

hostfile = partial(
    option,
    help="hostfile that says what the machines have, for the partitioners and the prediction",
    metavar="FILE",
)

agent = partial(
    option,
    None,
    "what logs in on other hosts, called as AGENT HOST COMMAND",
    metavar="AGENT",
    unset="ssh",
)

python = partial(
    option,
    sys.executable,
    "the Python of the ranks, the same path on all hosts",
    metavar="FILE",
    unset="the one that runs this command",
)

partitioner = partial(
    option,
    AUTO,
    f"how the layers are divided; auto: {FASTEST}, or {SMALLEST} where that does not fit",
    choices=(AUTO, *partitioner_names()),
)

memory_limit = partial(
    option,
    None,
    "memory that the process of each rank may take, like 12GiB",
    metavar="SIZE",
    unset="chosen: the least of three quarters of its share of the machine, or what macOS wires, "
    "and of what a memory cgroup or ulimit allows",
    above=0,
    parse=parse_bytes,
)

dtype = partial(
    option,
    None,
    "type of weights and activations",
    unset="as stored",
    choices=("float32", "bfloat16", "float16"),
)

timeout = partial(
    option,
    600.0,
    "time that a rank may wait for another before the run fails",
    metavar="SECONDS",
    above=0,
)
