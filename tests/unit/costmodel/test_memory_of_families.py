"""The memory of each family's layers: what is predicted is what real stages hold."""

from __future__ import annotations

import pytest

from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.costmodel.layer_memory import layer_arrays
from shardmlx.costmodel.memory import rank_peak
from shardmlx.models.recompute import RecomputedMLP
from shardmlx.models.slice import Slice
from shardmlx.pipeline.actions import parse_grid
from tests.helpers.family_configs import CONFIGS
from tests.helpers.stage_memory import LAYERS, MICRO_BATCHES, FamilyCase, measure, weight_sizes

WITHIN = 0.05
"""Part by which what is held between two actions may differ."""
ABOVE, BELOW = 0.05, 0.07
"""Parts by which a peak may lie above and below the prediction. On a free machine none passes it by
more than 3%, nor stays below by more than 5%."""
MEASUREMENTS = 20
"""At most, until a peak comes near: on a busy machine MLX's scheduling thread gets less far ahead,
and less memory is taken."""

# Of mixtures with many experts a token, as large ones are, and with ways to save memory.
MANY = (("num_local_experts", 16), ("num_experts_per_tok", 8))
CASES = [
    *(FamilyCase(mode, 1, 3, family=family) for family in CONFIGS for mode in ("lora", "full")),
    *(
        FamilyCase("lora", 1, 3, family="mixtral", changes=MANY, pieces=pieces, recompute=recompute)
        for pieces, recompute in ((None, NONE), (32, NONE), (None, FULL))
    ),
    FamilyCase("lora", 1, 3, family="mixtral", changes=MANY, lora=(("dropout", 0.1),)),
    FamilyCase("full", 1, 3, family="mixtral", changes=MANY),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_stage_holds_and_passes_what_is_predicted(case: FamilyCase) -> None:
    (own,) = parse_grid(" ".join(f"1F{j} 1I{j} 1W{j}" for j in range(MICRO_BATCHES)))
    for _ in range(MEASUREMENTS):
        measured, sizes = measure(case)
        stage, setup = case.predicted(sizes)
        assert stage.weights == measured.weights
        assert stage.after_forward == pytest.approx(measured.after_forward, rel=WITHIN)
        assert stage.after_input == pytest.approx(measured.after_input, rel=WITHIN)
        peak = rank_peak(own, {1: stage}, setup)
        assert measured.peak <= (1 + ABOVE) * peak
        if measured.peak >= (1 - BELOW) * peak:
            return
    pytest.fail(f"at most {measured.peak} of the predicted {peak} bytes were reached")


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plan_knows_whose_mlp_computes_its_product_again(family: str) -> None:
    case = FamilyCase("full", 0, LAYERS, family=family, recompute=SELECTIVE)
    model = case.model()
    _, setup = case.predicted(weight_sizes(model))
    Slice(model, 0, LAYERS).recompute_selectively()
    for layer, kind in zip(model.layers, setup.shape.pattern, strict=True):
        arrays = layer_arrays(setup, setup.shape.kinds[kind])
        (product,) = (each for each in arrays if each.name == "recomputed product of the MLP")
        recomputes = isinstance(layer.get("mlp"), RecomputedMLP)
        assert recomputes == (product.nbytes > 0)
