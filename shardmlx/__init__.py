"""Pipeline-parallel fine-tuning of language models with MLX and MPI.

The names of ``__all__`` are the Python API: docs/api.md. Each loads when it is first used, so that
importing shardmlx starts neither MLX nor MPI. All else may change from release to release.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmlx.api.client import train_client
    from shardmlx.config.objective import OwnObjective
    from shardmlx.config.train import TrainConfig
    from shardmlx.distributed.messages import TransportError
    from shardmlx.distributed.run_ranks import connect
    from shardmlx.distributed.transport import Transport
    from shardmlx.engine.engine import Engine
    from shardmlx.engine.gathered_stage import build_stages
    from shardmlx.errors import AgreedFailure, EngineError, Stopped, UserError
    from shardmlx.inference.text_pipeline import load_pipeline
    from shardmlx.modelfiles.model_files import open_model
    from shardmlx.models.runtime.slice import Slice
    from shardmlx.pipeline.mesh import Mesh
    from shardmlx.pipeline.plan import Plan
    from shardmlx.pipeline.simulate import simulate_schedule as simulate
    from shardmlx.pipeline.stage_map import StageMap
    from shardmlx.planning.facts.hostfile import read_hostfile
    from shardmlx.planning.training_plan import plan_training
    from shardmlx.training.command import train_model

__version__ = "0.2.0"

__all__ = [
    "AgreedFailure",
    "Engine",
    "EngineError",
    "Mesh",
    "OwnObjective",
    "Plan",
    "Slice",
    "StageMap",
    "Stopped",
    "TrainConfig",
    "Transport",
    "TransportError",
    "UserError",
    "build_stages",
    "connect",
    "load_pipeline",
    "open_model",
    "plan_training",
    "read_hostfile",
    "simulate",
    "train_client",
    "train_model",
]

_WITHOUT_MLX = {
    "AgreedFailure": "errors",
    "EngineError": "errors",
    "Mesh": "pipeline.mesh",
    "OwnObjective": "config.objective",
    "Plan": "pipeline.plan",
    "StageMap": "pipeline.stage_map",
    "Stopped": "errors",
    "TrainConfig": "config.train",
    "UserError": "errors",
    "connect": "distributed.run_ranks",
    "open_model": "modelfiles.model_files",
    "plan_training": "planning.training_plan",
    "read_hostfile": "planning.facts.hostfile",
    "simulate": "pipeline.simulate:simulate_schedule",
}
_WITH_MLX = {
    "Engine": "engine.engine",
    "Slice": "models.runtime.slice",
    "Transport": "distributed.transport",
    "TransportError": "distributed.messages",
    "build_stages": "engine.gathered_stage",
    "load_pipeline": "inference.text_pipeline",
    "train_client": "api.client",
    "train_model": "training.command",
}


def __getattr__(name: str) -> Any:
    place = _WITHOUT_MLX.get(name) or _WITH_MLX.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITH_MLX:
        # The process must be set up before MLX comes in.
        importlib.import_module("shardmlx.common.prepared")
    module, _, attribute = place.partition(":")
    value = getattr(importlib.import_module(f"shardmlx.{module}"), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
