"""Private and undocumented parts of the libraries we build on: touched here, and nowhere else.

An update of a library may change any of them without a word. Each function names the library, the
version it was tried with, and what to do when it breaks. ``shardmlx.hosts.library_probes`` tries
each, in ``doctor`` and in ``tests/unit/test_compat.py``, which says the same. Libraries are
imported inside the functions: whoever imports this module loads neither MLX nor MPI nor uvicorn.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import textwrap
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from dis import get_instructions
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from itertools import pairwise
from tempfile import NamedTemporaryFile
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import TimerHandle, Transport
    from collections.abc import Callable, Collection, Iterator, Sequence

    import mlx.core as mx


TESTED = {"mlx": "0.32", "mlx-lm": "0.32"}
"""Newest minor version of each library that the tests have passed with."""

KNOWN_BAD = {
    "mlx": {
        "0.30.0": "compiled training fails",  # github.com/ml-explore/mlx/issues/2864
        "0.32.1": "generates wrong tokens",  # github.com/nathansutton/chad/issues/50
    }
}
"""Versions that no run may use, by library, and why."""


def is_untested(package: str, number: str) -> bool:
    """Return whether a library is of a newer minor version than those in ``TESTED``."""
    minors = [tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (number, TESTED[package])]
    return minors[0] > minors[1]


class HelpOfWholeWords(argparse.HelpFormatter):
    """Help in which no line ends within a flag or a name, since people copy them.

    argparse of Python 3.11 to 3.14: ``_split_lines`` breaks the help of an option. When it breaks:
    look for ``textwrap`` in argparse.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def hide_mpi_from_mlx() -> None:
    """Keep MLX from loading MPI, where ``mlx.core`` has not been imported yet.

    mlx 0.32.4: the variable is ``MLX_MPI_LIBNAME``; its documentation says ``MPI_LIBNAME``. When it
    breaks: look for ``getenv`` in mlx/distributed/mpi/mpi.cpp.
    """
    os.environ.setdefault("MLX_MPI_LIBNAME", "/nonexistent")


