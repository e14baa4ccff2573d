"""Every model type of the installed mlx-lm trains and generates in stages as in one piece, or is
refused with the reason.

Types with a row, and most recurrent ones, have more tests in other files.
"""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import mlx_lm.models
import pytest

from shardmlx.config.specs import Savings
from shardmlx.engine.batches import pack
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.modelfiles.parts import read_shape
from testbed.family_configs import CONFIGS, LAYERS
from testbed.further_configs import FURTHER
from testbed.tiny_models import build
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.cut_models import check_continued, check_pairs
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.models_and_batches import (
    check_same,
    move_trained,
    random_batch,
    reference,
    through_stages,
)
from tests.helpers.refusals import refusal

BATCH = random_batch(3, longest=20)
CUTS = [(0, 1), (1, LAYERS)]
PIECES = Savings(attention_chunk=7, recompute="selective")

REFUSED = {
    "afm7": "its layers are not one list",
    "bitnet": "No Metal back-end",
    "dbrx": "its layers read numbers while they compute",
    "deepseek_v41": "its layers share what each may change: a dict",
    "kimi_k3": "its layers share what each may change: a ResidualBlocks",
    "longcat_flash_ngram": "no module around its layers has an embedding",
    "muse_spark": "its layers share what each may change: a RMSNorm",
    "olmo": "mlx-lm has no model of type 'olmo'",
    "phixtral": "no module around its layers has an embedding",
    "prism_hadamard_qwen35": "mlx-lm cannot build this model",
}
NOT_RUN = {"phi3small"}
"""Types that end the process: MLX 0.32.4 writes outside of its memory on a CPU."""

BY_PLACE = {"afmoe", "nanochat"}
"""Types whose layers rotate by the place in a packed row, some of them or all."""

TRAINED = [each for each in FURTHER if each not in {*REFUSED, *NOT_RUN}]
trained = pytest.mark.parametrize("kind", TRAINED)


def test_every_type_of_mlx_lm_has_a_tiny_config() -> None:
    (folder,) = mlx_lm.models.__path__
    files = {each.name for each in pkgutil.iter_modules([folder])}
    found = {
        name
        for name in files
        if re.search(r"^class Model\(", (Path(folder) / f"{name}.py").read_text(), re.MULTILINE)
    }
    assert found - {*CONFIGS, *UNDECLARED, *FURTHER} == set()
    assert {*FURTHER} <= files


@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_that_cannot_be_cut_is_refused_with_the_reason(kind: str) -> None:
    assert REFUSED[kind] in str(refusal(read_shape, FURTHER[kind]))


@trained
def test_gradients_of_two_stages_are_those_of_the_whole_model(kind: str) -> None:
    """Also in one packed row, with attention in pieces, where the type takes it; and then answers
    are as likely with their prompt once."""
    model = build(FURTHER[kind], seed=3)
    move_trained(model)
    shape = read_shape(FURTHER[kind])
    expected = reference(model, [BATCH])
    check_same(through_stages(model, CUTS, [BATCH]), expected, 2e-5)
    if shape.takes_packed and shape.family.takes_pieces:
        found = through_stages(model, CUTS, pack(BATCH, 1), savings=PIECES)
        check_same(found, expected, 2e-5)
        check_pairs(model, CUTS, shares_prompts=kind not in BY_PLACE)
    sizes = {name: gradient.size for name, gradient in expected[1].items()}
    counted = sum(shape.layer(i).parameters for i in range(LAYERS))
    assert counted == sum(sizes[name] for name in sizes if name.startswith(shape.names.layers))


@trained
def test_texts_are_those_of_mlx_lm(kind: str) -> None:
    """Through two stages in chunks; then two in a group, and one that begins as the first."""
    model = build(FURTHER[kind], seed=3)
    check_continued(model, CUTS, [9, 20, 21, 22])
    shape = read_shape(FURTHER[kind])
    first, second, more = ([*range(3, 15)], [*range(40, 46)], [*range(60, 65)])
    answer = by_mlx_lm(model, first, 2)
    again = {2: [*first[:6], *more], 3: [*first, *answer, *more]}
    # Before a thread gives the model arrays: gemma3n keeps weights that it has clipped.
    others = {number: by_mlx_lm(model, each, 2) for number, each in ({1: second} | again).items()}
    texts, _ = run_pipeline(
        [model],
        [(0, LAYERS)],
        1 if shape.takes_batches else 4,
        [{0: first, 1: second}, again],
        2,
        PrefixCache.of(shape, shortest=4),
    )
    assert texts == {0: answer, **others}
