"""The options that several commands have in common, in whatever group of their help."""

from __future__ import annotations

import sys
from typing import Any

from shardmlx.common.units import parse_bytes
from shardmlx.config.options import REQUIRED, option
from shardmlx.partitioners import partitioner_names

WEIGHTS = ("auto", "local", "rank0")
"""The ranks that read the model: each one that can, all of them, or rank 0 for all."""


def model_argument() -> Any:
    """Declare the model as the first word of a command that reads headers alone."""
    return option(
        REQUIRED,
        "directory, .safetensors file, or Hugging Face repository (OWNER/NAME); headers are enough",
        metavar="MODEL",
        positional=True,
    )


def model_option(default: str, group: str) -> Any:
    """Declare the model of a command that loads weights."""
    return option(
        default,
        "model directory, or Hugging Face repository (OWNER/NAME)",
        metavar="MODEL",
        group=group,
    )


def revision_option(group: str | None = None) -> Any:
    """Declare the revision of the model's repository."""
    return option(
        None,
        "branch, tag or commit of a Hugging Face repository",
        metavar="NAME",
        unset="main",
        group=group,
    )


def config_option(group: str) -> Any:
    """Declare the YAML file with options."""
    return option(
        None,
        "YAML file with any of these options; flags win over it",
        metavar="FILE",
        short="-c",
        group=group,
    )


def weights_option(group: str) -> Any:
    """Declare which ranks read the weights."""
    return option(
        "auto",
        "who reads the weights: each rank that has the model or can ask the hub, and rank 0 for "
        "the others; each its own; or rank 0 for all",
        choices=WEIGHTS,
        group=group,
    )


def weight_cache_option(group: str) -> Any:
    """Declare where a rank keeps weights that it was sent."""
    return option(
        None,
        "directory in which a rank keeps the part of the model that it was sent",
        metavar="DIR",
        unset="they are not kept",
        group=group,
    )


def stage_map_option(group: str) -> Any:
    """Declare the file that divides the layers."""
    return option(
        None,
        "YAML file that divides the layers; wins over --partitioner",
        metavar="FILE",
        group=group,
    )


def hostfile_option(group: str, default: str | None = None) -> Any:
    """Declare the hostfile as what says what the machines have."""
    return option(
        default,
        "hostfile that says what the machines have, for the partitioners and the prediction",
        metavar="FILE",
        group=group,
    )


def agent_option(group: str) -> Any:
    """Declare what takes the place of ssh."""
    return option(
        None,
        "what logs in on other hosts, called as AGENT HOST COMMAND",
        metavar="AGENT",
        unset="ssh",
        group=group,
    )


def python_option(group: str) -> Any:
    """Declare the Python of the ranks."""
    return option(
        sys.executable,
        "the Python of the ranks, the same path on all hosts",
        metavar="FILE",
        unset="the one that runs this command",
        group=group,
    )


AUTO = "auto"
"""The value of an option that is left to the run."""

OFF = "off"
"""The value of an option that does nothing."""

SIMPLEST = "1f1b"
"""The schedule of a run that does not know better."""

FASTEST, SMALLEST = "balanced", "memory"
"""The partitioner that ``auto`` asks first, and the one that it asks where that does not fit."""


def partitioner_option(group: str) -> Any:
    """Declare how layers are divided."""
    return option(
        AUTO,
        f"how the layers are divided; auto: {FASTEST}, or {SMALLEST} where that does not fit",
        choices=(AUTO, *partitioner_names()),
        group=group,
    )


def memory_limit_option(group: str) -> Any:
    """Declare the memory that a process may take."""
    return option(
        None,
        "memory that the process of each rank may take, like 12GiB",
        metavar="SIZE",
        unset="chosen: the least of three quarters of its share of the machine, or what macOS "
        "wires, and of what a memory cgroup or ulimit allows",
        above=0,
        parse=parse_bytes,
        group=group,
    )


def dtype_option(group: str) -> Any:
    """Declare the type of weights and activations."""
    return option(
        None,
        "type of weights and activations",
        unset="as stored",
        choices=("float32", "bfloat16", "float16"),
        group=group,
    )


def timeout_option(group: str) -> Any:
    """Declare how long a rank waits for another."""
    return option(
        600.0,
        "time that a rank may wait for another before the run fails",
        metavar="SECONDS",
        above=0,
        group=group,
    )
