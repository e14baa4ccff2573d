"""Imports point down only. DESIGN, section 2, in the modules as they are."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS: dict[str, set[str]] = {
    "commands": {
        "train", "serve", "chat", "generate", "profile", "plan", "inspect", "launch",
        "doctor", "mpi_command",
    },
    "run": {
        "trainer", "job", "preparation", "profiling", "generation", "training_report",
        "inference_setup", "serving", "request_server", "chatting",
        "checkpoints", "resume", "doctor_run",
    },
    "engine": {
        "engine", "inference", "inference_stage", "reduce", "loading", "saving", "optimizer",
        "measure", "speed_tests", "agreement", "batch_feed", "code_versions",
        "checkpoint_writer", "checkpoint_reader", "checkpoint_storage",
        "weight_supply", "weight_finding",
    },
    "mlx": {
        "transport", "local_transport", "mpi", "stage", "data", "byte_stream", "sampling",
        "text_caches", "allocator", "prompt_reader",
        "models.slice", "models.families", "models.dropout",
    },
    "pure": {
        "", "errors", "actions", "mesh", "schedules", "lowering", "simulate", "draw", "picture",
        "run_plan", "stage_map", "planning", "config", "config_checks", "options", "yaml_reader",
        "shared_options",
        "safetensors_header", "batches", "data_cache", "trace", "report", "environment", "command",
        "ending", "signals", "heartbeat", "token_schedule", "prefix_cache", "choice",
        "text_service", "text_stream", "inference_config",
        "serve_config", "chat_config", "typed_lines",
        "openai_requests", "openai_answers", "openai_errors", "http_app", "http_answer",
        "http_guard", "http_metrics", "http_packages", "http_server",
        "generate_config", "inference_plan", "prompts", "processes",
        "doctor_config", "doctor_hostfile", "doctor_report", "doctor_ssh", "examination",
        "host_facts", "host_probe", "host_readings", "probe_talk",
        "hosts_check", "restarts", "mpirun_command", "supervise", "replan",
        "hostfile", "model_source", "hub", "sources", "inspection", "inspection_report", "tables",
        "shards", "verify", "layer_memory", "memory", "timing", "profile_file", "workload",
        "weight_source", "weight_cache", "weight_download",
        "cluster", "predict", "problems", "durable", "checkpoint_store", "run_identity",
        "memory_limits",
        "planner", "remedies", "plan_report",
        "schedule_report", "comparison", "stragglers", "rebalance",
        "models", "models.places", "models.shape", "models.tensors",
        "partitioners", "partitioners.problem", "partitioners.costs", "partitioners.plugins",
        "partitioners.uniform", "partitioners.parameters", "partitioners.balanced",
        "partitioners.profiled", "partitioners.memory", "partitioners.hetero",
        "partitioners.evenest", "partitioners.orders", "partitioners.shortest",
    },
}  # fmt: skip
"""From the top. ``inspect`` and ``plan`` are commands that need neither MLX nor MPI."""

HEIGHT: dict[str, int] = {
    module: height for height, layer in enumerate(reversed(LAYERS)) for module in LAYERS[layer]
}
NOT_PURE = {"mlx", "mlx_lm", "mpi4py"}


def sources() -> dict[str, Path]:
    """Module name without the leading ``shardmlx.`` -> file; ``""`` is the package itself."""
    files = {}
    for prefix in ("", "models", "partitioners"):
        for path in (ROOT / (prefix or "shardmlx")).glob("*.py"):
            stem = "" if path.stem == "__init__" else path.stem
            files[".".join(filter(None, (prefix, stem)))] = path
    return files


SOURCES = sources()


def imports(path: Path) -> set[str]:
    """All modules that a file imports, anywhere in it, by their full names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            # 'from shardmlx import options' names a module, 'from shardmlx.errors import X' none.
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {each for each in submodules if each.removeprefix("shardmlx.") in SOURCES}
            names |= ours or {node.module}
    return names


def own_imports(module: str) -> set[str]:
    names = {name for name in imports(SOURCES[module]) if name.split(".")[0] == "shardmlx"}
    return {name.removeprefix("shardmlx").removeprefix(".") for name in names}


def foreign_imports(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports(SOURCES[module])} - {"shardmlx"}


def test_every_module_has_its_layer() -> None:
    assert set(SOURCES) == set(HEIGHT)


@pytest.mark.parametrize("module", sorted(HEIGHT))
def test_imports_point_down(module: str) -> None:
    upward = {name for name in own_imports(module) if HEIGHT[name] > HEIGHT[module]}
    assert upward == set()


def test_imports_go_in_no_circle() -> None:
    order = TopologicalSorter({module: own_imports(module) - {module} for module in SOURCES})
    order.prepare()  # raises CycleError


def test_only_the_mpi_transport_imports_mpi4py() -> None:
    assert [module for module in SOURCES if "mpi4py" in foreign_imports(module)] == ["mpi"]


@pytest.mark.parametrize("module", sorted(LAYERS["pure"]))
def test_the_pure_part_imports_neither_mlx_nor_mpi(module: str) -> None:
    assert foreign_imports(module) & NOT_PURE == set()


def test_the_pure_part_and_the_commands_start_without_mlx_and_mpi() -> None:
    """A command must set up the process before MLX and MPI come in."""
    modules = [f"shardmlx.{name}".rstrip(".") for name in LAYERS["pure"] | LAYERS["commands"]]
    program = "\n".join(
        [
            "import sys, importlib",
            f"sys.modules.update(dict.fromkeys({sorted(NOT_PURE)}))",
            f"for name in {sorted(modules)}: importlib.import_module(name)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
