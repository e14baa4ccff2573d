"""Probes of what ``shardmlx.compat`` takes from libraries: it is there, and means the same."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from shardmlx import compat
from shardmlx.hosts.findings import BrokenPart


def broken_parts(probes: Mapping[Any, Callable[[], bool]] | None = None) -> Iterator[BrokenPart]:
    """Yield what an update of a library has broken. A library that is not installed has nothing."""
    for part, holds in (PROBES if probes is None else probes).items():
        library, tried = tried_with(part)
        try:
            installed = version(library)
        except PackageNotFoundError:
            continue
        try:
            good = holds()
        except Exception:  # whatever an update may raise
            good = False
        if not good:
            yield BrokenPart(part.__name__, library, installed, tried)


def tried_with(part: Any) -> tuple[str, str]:
    """Return the library of a part, and its newest version that was tried, as its docstring has."""
    found = re.search(r"^([\w-]+) (?:[\d.]+ to )?([\d.]+): ", inspect.getdoc(part) or "", re.M)
    if found is None:
        raise ValueError(f"the docstring of {part.__name__} names no library")
    return found[1], found[2]


def _mlx_finds_no_mpi() -> bool:
    compat.hide_mpi_from_mlx()
    return not mx.distributed.is_available("mpi")


def _arrays_are_writable() -> bool:
    for dtype in (mx.float32, mx.bfloat16, mx.int32):
        array, ones = mx.zeros((2, 3), dtype), mx.ones((2, 3), dtype)
        mx.eval(array, ones)
        compat.view_of(array).cast("B")[:] = compat.view_of(ones).cast("B")
        if not mx.array_equal(array, ones) or compat.view_of(ones.T).c_contiguous:
            return False
    return True


def _one_key_draws() -> bool:
    mx.random.seed((7 << 32) | 9)
    first = np.array(compat.random_key()).tolist()
    mx.random.uniform(shape=(4,))
    after = np.array(compat.random_key()).tolist()
    second = mx.random.uniform(shape=(4,))
    mx.random.seed((after[0] << 32) | after[1])
    return first == [7, 9] and bool(mx.array_equal(mx.random.uniform(shape=(4,)), second))


def _dropout_tells_what_it_keeps() -> bool:
    return [compat.keep_probability(nn.Dropout(p)) for p in (0.25, 0.0)] == [0.75, 1]


def _arrays_tell_their_sources() -> bool:
    a, b, c = (mx.ones((4, 32)) for _ in range(3))
    packed = mx.quantize(mx.stack([a, b]).astype(mx.bfloat16), 32, 4)
    found = compat.sources_of([packed[2], c, c * a, mx.ones(1)], [a, b, c])
    return found == [{0, 1}, {2}, {0, 2}, set()]


def _queries_follow_positions() -> bool:
    from mlx_lm.models import ministral3, mistral4

    expected = 1 + 0.1 * np.log(1 + np.floor(np.arange(10) / 4))[:, None]
    for body in (ministral3.LanguageModel, mistral4.Mistral4Model):
        model: Any = nn.Module()
        model.__class__ = body
        given: list[mx.array | None] = [None, mx.array([9, 6])]
        compat.follow_positions(model, partial(given.pop, 0))
        factors = type(model).__call__.__globals__["_get_llama_4_attn_scale"]
        found = factors(4, 6, 0.1, 4), factors(4, 6, 0.1, 4)
        if not (np.allclose(found[0], expected[6:]) and np.allclose(found[1], expected[[9, 6]])):
            return False
    return True


def _code_tells_what_it_reads() -> bool:
    from mlx_lm.models.gemma3n import Gemma3nAltUp

    module = Gemma3nAltUp.__new__(Gemma3nAltUp)
    names = "prediction_coefs", "modality_router"
    return [compat.reads_weight(module, name) for name in names] == [True, False]


def _attention_is_called_by_name() -> bool:
    from mlx_lm.models.llama import Attention, ModelArgs

    layer = Attention(ModelArgs("", 8, 1, 8, 2, 1e-5, 9, num_key_value_heads=1))
    seen: list[object] = []

    def attend(queries: mx.array, keys: mx.array, values: mx.array, **how: Any) -> mx.array:
        seen.append(how["mask"])
        return mx.zeros_like(queries)

    compat.rebind(layer, "scaled_dot_product_attention", attend)
    return not layer(mx.ones((1, 3, 8)), "mask").any() and seen == ["mask"]


_CONFIG = {
    "model_type": "gpt2",
    "n_ctx": 16,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 16,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 9,
}


def _models_are_read_with_load() -> bool:
    from mlx_lm.utils import load_model

    kind, args = compat.model_classes(_CONFIG)
    weights = dict(tree_flatten(kind(args.from_dict(_CONFIG)).parameters()))
    with TemporaryDirectory() as directory:
        path = Path(directory)
        mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
        (path / "config.json").write_text(json.dumps(_CONFIG))
        with compat.watch_loads() as loaded:
            load_model(path, lazy=True)
    return loaded.read.keys() == weights.keys()


def _classes_are_told() -> bool:
    kind, args = compat.model_classes(_CONFIG)
    return bool(kind.__module__ == args.__module__ == "mlx_lm.models.gpt2")


def _detokenizers_tell_whether_they_trim() -> bool:
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, NaiveStreamingDetokenizer

    made = [kind.__new__(kind) for kind in (BPEStreamingDetokenizer, NaiveStreamingDetokenizer)]
    trims = "_maybe_trim_space" in inspect.getsource(BPEStreamingDetokenizer.add_token)
    return trims and [*map(compat.trims_first_space, made)] == [True, False]


def _letters(template: str, in_python: Callable[..., str] | None = None) -> Any:
    """Return mlx-lm's tokenizer of two letters, with a chat template."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    letters = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    inside = kind(tokenizer_object=letters, chat_template=template)
    return TokenizerWrapper(inside, eos_token_ids=[1], chat_template=in_python)


