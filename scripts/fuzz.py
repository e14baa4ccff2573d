"""Feed damaged files to everything that reads files of users.

    python scripts/fuzz.py --cases 27000

Each case is a good file with a few changes: flipped, cut, doubled and swapped bytes; values of
wrong types, huge, negative, NaN or nested too deep; YAML aliases that multiply; unknown and
duplicate keys; Windows line ends; invalid UTF-8. A reader must accept the file, or refuse it with a
``UserError`` of one line. A command must then end with status 2 and print only that line on stderr.
Everything else is a fault: another exception, more than ``SECONDS`` or ``MEMORY``. All cases run in
this process. The same seed makes the same cases; ``--only NAME:NUMBER`` runs one of them again.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import FrameType

import _spoil
from _soaking import parser_of

from shardmlx.checkpoint.run_identity import check_identity
from shardmlx.checkpoint.store import FileInfo, Manifest
from shardmlx.common.formatting import columns
from shardmlx.config.train import LINE
from shardmlx.errors import UserError
from shardmlx.main import main as run
from shardmlx.modelfiles.parts import planned_tensors
from shardmlx.modelfiles.safetensors_header import INDEX_FILE, LENGTH_BYTES, read_header
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.hostfile import read_hostfile
from shardmlx.planning.facts.profile_file import FORMAT, read_profile

ROOT = Path(__file__).resolve().parents[1]

SECONDS = 10.0
"""Time limit of one case: more is a hang."""

MEMORY = 2**30
"""Bytes of address space that one case may add."""

LONGEST = 2000
"""Length limit of a message, in characters."""


class FaultError(Exception):
    """A case ended as it must not."""


class HangError(BaseException):
    """A case passed its time limit. No ``except Exception`` catches this."""


# Targets


@dataclass(frozen=True)
class Target:
    """A reader and its good files: ``read`` gets one of ``seeds``, damaged, in ``file``.

    ``frame`` turns the damaged text into the file's bytes, where text is only a part of it.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[Path], object]
    file: str = "input"
    frame: Callable[[bytes, Random], bytes] | None = None