class _LateServices:
    """A finder of services, whose modules are executed once they are used."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name) if name in ("wandb", "swanlab") else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def services_load_late() -> Iterator[None]:
    """Have services that are imported inside loaded when somebody uses them.

    mlx-lm 0.31 to 0.32: ``mlx_lm.tuner.callbacks`` imports wandb and swanlab wherever they are
    installed, which takes each rank 2.5 s and 45 MiB. When it breaks: import it without this.
    """
    sys.meta_path.insert(0, _LateServices)
    try:
        yield
    finally:
        sys.meta_path.remove(_LateServices)


def view_of(array: Any) -> memoryview:
    """Return the memory of an evaluated MLX or NumPy array: no copy, writable.

    mlx 0.32.4: the stub of ``mx.array`` leaves out ``__buffer__``, and nothing promises that the
    memory may be written to. When it breaks: receive into NumPy arrays, and copy them into MLX's.
    """
    return memoryview(array)


def random_key() -> mx.array:
    """Return the key that MLX's random stream on this thread draws from next: uint32 (2,).

    mlx 0.32.4: ``mx.random.state`` is a list of one key, to MLX's stub an object. When it breaks:
    give each sampler a key of its own, and split it at each token.
    """
    import mlx.core as mx

    state: Any = mx.random.state
    key: mx.array = state[0]
    return key


def begin_evaluation(*arrays: Any) -> None:
    """Let the device compute arrays, or trees of them, and go on at once."""
    import mlx.core as mx

    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


@cache
def gpu_fuses_attention() -> bool:
    """Tell whether the memory of attention's gradient on the GPU is linear in the tokens.

    mlx 0.32.4: nothing says whether a gradient is fused. On Metal, 2048 tokens take 1.2 times the
    bytes of 1024 where it is (reported of an M1 Max), 3.5 times where scores are held. When it
    breaks: return False, and attention is computed in pieces.
    """
    import mlx.core as mx

    if not mx.metal.is_available():
        return False
    attention = partial(mx.fast.scaled_dot_product_attention, scale=1.0, mask="causal")
    gradient = mx.grad(lambda *given: attention(*given).sum(), argnums=(0, 1, 2))
    peaks = []
    for length in (1024, 2048):
        given = [mx.ones((1, heads, length, 128), mx.bfloat16) for heads in (32, 8, 8)]
        mx.eval(given)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(gradient(*given))
        peaks.append(mx.get_peak_memory() - before)
    mx.clear_cache()
    return peaks[1] < 2 * peaks[0]


def keep_probability(dropout: Any) -> float:
    """Return the probability with which an ``mlx.nn.Dropout`` keeps an element.

    mlx 0.32.4: kept as ``_p_1``. When it breaks: read it from ``repr``, which says ``p=``.
    """
    return float(dropout._p_1)


COVERED = "covered_call"
"""The name by which a class keeps the ``__call__`` of mlx-lm that its own one covers."""


def _covered(module: Any, method: str) -> str:
    return COVERED if method == "__call__" and hasattr(type(module), COVERED) else method


def calls(module: Any, name: str, method: str = "__call__") -> bool:
    """Tell whether a method of a module is a function that uses the global ``name``."""
    method = _covered(module, method)
    code = getattr(getattr(type(module), method, None), "__code__", None)
    return code is not None and name in code.co_names


def reads_weight(module: Any, name: str) -> bool:
    """Tell whether a method of a module reads the ``weight`` of its part ``name``, beside a call.

    mlx-lm 0.32.2: gemma3n clips the weights of two parts of each layer. Python 3.11 to 3.14: an
    instruction for each attribute. When it breaks: name those parts here.
    """
    codes = [each.__code__ for each in vars(type(module)).values() if hasattr(each, "__code__")]
    both = [code for code in codes if {name, "weight"} <= {*code.co_names}]
    names = [[step.argval for step in get_instructions(code)] for code in both]
    return any((name, "weight") in pairwise(each) for each in names)


def uses_only(module: Any, names: Collection[str]) -> bool:
    """Tell whether a module's ``__call__`` uses these names and no others, nor any constant: then
    no number but its argument goes through them."""
    code = getattr(getattr(type(module), _covered(module, "__call__")), "__code__", None)
    return code is not None and {*code.co_names} == {*names} and {*code.co_consts} <= {None}


def call_as(module: Any, kind: type[Any]) -> None:
    """Give a module the ``__call__`` of another class, under what covers its own."""
    call = {_covered(module, "__call__"): kind.__call__}
    module.__class__ = type(kind.__name__, (type(module), kind), call)


def rebind(module: Any, name: str, function: Callable[..., Any], method: str = "__call__") -> None:
    """Let a method of a module of mlx-lm call ``function`` for the global ``name`` of its file.

    mlx-lm 0.32.2: attention calls ``scaled_dot_product_attention`` by keyword, an MLP ``swiglu``.
    The module gets a class of its own, whose method has that one name bound otherwise.
    ``AttributeError`` where the code does not use the name. When it breaks: write the method here.
    """
    kind = type(module)
    if not calls(module, name, method):
        raise AttributeError(f"{kind.__module__}.{kind.__name__} does not call {name}")
    method = _covered(module, method)
    code = getattr(kind, method)
    if code.__globals__.get(name) is not function:
        module.__class__ = type(kind.__name__, (kind,), {method: with_global(code, name, function)})


def with_global(call: Any, name: str, function: Callable[..., Any]) -> Any:
    """Return a copy of a Python function that finds ``function`` for the global ``name``."""
    names = {**call.__globals__, name: function}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return own


def follow_positions(body: Any, positions: Callable[[], mx.array | None]) -> None:
    """Let a model's factors of queries follow ``positions()`` (T,), where that is not None.

    mlx-lm 0.32.2: ministral3 and mistral4 call ``_get_llama_4_attn_scale(length, offset, beta,
    original length)`` of their files, a row for each position from the offset. When it breaks:
    write ``1 + beta * log(1 + floor(position / original length))`` here.
    """
    name = "_get_llama_4_attn_scale"
    if not calls(body, name):
        return
    plain = type(body).__call__.__globals__[name]

    def factors(length: int, offset: Any, *how: Any) -> Any:
        own = positions()
        # Treat each position as if it were a sequence of one token, after so many others.
        return plain(length, offset, *how) if own is None else plain(1, own, *how).reshape(-1, 1)

    rebind(body, name, factors)


_WATCHING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Lazy arrays that were read in a block, by name, and those that were stacked of others."""

    read: dict[str, mx.array] = field(default_factory=dict)
    stacks: list[tuple[mx.array, list[mx.array]]] = field(default_factory=list)


