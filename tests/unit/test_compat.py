"""What ``shardmlx.compat`` takes from other libraries is still there, and still means the same.

A test that fails here says that an update of a library changed a part that is private to it, or
that its documentation does not speak of: which library, and what to do, stands in the failure.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import ministral3, mistral4
from mlx_lm.utils import load_model

from shardmlx import compat
from tests.helpers.models_and_batches import build, save_model_directory, tiny_config
from tests.helpers.undeclared_configs import UNDECLARED

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


DOCUMENTED = {"_exit", "_replace"}
"""Public parts of Python, in spite of their names: of ``os``, and of named tuples."""


def test_private_parts_of_libraries_are_touched_in_compat_alone() -> None:
    """A name with an underscore is touched only on ``self``, ``cls`` or something of our own."""
    files = [path for name in ("shardmlx", "models", "partitioners") for path in sources(name)]
    trees = {path: ast.parse(path.read_text()) for path in files}
    ours = DOCUMENTED.union(*map(defined, trees.values()))
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and node.attr not in ours
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        and path != ROOT / "shardmlx" / "compat.py"
    ]
    assert found == []


def sources(directory: str) -> Iterator[Path]:
    return (ROOT / directory).rglob("*.py")


def defined(tree: ast.Module) -> Iterator[str]:
    """Names with an underscore that a file of ours gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_argparse_prints_through_one_method() -> None:
    output = io.StringIO()
    for prints in (True, False):
        parser = compat.QuietParser(prog="it")
        parser.add_argument("--version", action="version", version="it 1")
        parser.prints = prints
        for flag in ("--help", "--version"):
            with redirect_stdout(output), pytest.raises(SystemExit):
                parser.parse_args([flag])
    assert output.getvalue().count("usage: it") == output.getvalue().count("it 1") == 1, (
        f"argparse of Python {sys.version} broke compat.QuietParser: {compat.QuietParser.__doc__}"
    )


def test_mlx_finds_no_mpi() -> None:
    with contract(compat.hide_mpi_from_mlx, "mlx"):
        program = (
            "from shardmlx import compat; compat.hide_mpi_from_mlx(); import mlx.core as mx; "
            "print(mx.distributed.is_available('mpi'))"
        )
        assert run_alone(program) == "False"


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.int32])
def test_the_memory_of_an_mlx_array_may_be_written_to(dtype: mx.Dtype) -> None:
    with contract(compat.view_of, "mlx"):
        array = mx.zeros((2, 3), dtype)
        mx.eval(array)
        view = compat.view_of(array)
        assert view.c_contiguous
        assert not view.readonly
        ones = mx.ones((2, 3), dtype)
        mx.eval(ones)
        view.cast("B")[:] = compat.view_of(ones).cast("B")
        assert mx.array_equal(array, ones)
        assert not compat.view_of(ones.T).c_contiguous


def test_mlx_draws_from_one_key_that_can_be_seen() -> None:
    with contract(compat.random_key, "mlx"):
        mx.random.seed((7 << 32) | 9)
        assert np.array(compat.random_key()).tolist() == [7, 9]
        mx.random.uniform(shape=(4,))
        after = np.array(compat.random_key()).tolist()
        second = mx.random.uniform(shape=(4,))
        mx.random.seed((after[0] << 32) | after[1])
        assert mx.array_equal(mx.random.uniform(shape=(4,)), second)


def test_a_dropout_tells_how_much_it_keeps() -> None:
    with contract(compat.keep_probability, "mlx"):
        assert compat.keep_probability(nn.Dropout(0.25)) == 0.75
        assert compat.keep_probability(nn.Dropout(0.0)) == 1


@pytest.mark.parametrize("body", [ministral3.LanguageModel, mistral4.Mistral4Model])
def test_queries_are_scaled_by_positions_of_any_order(body: type[nn.Module]) -> None:
    with contract(compat.follow_positions, "mlx-lm"):
        model: Any = nn.Module()
        model.__class__ = body
        factors = body.__call__.__globals__["_get_llama_4_attn_scale"]
        expected = 1 + 0.1 * np.log(1 + np.floor(np.arange(10) / 4))
        assert np.allclose(factors(4, 6, 0.1, 4), expected[6:, None])
        given: list[mx.array | None] = [None, mx.array([9, 6])]
        compat.follow_positions(model, lambda: given.pop(0))
        ours = type(model).__call__.__globals__["_get_llama_4_attn_scale"]
        assert ours is not factors
        assert np.allclose(ours(4, 6, 0.1, 4), expected[6:, None])
        assert np.allclose(ours(4, 6, 0.1, 4), expected[[9, 6], None])