def command(main: Callable[[Sequence[str]], int], *arguments: str | Path) -> None:
    """Run a whole command; raise ``UserError`` with the line by which it refuses its input."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(each) for each in arguments])
    said = err.getvalue()
    if status not in (0, 2) or (status == 0 and said):
        raise FaultError(f"status {status}, stderr {said!r}")
    if status == 2:
        if out.getvalue() or said.count("\n") != 1 or not said.endswith("\n"):
            raise FaultError(f"status 2, stdout {out.getvalue()!r}, stderr {said!r}")
        raise UserError(said[:-1])


def stage_map() -> Target:
    """Return the target for stage maps."""
    seeds = [
        b"stages:\n  - num_layers: 12\n  - num_layers: 18\n",
        b"model: some/model   # a comment\nstages:\n"
        b"  - num_layers: 12\n    rank: 0\n    host: mac-mini.local\n"
        b'  - num_layers: 18\n    rank: 1\n    host: "studio"\n',
        b"stages: [{num_layers: 3, rank: 1}, {num_layers: 3, rank: 0}]\n",
    ]
    return Target("stage map", seeds, read_stage_map)


def train_config() -> Target:
    """Return the target for configuration files of ``train``."""
    seeds = [
        (ROOT / "scripts" / "demo-config.yaml").read_bytes() + b"train: true\n",
        b"model: m\ndata: d\ntrain: true\nseed: 3\nbatch_size: 8\nmicro_batch_size: 2\niters: 10\n"
        b"learning_rate: 1e-5\nschedule: zb-v\npipeline_stages: 2\nlora_parameters:\n"
        b"  keys: ['self_attn.q_proj', self_attn.v_proj]\n  rank: 8\n  scale: 20.0\n"
        b"  dropout: 0.0\nlr_schedule:\n  name: cosine_decay\n  warmup: 100\n"
        b"  warmup_init: 1e-7\n  arguments: [1e-5, 1000, 1e-7]\n"
        b"optimizer: adamw\noptimizer_config:\n  adamw:\n    betas: [0.9, 0.98]\n"
        b"    weight_decay: 0.1\nhf_dataset:\n  path: some/set\n  prompt_feature: text\n"
        b"report_to: null\ncheckpoint_every: 10\ntimeout: 60\n",
    ]
    return Target("train config", seeds, lambda path: LINE.load(["-c", str(path)]))


HOSTS = b"""\
# the office
mac-studio.local slots=1  # memory=64GiB flops=27T link=40Gbps latency=30us, by the window
mac-mini.local slots=2 max_slots=2  # memory=16GiB flops=4T kind=mini
10.0.0.7 slots=1  # flops=1T
"""


def hostfile() -> Target:
    """Return the target for hostfiles."""
    return Target(
        "hostfile", [HOSTS, b"localhost slots=4\n", b"a slots=1\nb slots=2\n"], read_hostfile
    )


def profile() -> Target:
    """Return the target for files of ``shardmlx.profile``."""
    part = {"forward": 0.1, "input_gradient": 0.2, "weight_gradient": 0.1, "update": 0.01}
    seed = json.dumps(
        {
            "format": FORMAT,
            "work": {"hidden_size": 64, "dtype": "float32", "lora_keys": None},
            "machines": [
                {
                    "host": "a",
                    "chip": "M2",
                    "samples": [
                        {"rows": 1, "length": length, "layer": part, "frozen": part}
                        | {"embedding": part, "head": part}
                        for length in (128, 512)
                    ],
                }
            ],
        }
    )
    return Target("profile", [seed.encode()], read_profile)


IDENTITY = {
    "model": {"name": "m", "sha256": "0", "layers": 4, "dtype": "float32"},
    "start": {"name": None, "sha256": None},
    "data": {
        "name": "d",
        "train": {"samples": 3, "sha256": "1"},
        "valid": {"samples": 0, "sha256": "2"},
        "longest": 64,
    },
    "optimizer": {
        "name": "adam",
        "learning_rate": 1e-5,
        "lr_schedule": None,
        "open_schedule": None,
        "settings": {},
        "usual_settings": {"eps": 1e-8},
    },
    "objective": None,
    "options": {
        "batch_size": 4,
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 8},
        "num_layers": 2,
        "max_seq_length": 2048,
        "objective": "sft",
        "dtype": None,
    },
}


def manifest() -> Target:
    """Return the target for manifests of checkpoints, which are also compared with a run."""
    file = FileInfo("weights-00.safetensors", 100, 64 * "a")
    seed = Manifest(
        step=10,
        files=(file, replace(file, name="optimizer-00.safetensors")),
        identity=IDENTITY,
        state={"batches": {"epoch": 1, "next": 10}, "ranks": [[1.5], []]},
        plan={"dp": 1, "pp": 2},
        versions={"mlx": "0.32.4"},
    )

    def read(path: Path) -> None:
        found = Manifest.from_json(path.read_bytes(), path)
        check_identity(IDENTITY, found.identity, path)

    return Target("manifest", [seed.to_json()], read)


CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}

DATA_BYTES = 64
"""Size of the data after a header that is damaged."""

_HEADERS = [
    {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        "b.weight": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]},
    },
    {"x": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}},
    {"s": {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}}
    | {"empty": {"dtype": "I8", "shape": [0, 3], "data_offsets": [8, 8]}}
    | {"t": {"dtype": "I64", "shape": [7], "data_offsets": [8, 64]}},
]
HEADERS = [json.dumps(header).encode() for header in _HEADERS]


def framed(header: bytes, random: Random) -> bytes:
    """Return a safetensors file; sometimes the header's length is wrong, or data are missing."""
    length = len(header)
    if random.random() < 0.1:
        length = random.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])
    data = bytes(DATA_BYTES if random.random() < 0.9 else random.randrange(2 * DATA_BYTES))
    return (max(0, length)).to_bytes(LENGTH_BYTES, "little") + header + data


def safetensors() -> Target:
    """Return the target for headers of safetensors files."""
    return Target("safetensors", HEADERS, read_header, "x.safetensors", framed)


def inspect_config() -> Target:
    """Return the target for models of which there is only config.json."""

    def read(path: Path) -> None:
        command(run, "inspect", path.parent, "--pipeline-stages", "2")

    mixtral = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    packed = {**CONFIG, "model_type": "qwen3", "head_dim": 16}
    packed["quantization"] = {"group_size": 64, "bits": 4}
    seeds = [json.dumps(each, indent=1).encode() for each in (CONFIG, mixtral, packed)]
    return Target("inspect config", seeds, read, "config.json")


def inspect_index() -> Target:
    """Return the target for an index beside a whole model."""
    header, reached = {}, 0
    for name, tensor in planned_tensors(CONFIG).items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [reached, reached + tensor.nbytes],
        }
        reached += tensor.nbytes
    text = json.dumps(header).encode()
    weights = len(text).to_bytes(LENGTH_BYTES, "little") + text + bytes(reached)
    index = {
        "metadata": {"total_size": reached},
        "weight_map": dict.fromkeys(header, "model.safetensors"),
    }

    def read(path: Path) -> None:
        beside = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": weights}
        for name, content in beside.items():
            if not (path.parent / name).exists():
                (path.parent / name).write_bytes(content)
        command(run, "inspect", path.parent)

    return Target("inspect index", [json.dumps(index, indent=1).encode()], read, INDEX_FILE)


