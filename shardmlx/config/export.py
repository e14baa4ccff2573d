"""The options of ``shardmlx export``. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardmlx.common.units import GIB, parse_bytes
from shardmlx.config import common_options as common
from shardmlx.config.command_line import CommandLine
from shardmlx.config.options import REQUIRED, Options, declared, in_group, refuse, same_as
from shardmlx.config.specs import ModelSource
from shardmlx.modelfiles.tensors import DEFAULTS

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
"""mlx-lm's recipes of few bits for most layers, and more for those that need them."""

_BITS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"affine": (2, 3, 4, 5, 6, 8), "mxfp4": (4,), "nvfp4": (4,), "mxfp8": (8,)}
)
_GROUPS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {"affine": (32, 64, 128), "mxfp4": (32,), "nvfp4": (16,), "mxfp8": (32,)}
)

_CONTENT = "content"
_FILES = "files"

_HOW = "give it in one word: --quantize BITS:GROUP:MODE, or a recipe"
_REFUSED = {
    "--save-path": "use -o",
    "--mlx-path": "use -o",
    "--q-bits": _HOW,
    "--q-group-size": _HOW,
    "--q-mode": _HOW,
    "--quant-predicate": _HOW,
    "--upload-repo": "upload what is finished: hf upload OWNER/NAME DIR",
}
"""Options of mlx_lm.fuse and mlx_lm.convert that are not here, and what to do instead."""

_content = in_group(_CONTENT)
_files = in_group(_FILES)


@dataclass(frozen=True, slots=True)
class PackingOptions:
    """The way in which linear layers and embeddings are quantised. ``bits`` are None of a
    ``recipe``, which chooses them for each layer."""

    bits: int | None
    group_size: int
    mode: str = "affine"
    recipe: str | None = None

    def __str__(self) -> str:
        first = self.recipe or str(self.bits)
        return f"{first}:{self.group_size}" + ("" if self.recipe else f":{self.mode}")

    @classmethod
    def parse(cls, text: str) -> PackingOptions:
        """Read ``4``, ``4:32``, ``4:32:mxfp4``, ``mxfp4`` or ``mixed_3_6:64``; ``ValueError``."""
        first, *rest = text.split(":")
        if first in DEFAULTS and not rest:
            bits, group = DEFAULTS[first]
            return cls(bits, group, first)
        recipe = first if first in RECIPES else None
        mode = rest[1] if len(rest) > 1 else "affine"
        if len(rest) > (1 if recipe else 2) or mode not in DEFAULTS:
            modes = ", ".join(DEFAULTS)
            recipes = ", ".join(RECIPES)
            raise ValueError(
                f"give BITS[:GROUP[:MODE]], like 4:64, a MODE of {modes}, or RECIPE[:GROUP], a "
                f"RECIPE of {recipes}"
            )
        columns = _one_of("groups", rest[0] if rest else str(DEFAULTS[mode][1]), _GROUPS[mode])
        return cls(None if recipe else _one_of("bits", first, _BITS[mode]), columns, mode, recipe)


def _one_of(what: str, text: str, allowed: Sequence[int]) -> int:
    if not text.isdecimal() or int(text) not in allowed:
        choice = ", ".join(map(str, allowed))
        raise ValueError(f"{what}: give {choice if len(allowed) == 1 else f'one of {choice}'}")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """The model to make of another, and its place. Raises ``OptionError``, a ``UserError``."""

    model: str = common.model(REQUIRED, positional=True, group=None)
    revision: str | None = same_as(ModelSource, "revision")
    device: str = same_as(ModelSource, "device")
    output_dir: str = _files(
        REQUIRED, "directory for the finished model", metavar="DIR", short="-o"
    )
    adapter_path: str | None = _content(
        None, "adapters to fuse: directory of a run, of a checkpoint, or of several", metavar="DIR"
    )
    peft: bool = _content(
        False, "write the adapters alone, as PEFT's, for PEFT, vLLM and llama.cpp"
    )
    dequantize: bool = _content(False, "make plain weights of quantised ones, before --quantize")
    quantize: str | None = _content(
        None,
        "BITS[:GROUP[:MODE]], like 4 or 4:32; a MODE alone (mxfp4, nvfp4, mxfp8); or a recipe of "
        "mlx_lm.convert (mixed_2_6, mixed_3_4, mixed_3_6, mixed_4_6)",
        metavar="HOW",
        parse=lambda text: str(PackingOptions.parse(text)),
    )
    dtype: str | None = _content(
        None,
        "type of what is not quantised",
        unset="that of config.json; with --adapter-path alone as stored",
        choices=("float32", "bfloat16", "float16"),
    )
    max_shard: int = _files(
        5 * GIB, "size of a file at most", metavar="SIZE", unset="5GiB", above=0, parse=parse_bytes
    )
    verify: bool = _files(False, "look for what is wrong with the files; status 1 if something is")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.peft:
            return
        refuse("peft", "has no adapters", "give --adapter-path", when=self.adapter_path is None)
        usual = {each.name: each.usual for each in declared(type(self))}
        for name in ("dequantize", "quantize", "dtype", "max_shard", "verify"):
            value = getattr(self, name)
            complaint = "is for a whole model, and --peft writes adapters"
            refuse(name, complaint, "leave it out", when=value != usual[name])

    @property
    def packing(self) -> PackingOptions | None:
        """The way to quantise, if any."""
        return None if self.quantize is None else PackingOptions.parse(self.quantize)


LINE = CommandLine(
    options=ExportOptions,
    command="export",
    description="Write a finished model: adapters fused, converted, quantised, tensor by tensor. "
    "Or adapters as PEFT's.",
    groups=(_CONTENT, _FILES),
    refused=_REFUSED,
)
