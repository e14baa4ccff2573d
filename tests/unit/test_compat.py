"""What ``shardmlx.compat`` takes from other libraries is still there, and still means the same.

A test that fails here says that an update of a library changed a part that is private to it, or
that its documentation does not speak of: which library, and what to do, stands in the failure.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx import compat
from shardmlx.hosts.library_probes import PROBES, tried_with
from testbed.further_configs import FURTHER
from testbed.tiny_models import build
from tests.helpers.sources import nodes

ROOT = Path(__file__).parents[2]


@contextmanager
def contract(function: Callable[..., Any], library: str) -> Iterator[None]:
    """Fail, whatever goes wrong inside, with the library, its version and the remedy."""
    try:
        yield
    except Exception as error:
        remedy = " ".join(inspect.getdoc(function).split())  # type: ignore[union-attr]
        pytest.fail(
            f"{library} {version(library)} broke compat.{function.__name__} ({error!r}): {remedy}"
        )


def run_alone(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.strip()


def test_importing_compat_loads_none_of_the_libraries() -> None:
    names = "mlx", "mlx_lm", "mpi4py", "uvicorn", "huggingface_hub"
    program = f"import sys, shardmlx.compat; print(*(set(sys.modules) & set({names})))"
    assert run_alone(program) == ""


def test_services_are_loaded_when_they_are_used(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("print('loaded')\nname = 'wandb'")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from shardmlx.models.runtime.tuner import build_schedule
from mlx_lm.tuner import callbacks
print("imported")
print(callbacks.wandb.name)
import wandb
print(wandb is callbacks.wandb, *(each for each in sys.meta_path if each.__class__ is type))
"""
    with contract(compat.services_load_late, "mlx-lm"):
        printed, finders = run_alone(program).rsplit("\n", 1)
        assert printed.split() == ["imported", "loaded", "wandb"]
        assert finders.startswith("True")
        assert "LateServices" not in finders


def test_the_tuner_of_mlx_lm_is_imported_in_one_place_of_the_product() -> None:
    importing = {
        path.relative_to(ROOT)
        for name in ("shardmlx", "models", "partitioners")
        for path in sources(name)
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_lm.tuner")
    }
    assert importing == {Path("models/runtime/tuner.py")}


DOCUMENTED = {"_exit", "_replace"}
"""Public parts of Python, in spite of their names: of ``os``, and of named tuples."""


def test_private_parts_of_libraries_are_touched_in_compat_alone() -> None:
    """A name with an underscore is touched only on ``self``, ``cls`` or something of our own."""
    files = [path for name in ("shardmlx", "models", "partitioners") for path in sources(name)]
    ours = DOCUMENTED.union(*map(defined, files))
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and node.attr not in ours
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and path != ROOT / "shardmlx" / "compat.py"
    ]
    assert found == []


def sources(directory: str) -> Iterator[Path]:
    return (ROOT / directory).rglob("*.py")


def defined(path: Path) -> Iterator[str]:
    """Names with an underscore that a file of ours gives to something."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_argparse_breaks_help_between_words() -> None:
    parser = argparse.ArgumentParser(formatter_class=compat.HelpOfWholeWords)
    parser.add_argument("--it", help=" ".join(["--write-hostfile"] * 40))
    assert not [line for line in parser.format_help().splitlines() if line.endswith("-")]


def test_parts_whose_weights_are_read_are_known() -> None:
    (layer, *_) = build(FURTHER["gemma3n"]).layers
    read = [name for name in layer.altup.children() if compat.reads_weight(layer.altup, name)]
    assert sorted(read) == ["correction_coefs", "prediction_coefs"]
    assert not any(compat.reads_weight(layer.mlp, name) for name in layer.mlp.children())


def test_a_module_may_call_another_attention() -> None:
    from mlx_lm.models.llama import Attention, ModelArgs

    name = "scaled_dot_product_attention"
    args = ModelArgs("llama", 8, 1, 8, 2, 1e-5, 9, num_key_value_heads=1)
    with contract(compat.rebind, "mlx-lm"):
        ours, other = Attention(args), Attention(args)
        other.update(ours.parameters())
        seen: list[object] = []

        def attend(queries: mx.array, keys: mx.array, values: mx.array, **how: object) -> mx.array:
            seen.append(how["mask"])
            return mx.zeros_like(queries)

        compat.rebind(ours, name, attend)
        compat.rebind(ours, name, attend)
        x, mask = mx.ones((1, 3, 8)), object()
        assert not ours(x, mask).any()
        assert seen == [mask]
        assert isinstance(ours, Attention)
        assert other(x, None).any()  # another module goes on as it was
        with pytest.raises(AttributeError, match="Linear does not call scaled_dot_product"):
            compat.rebind(ours.q_proj, name, attend)


@pytest.mark.parametrize("part", PROBES, ids=lambda part: part.__name__)
def test_what_a_library_does_not_promise_holds(part: Any) -> None:
    with contract(part, tried_with(part)[0]):
        assert PROBES[part]()


def test_each_part_of_a_library_is_tried() -> None:
    ours = [each for each in vars(compat).values() if inspect.getmodule(each) is compat]
    named = {each for each in ours if "breaks:" in (each.__doc__ or "")}
    # Some have tests of their own, and one is a question, to which no is an answer.
    others = {compat.HelpOfWholeWords, compat.services_load_late, compat.gpu_fuses_attention}
    assert named == {*PROBES} | others


def test_threads_that_watch_loads_leave_mlx_as_it_was() -> None:
    load, inside = mx.load, threading.Event()

    def watch() -> None:
        with compat.watch_loads():
            inside.set()

    with compat.watch_loads():
        other = threading.Thread(target=watch)
        other.start()
        assert not inside.wait(0.1)
    other.join()
    assert mx.load is load