def test_gemma_4_tells_what_each_layer_gets_beside_hidden_states() -> None:
    body = build(UNDECLARED["gemma4_text"]).model
    tokens, given = mx.array([[3, 4, 5]]), []

    class Layer(type(body.layers[0])):  # type: ignore[misc]
        def __call__(self, *args: Any, per_layer_input: mx.array, **how: Any) -> Any:
            given.append(per_layer_input)
            return super().__call__(*args, per_layer_input=per_layer_input, **how)

    for layer in body.layers:
        layer.__class__ = Layer
    with contract(compat.inputs_of_layers, "mlx-lm"):
        body(tokens)
        x = body.embed_tokens(tokens) * body.embed_scale
        found = compat.inputs_of_layers(body, x, tokens)
        assert mx.array_equal(found, mx.stack(given, axis=2))


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


def test_mlx_lm_reads_a_model_with_load(tmp_path: Path) -> None:
    save_model_directory(tmp_path, tiny_config(layers=1))
    load = mx.load
    with contract(compat.watch_loads, "mlx-lm"):
        with compat.watch_loads() as loaded:
            model, _ = load_model(tmp_path, lazy=True)
        assert {name for name, _ in tree_flatten(model.parameters())} == loaded.read.keys()
        assert mx.load is load


def test_mlx_lm_tells_the_classes_of_a_model() -> None:
    with contract(compat.model_classes, "mlx-lm"):
        kind, args = compat.model_classes({"model_type": "mistral"})
        assert kind.__module__ == args.__module__ == "mlx_lm.models.llama"


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


def test_a_lazy_array_tells_what_it_is_computed_from() -> None:
    a, b, c = (mx.ones((4, 32)) for _ in range(3))
    stacked = mx.stack([a, b])
    packed = mx.quantize(stacked.astype(mx.bfloat16), 32, 4)
    with contract(compat.sources_of, "mlx"):
        found = compat.sources_of([packed[2], c, c * a, mx.ones(1)], [a, b, c])
        assert found == [{0, 1}, {2}, {0, 2}, set()]


def test_detokenizers_say_whether_they_trim() -> None:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer

    with contract(compat.trims_first_space, "mlx-lm"):
        made = [kind.__new__(kind) for kind in (BPEStreamingDetokenizer, NaiveStreamingDetokenizer)]
        assert [*map(compat.trims_first_space, made)] == [True, False]
        assert "_maybe_trim_space" in inspect.getsource(BPEStreamingDetokenizer.add_token)


def test_mpi4py_gives_the_handle_of_a_communicator() -> None:
    program = (
        "import ctypes; from mpi4py import MPI; from shardmlx.compat import mpi_handle; "
        "size = ctypes.c_int(); world = ctypes.c_void_p(mpi_handle(MPI, MPI.COMM_WORLD)); "
        "ctypes.CDLL(MPI.__file__).MPI_Comm_size(world, ctypes.byref(size)); print(size.value)"
    )
    with contract(compat.mpi_handle, "mpi4py"):
        assert run_alone(program) == "1"


def test_the_hubs_errors_are_made_of_its_http_librarys() -> None:
    with contract(compat.hub_transport_error, "huggingface_hub"):
        kind = compat.hub_transport_error()
        library = sys.modules[kind.__module__.split(".")[0]]
        assert library.__name__ in ("httpx", "httpx2")
        assert issubclass(library.ConnectError, kind)
        assert issubclass(library.ReadTimeout, kind)


def test_uvicorns_protocol_tells_when_a_request_is_answered() -> None:
    import uvicorn
    from uvicorn.protocols.http import h11_impl

    with contract(compat.http_protocol, "uvicorn"):
        kind = compat.http_protocol(1.0, b"{}")
        assert issubclass(kind, h11_impl.H11Protocol)
        made = inspect.getsource(h11_impl.H11Protocol.__init__)
        names = ("cycle", "loop", "transport", "conn")
        assert all(f"self.{name}" in made for name in names)
        source = inspect.getsource(h11_impl.H11Protocol)
        assert "self.send_400_response(msg)" in source
        cycle = inspect.getsource(h11_impl.RequestResponseCycle.__init__)
        assert "self.response_complete = False" in cycle
    with contract(compat.abort_connections, "uvicorn"):
        server = uvicorn.Server(uvicorn.Config(lambda: None))
        assert server.server_state.connections == set()


def test_tensorboardx_writes_events_without_a_queue(tmp_path: Path) -> None:
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.summary import scalar

    with contract(compat.EventFile, "tensorboardX"):
        assert "multiprocessing" not in inspect.getsource(EventsWriter)
        file = compat.EventFile(tmp_path)
        file.write(scalar("loss", 1.0), 7, 0.0)
        file.flush()
        (path,) = tmp_path.iterdir()
        assert b"loss" in path.read_bytes()
        file.close()
