"""The options that several commands have in common: each takes the ``group`` of its help."""

from __future__ import annotations

import sys
from functools import partial

from shardmlx.common.units import parse_bytes
from shardmlx.config.options import REQUIRED, option
from shardmlx.partitioners import PARTITIONERS, PartitionerNames

AUTO = "auto"
OFF = "off"

SIMPLEST = "1f1b"

FASTEST, SMALLEST = "balanced", "memory"
"""The partitioner that ``auto`` asks first, and the one that it asks where that does not fit."""

model_argument = partial(
    option,
    REQUIRED,
    "directory, or Hugging Face repository (OWNER/NAME); headers are enough",
    metavar="MODEL",
    positional=True,
)
"""The model as the first word of a command that reads headers alone."""

model = partial(
    option,
    help="model directory, or Hugging Face repository (OWNER/NAME)",
    metavar="MODEL",
    group="model",
)
"""The model of a command that loads weights, with a default of its own."""

device = partial(
    option, AUTO, "what computes; auto: the GPU if MLX has one", choices=(AUTO, "cpu", "gpu")
)

config = partial(
    option, None, "YAML file with any of these options; flags win", metavar="FILE", short="-c"
)

max_seq_length = partial(
    option, 2048, "longest sequence; longer ones are cut", metavar="TOKENS", minimum=2
)

stage_map = partial(
    option, None, "YAML file that divides the layers; wins over --partitioner", metavar="FILE"
)

hostfile = partial(option, help="hostfile that says what the machines have", metavar="FILE")

macs = partial(
    option,
    None,
    "Macs on Thunderbolt, in place of a hostfile: 'M2 16GB, M1 Ultra 64GB', or memory alone",
    metavar="MACS",
    excludes="hostfile",
)

ssh_command = partial(
    option, None, "program that logs in, as PROGRAM HOST COMMAND", metavar="PROGRAM", unset="ssh"
)

python = partial(
    option,
    sys.executable,
    "the Python of the ranks, unless the hostfile names another one for a host",
    metavar="FILE",
    unset="the one that runs this command",
)

partitioner = partial(
    option,
    AUTO,
    "how the layers are divided; auto: the fastest division that fits",
    metavar="{" + ",".join((AUTO, *PARTITIONERS)) + "}",
    choices=PartitionerNames(AUTO),
)

memory_limit = partial(
    option,
    None,
    "memory that the process of each rank may take, like 12GiB",
    metavar="SIZE",
    unset="chosen: what macOS lets the GPU use; on a CPU three quarters of the machine",
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

tensor_shares = partial(
    option,
    None,
    "shares of these ranks in each layer, like 2,1",
    metavar="N,...",
    unset="by memory bandwidth if the hostfile says it, else equal, as far as heads allow",
)

json = partial(
    option, None, "file for all of it as JSON; -: stdout, without the text", metavar="FILE"
)

expert_parallel = partial(
    option, False, "ranks of --tensor-parallel have whole experts of a mixture, not columns"
)

port = partial(
    option, help="port to listen at; 0 takes a free one", metavar="PORT", minimum=0, maximum=65535
)

timeout = partial(
    option,
    600.0,
    "time that a rank waits for another before the run fails",
    metavar="SECONDS",
    above=0,
)