def _tokens_tell_where_they_end() -> bool:
    found = compat.tokens_of_text(_letters("a"), "aba", with_ends=True)
    return found == ([0, 1, 0], [1, 2, 3])


def _backends_make_the_same_tokens() -> bool:
    letters = _letters("a")
    backend = compat.backend_of(letters)
    quick = compat.tokens_of_text(letters, "aba", with_ends=True, backend=backend)
    return backend is not None and quick == ([0, 1, 0], [1, 2, 3])


def _backends_make_the_same_text() -> bool:
    letters = _letters("a")
    decode = compat.decode_of(letters)
    is_quick: bool = decode != letters.decode
    return is_quick and decode([0, 1, 0]) == letters.decode([0, 1, 0])


def _settings_of_a_backend_are_seen() -> bool:
    letters = _letters("a")
    letters._tokenizer.backend_tokenizer.enable_truncation(1)
    return compat.backend_of(letters) is None


def _templates_in_python_are_told() -> bool:
    def write(messages: Any, **how: Any) -> str:
        return "b"

    tokenizers = (_letters("a"), _letters("a", write))
    messages = [{"role": "user", "content": "a"}]
    written = [each.apply_chat_template(messages, tokenize=False) for each in tokenizers]
    return written == ["a", "b"] and [*map(compat.has_template_in_python, tokenizers)] == [
        False,
        True,
    ]


def _templates_tell_whether_they_mark() -> bool:
    templates = ("a", "a{%- generation %}b{% endgeneration %}")
    return [compat.has_generation_marks(_letters(each), None) for each in templates] == [
        False,
        True,
    ]


def _templates_mark_the_assistant() -> bool:
    thinks = "{% if not enable_thinking %}a{% endif %}"
    tokenizer = _letters(thinks + "{% generation %}b{% endgeneration %}")
    messages = [{"role": "assistant", "content": "b"}]
    found = compat.tokens_of_assistant(tokenizer, messages, None)
    same = tokenizer.apply_chat_template(messages, tools=None)
    return found == ([0, 1], [False, True]) and same == found[0]


def _errors_of_the_hub_are_those_of_http() -> bool:
    kind = compat.hub_transport_error()
    http = sys.modules[kind.__module__.split(".")[0]]
    return issubclass(http.ConnectError, kind) and issubclass(http.ReadTimeout, kind)


def _requests_tell_that_they_are_answered() -> bool:
    from uvicorn.protocols.http import h11_impl

    protocol = h11_impl.H11Protocol
    made = inspect.getsource(protocol.__init__)
    cycle = inspect.getsource(h11_impl.RequestResponseCycle.__init__)
    return (
        issubclass(compat.http_protocol(1.0, b"{}"), protocol)
        and all(f"self.{name}" in made for name in ("cycle", "loop", "transport", "conn"))
        and "self.send_400_response(msg)" in inspect.getsource(protocol)
        and "self.response_complete = False" in cycle
    )


def _servers_tell_their_connections() -> bool:
    import uvicorn

    return uvicorn.Server(uvicorn.Config(print, log_config=None)).server_state.connections == set()


PROBES: Mapping[Any, Callable[[], bool]] = {
    compat.hide_mpi_from_mlx: _mlx_finds_no_mpi,
    compat.view_of: _arrays_are_writable,
    compat.random_key: _one_key_draws,
    compat.keep_probability: _dropout_tells_what_it_keeps,
    compat.sources_of: _arrays_tell_their_sources,
    compat.follow_positions: _queries_follow_positions,
    compat.reads_weight: _code_tells_what_it_reads,
    compat.rebind: _attention_is_called_by_name,
    compat.watch_loads: _models_are_read_with_load,
    compat.model_classes: _classes_are_told,
    compat.trims_first_space: _detokenizers_tell_whether_they_trim,
    compat.tokens_of_text: _tokens_tell_where_they_end,
    compat.backend_of: _backends_make_the_same_tokens,
    compat.decode_of: _backends_make_the_same_text,
    compat.encodes_plainly: _settings_of_a_backend_are_seen,
    compat.has_template_in_python: _templates_in_python_are_told,
    compat.has_generation_marks: _templates_tell_whether_they_mark,
    compat.tokens_of_assistant: _templates_mark_the_assistant,
    compat.hub_transport_error: _errors_of_the_hub_are_those_of_http,
    compat.http_protocol: _requests_tell_that_they_are_answered,
    compat.abort_connections: _servers_tell_their_connections,
}
"""Probe of each function of ``compat`` that takes a part of a library. MPI's has none: a rank does
not start if it is broken."""