@contextmanager
def watch_loads() -> Iterator[Loaded]:
    """Give out, as it fills, what ``mlx.core.load`` and ``mlx.core.stack`` return in the block.

    mlx-lm 0.32.2: ``load_model`` calls ``mx.load`` for each file, and families call ``mx.stack``
    for experts; neither hands out an array as it was read. When it breaks: see what they call.
    """
    import mlx.core as mx

    # One thread at a time: the second would put back what the first has put in.
    with _WATCHING:
        load = mx.load
        stack = mx.stack
        seen = Loaded()

        def watched_load(*args: Any, **kwargs: Any) -> Any:
            loaded = load(*args, **kwargs)
            seen.read.update(loaded if isinstance(loaded, dict) else {})
            return loaded

        def watched_stack(arrays: Any, axis: int = 0, **kwargs: Any) -> Any:
            arrays = list(arrays)
            stacked = stack(arrays, axis, **kwargs)
            if axis == 0:
                seen.stacks.append((stacked, arrays))
            return stacked

        mx.load, mx.stack = watched_load, watched_stack  # type: ignore[assignment]
        try:
            yield seen
        finally:
            mx.load = load
            mx.stack = stack


_EDGE = re.compile(r'"?([^"\s]+)"? -> "?([^"\s]+)"?')


def sources_of(outputs: Sequence[mx.array], leaves: Sequence[mx.array]) -> list[set[int]]:
    """Return, for each lazy array, the numbers of the ``leaves`` that it is computed from.

    mlx 0.32.4: the form of what ``mx.export_to_dot`` writes: an edge a line, with the names that
    were given. When it breaks: let exports from the hub bring a whole layer at a time.
    """
    import mlx.core as mx

    # A node of its own for each output: one that is a leaf, too, goes by one name only.
    named = {f"o{i}": mx.expand_dims(each, 0) for i, each in enumerate(outputs)}
    named |= {f"s{i}": each for i, each in enumerate(leaves)}
    with NamedTemporaryFile("r", suffix=".dot", encoding="utf-8") as file:
        mx.export_to_dot(file.name, **named)
        above: dict[str, list[str]] = {}
        for line in file:
            if match := _EDGE.match(line):
                above.setdefault(match[2], []).append(match[1])
    found = []
    for i in range(len(outputs)):
        seen: set[str] = set()
        todo = [f"o{i}"]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += above.get(node, ())
        found.append({int(node[1:]) for node in seen if node[0] == "s"})
    return found


def model_classes(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's class of a model, and that of its arguments.

    mlx-lm 0.32.2: what ``load_model`` calls. When it breaks: import the module of ``mlx_lm.models``
    by ``MODEL_REMAPPING``.
    """
    from mlx_lm.utils import _get_classes

    kind, args = _get_classes(config)
    return kind, args


_GENERATION = re.compile(r"\{%-?\s*generation\b")
"""The tag of a chat template around what the assistant says."""


def tokens_of_text(
    tokenizer: Any, text: str, *, with_ends: bool, backend: Any | None = None
) -> tuple[list[int], list[int] | None] | None:
    """Return the tokens of what a chat template wrote, and the character at which each ends, if
    asked for; None from a tokenizer that does not know it. Its ``backend``, that of ``backend_of``,
    takes half the time.

    mlx-lm 0.32.2: its wrapper is not called, so the tokenizer inside, ``_tokenizer``, is: as its
    ``apply_chat_template`` does. When it breaks: encode the text twice, with and without offsets.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    if backend is not None:
        encode = backend.encode_batch if with_ends else backend.encode_batch_fast
        (encoding,) = encode([text], add_special_tokens=False)
        ids = encoding.ids
        offsets = encoding.offsets if with_ends else None
    elif inner is not None and inner.is_fast:
        found = inner(text, add_special_tokens=False, return_offsets_mapping=with_ends)
        ids = found["input_ids"]
        offsets = found["offset_mapping"] if with_ends else None
    else:
        return None
    if offsets is None:
        return ids, None
    # A token of no character, such as a space put in front, ends where the one before it does.
    return ids, [*itertools.accumulate((end for _, end in offsets), max)]


def backend_of(tokenizer: Any) -> Any | None:
    """Return the tokenizer of the tokenizers package that alone makes a tokenizer's tokens; None
    where there is none.

    mlx-lm 0.32.2: its wrapper has transformers' in ``_tokenizer``. When it breaks: return None.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    if inner is None or not inner.is_fast or not encodes_plainly(inner):
        return None
    return inner.backend_tokenizer


def encodes_plainly(inner: Any) -> bool:
    """Return whether a tokenizer of transformers adds nothing to what its backend does.

    transformers 5.24.0: ``_encode_plus`` sets truncation, padding and
    ``encode_special_tokens`` of the backend, then encodes. When it breaks: return False.
    """
    backend = inner.backend_tokenizer
    return (
        type(inner)._encode_plus.__module__.startswith("transformers.")
        and backend.truncation is None
        and backend.padding is None
        and not inner.split_special_tokens
        and not backend.encode_special_tokens
    )


def decode_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function from tokens to text that returns what ``tokenizer.decode`` returns, in a
    third of the time where the tokenizer of the tokenizers package alone makes the text.

    transformers 5.24.0: ``decode`` looks for batches and arrays of other libraries, and ``_decode``
    cleans spaces up where the tokenizer asks for it. When it breaks: return ``tokenizer.decode``.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    plain: Callable[[list[int]], str] = tokenizer.decode
    if inner is None or not inner.is_fast or inner.clean_up_tokenization_spaces:
        return plain
    if any(
        not getattr(type(inner), name).__module__.startswith("transformers.tokenization_utils_")
        for name in ("decode", "_decode")
    ):
        return plain
    return partial(inner.backend_tokenizer.decode, skip_special_tokens=False)


def has_template_in_python(tokenizer: Any) -> bool:
    """Return whether a function of mlx-lm writes conversations, which takes fewer arguments.

    mlx-lm 0.32.2: the wrapper's ``_chat_template`` replaces Jinja's (DeepSeek V3.2). When it
    breaks: ask each template without what is optional.
    """
    return getattr(tokenizer, "_tokenizer", None) is not None and (
        tokenizer._chat_template is not None
    )


def has_generation_marks(tokenizer: Any, tools: Any) -> bool:
    """Return whether the chat template for conversations with these tools marks what the assistant
    says.

    mlx-lm 0.32.2: its wrapper does not ask for one of several templates, so the tokenizer inside,
    ``_tokenizer``, is asked. When it breaks: look into ``chat_template``.
    """
    inner = getattr(tokenizer, "_tokenizer", None)
    if inner is None or has_template_in_python(tokenizer) or inner.chat_template is None:
        return False
    return _GENERATION.search(inner.get_chat_template(None, tools)) is not None


def tokens_of_assistant(tokenizer: Any, messages: Any, tools: Any) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and whether the template marks each as the assistant's.

    mlx-lm 0.32.2: its wrapper asks for tokens alone, so the tokenizer inside, ``_tokenizer``, is
    asked, with what the wrapper adds: whether the model thinks. When it breaks: ask the wrapper, or
    tell these tokens from the text.
    """
    thinks = {tokenizer._thinking_kwarg: tokenizer.has_thinking}
    found = tokenizer._tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True, **thinks
    )
    return found["input_ids"], [*map(bool, found["assistant_masks"])]


