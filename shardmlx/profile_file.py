"""The file of measured times that ``shardmlx.profile`` writes and the planner reads. Pure."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmlx.config import TrainConfig
from shardmlx.errors import UserError
from shardmlx.models.shape import ModelShape
from shardmlx.timing import Measured, Sample, Seconds

FORMAT = 1

_AGAIN = "measure again with python -m shardmlx.profile"


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """What one rank measured. ``chip`` says what kind of machine it is."""

    host: str
    chip: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError(f"no samples of {self.host}")
        tokens = [sample.tokens for sample in self.samples]
        if tokens != sorted(set(tokens)):
            raise ValueError(f"samples of {self.host} with {tokens} tokens: not ascending")


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times of one model, trained in one way, on one or more machines.

    ``work`` is what the times depend on beside the machine: see ``work_of``.
    """

    work: Mapping[str, Any]
    machines: tuple[MachineProfile, ...]
    path: str = "profile"

    def check(self, work: Mapping[str, Any]) -> None:
        """``UserError`` when this was measured for other work."""
        for key in work:
            if self.work.get(key) != work[key]:
                raise UserError(
                    f"{self.path} was measured with {key} {self.work.get(key)!r}, not "
                    f"{work[key]!r}: {_AGAIN}"
                )

    def machine(self, host: str, kind: str | None = None) -> MachineProfile:
        """The measurements on a host, or on another machine of the same kind.

        Where ranks share a host, the slowest of them speaks for all.
        """
        name = short(socket.gethostname() if host == "localhost" else host)
        local = [each for each in self.machines if short(each.host) == name]
        found = local or [each for each in self.machines if kind in (each.chip, each.host)]
        if not found:
            known = ", ".join(dict.fromkeys(each.host for each in self.machines))
            raise UserError(
                f"{self.path} has no measurement of {host}, only of {known}: measure there too, "
                "or give the host kind=NAME in the hostfile with the name of a measured one"
            )
        return max(found, key=lambda each: each.samples[-1].layer.microbatch)

    def measured(
        self, host: str, kind: str | None, num_layers: int, first_trained: int, checkpoint: bool
    ) -> Measured:
        """The times of a model on a host."""
        return Measured(
            num_layers=num_layers,
            samples=self.machine(host, kind).samples,
            first_trained=first_trained,
            checkpoint=checkpoint,
        )


def short(host: str) -> str:
    """A host's name without its domain, in lower case: how hosts are compared."""
    return host.split(".")[0].casefold()


def work_of(config: TrainConfig, shape: ModelShape, dtype: str) -> dict[str, Any]:
    """What times depend on: sizes of a layer and of the head, and what is trained how."""
    trained: dict[str, Any] = {"fine_tune_type": config.fine_tune_type}
    if config.fine_tune_type == "full":
        trained["unfreeze_all"] = config.unfreeze_all
    else:
        trained["lora_parameters"] = json.loads(json.dumps(dict(config.lora_parameters)))
    sizes = asdict(shape)
    for each in ("num_layers", "windows"):
        del sizes[each]
    return {**sizes, "dtype": dtype, "optimizer": config.optimizer, **trained}


def write_profile(profile: Profile, path: Path) -> None:
    """Write it as JSON."""
    content = {
        "format": FORMAT,
        "work": dict(profile.work),
        "machines": [asdict(each) for each in profile.machines],
    }
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def read_profile(path: str | Path) -> Profile:
    """Read it; ``UserError`` names the file and what is wrong with it."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): {_AGAIN}") from None
    try:
        if content["format"] != FORMAT:
            raise UserError(
                f"{path} has format {content['format']!r}, this shardmlx reads {FORMAT}: {_AGAIN}"
            )
        machines = tuple(_machine(each) for each in content["machines"])
        if not machines:
            raise ValueError("no machines")
        return Profile(dict(content["work"]), machines, str(path))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no profile ({error!r}): {_AGAIN}") from None


def merge(profiles: Sequence[Profile]) -> Profile:
    """One profile of the machines of several, measured for the same work."""
    first = profiles[0]
    for other in profiles[1:]:
        other.check(first.work)
    machines = tuple(machine for each in profiles for machine in each.machines)
    return Profile(first.work, machines, first.path)


def _machine(entry: Any) -> MachineProfile:
    samples = tuple(
        Sample(
            rows=int(sample["rows"]),
            length=int(sample["length"]),
            **{
                part: Seconds(**{key: float(value) for key, value in sample[part].items()})
                for part in ("layer", "frozen", "embedding", "head")
            },
        )
        for sample in entry["samples"]
    )
    return MachineProfile(str(entry["host"]), str(entry["chip"]), samples)