def plan_hosts() -> Target:
    """Return the target for plans for the machines of a hostfile."""

    def read(path: Path) -> None:
        (path.parent / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 16}))
        fixed = ("--schedule", "1f1b", "--data-parallel", "1", "--micro-batch-size", "1")
        command(run, "plan", path.parent, "--hostfile", path, "--batch-size", "4", *fixed)

    return Target("plan --hostfile", [HOSTS, b"a slots=1 # flops=1T memory=1GiB\n"], read)


TARGETS = (
    stage_map, train_config, hostfile, profile, safetensors, inspect_config, inspect_index,
    plan_hosts, manifest,
)  # fmt: skip
"""Functions that make the targets. Add a function like these to add a reader."""


# Outcomes


def spoiled(target: Target, random: Random) -> bytes:
    """Return one of a target's good files with one to three changes."""
    content = random.choice(target.seeds)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        content = random.choice(_spoil.MUTATIONS)(content, random)
    if target.frame is not None:
        content = target.frame(content, random)
        if random.random() < 0.1:
            content = random.choice([_spoil.flip, _spoil.cut, _spoil.take_out])(content, random)
    return content


@dataclass
class Counts:
    """Outcomes of the cases of one target; ``faults`` has the text of each fault by case number."""

    accepted: int = 0
    refused: int = 0
    faults: dict[int, str] = field(default_factory=dict)


def outcome(target: Target, path: Path) -> str | None:
    """Run the reader; return None if it accepts the file, else the message of its ``UserError``.

    Raises ``FaultError`` for every other outcome.
    """
    try:
        with limited():
            target.read(path)
    except UserError as error:
        message = str(error)
        if len(message.splitlines()) != 1:
            raise FaultError(f"not one line: {message[:LONGEST]!r}") from None
        if len(message) > LONGEST:
            raise FaultError(f"{len(message)} characters: {message[:100]!r} ...") from None
        if not message.isprintable():
            raise FaultError(f"not printable: {message!r}") from None
        return message
    except FaultError:
        raise
    except HangError:
        raise FaultError(f"took over {SECONDS} s") from None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise FaultError(f"{type(error).__name__}: {str(error)[:200]}") from error
    return None


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Limit time and, on Linux, memory."""

    def hang(signal_number: int, frame: FrameType | None) -> None:
        raise HangError

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sweep(
    target: Target, numbers: Sequence[int], seed: int, progress: Callable[[], None] | None = None
) -> Counts:
    """Run the cases ``numbers`` of a target."""
    counts = Counts()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        path = Path(directory) / target.file
        for number in numbers:
            path.write_bytes(spoiled(target, Random(f"{seed} {target.name} {number}")))
            try:
                if outcome(target, path) is None:
                    counts.accepted += 1
                else:
                    counts.refused += 1
            except FaultError as error:
                counts.faults[number] = str(error)
            if progress is not None:
                progress()
    return counts


def table(results: Mapping[str, Counts]) -> str:
    """Return a table of the outcomes of all targets."""
    lines = []
    for name, counts in results.items():
        numbers = (counts.accepted, counts.refused, len(counts.faults))
        lines.append((name, *map(str, (sum(numbers), *numbers))))
    return columns(("target", "cases", "accepted", "refused", "faults"), lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if any is a fault, else 0."""
    targets = {target.name: target for target in (make() for make in TARGETS)}
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="cases of all targets together")
    parser.add_argument(
        "--only", metavar="NAME[:NUMBER]", help=f"one target, or one case: {', '.join(targets)}"
    )
    arguments = parser.parse_args(argv)
    name, _, number = (arguments.only or "").partition(":")
    if name and name not in targets:
        parser.error(f"--only {name}: choose from {', '.join(targets)}")
    chosen = [targets[name]] if name else list(targets.values())
    each = -(-arguments.cases // len(chosen))
    numbers = [int(number)] if number else range(each)
    done = Counter[str]()

    def progress() -> None:
        done["cases"] += 1
        if done["cases"] % 500 == 0:
            print(f"{done['cases']} of {each * len(chosen)}", file=sys.stderr)

    results = {t.name: sweep(t, numbers, arguments.seed, progress) for t in chosen}
    for target_name, counts in results.items():
        kinds = Counter(fault[:60] for fault in counts.faults.values())
        for kind, count in kinds.most_common():
            case, fault = next(item for item in counts.faults.items() if item[1].startswith(kind))
            print(f"{count} x {target_name}:{case}: {fault}")
    print(table(results))
    return 1 if any(counts.faults for counts in results.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