def trims_first_space(detokenizer: Any) -> bool:
    """Return whether a detokenizer of mlx-lm takes away the space with which a text begins.

    mlx-lm 0.32.2: the byte-level one does. When it breaks: feed it a token that has one.
    """
    from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

    return isinstance(detokenizer, BPEStreamingDetokenizer)


def hub_transport_error() -> type[Exception]:
    """Return what huggingface-hub raises where no answer comes at all.

    huggingface-hub 1.0 to 2.4: ``HTTPError`` of httpx, or in later versions of httpx2, of which
    ``HfHubHTTPError`` is made. When it breaks: name the class of whichever is installed.
    """
    from huggingface_hub.errors import HfHubHTTPError

    base: Any = HfHubHTTPError.__bases__[0]
    kind: type[Exception] = base
    return kind


def http_protocol(seconds_for_head: float, no_http: bytes) -> type[Any]:
    """Return uvicorn's HTTP protocol, which closes a connection on which the head of a request
    takes longer than ``seconds_for_head``, and answers what is not HTTP with the JSON ``no_http``.

    uvicorn 0.54.0: ``H11Protocol`` with its ``cycle`` (the request that is answered), ``loop``,
    ``transport``, ``conn`` (of h11) and ``send_400_response``. When it breaks: serve without a
    deadline for heads, behind a proxy that has one.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class HeadDeadline(H11Protocol):
        _deadline: TimerHandle | None = None

        def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._forget()

        def send_400_response(self, msg: str) -> None:
            length = ("content-length", str(len(no_http)))
            headers = [("content-type", "application/json"), length, ("connection", "close")]
            answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (answer, h11.Data(data=no_http), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch(self) -> None:
            # Also over a body that goes on after its request was refused.
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget()
            elif self._deadline is None:
                self._deadline = self.loop.call_later(seconds_for_head, self.transport.close)

        def _forget(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return HeadDeadline


def abort_connections(server: Any) -> None:
    """Cut all connections of a ``uvicorn.Server``, whatever is still being sent on them.

    uvicorn 0.54.0: ``server_state.connections``, each with its ``transport``. When it breaks:
    set ``timeout_graceful_shutdown``, which logs a traceback for each request that is left.
    """
    for connection in list(server.server_state.connections):
        connection.transport.abort()
