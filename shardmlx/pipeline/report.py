"""Report a schedule on a pipeline: its actions, drawn in time, and its costs."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

from shardmlx.errors import UserError
from shardmlx.pipeline.figure import check_picture, draw_schedule
from shardmlx.pipeline.lowering import lower, validate
from shardmlx.pipeline.schedules import compute_actions, get_schedule
from shardmlx.pipeline.simulate import Costs, Simulation, simulate
from shardmlx.pipeline.text_timeline import timeline

PRINTED = ("summary", "actions", "timeline", "lowered")
"""The forms of a report as text: for people, compute actions, drawn in time, with messages."""

FORMS = (*PRINTED, "json")
"""Forms of a report: text, and JSON for programs."""


def show_schedule(
    name: str,
    pp: int,
    microbatches: int,
    *,
    virtual: int | None = None,
    costs: str = "1,1,1",
    draw: str | None = None,
    form: str = FORMS[0],
) -> str:
    """Return the report of a schedule of ``pp`` ranks in one of ``FORMS``.

    ``costs`` are the units of time of forward, input gradient and weight gradient of one
    micro-batch; ``draw`` names a file for a picture. Raises ``UserError``.
    """
    schedule = get_schedule(name)
    if draw:
        check_picture(Path(draw))
    virtual = schedule.default_virtual if virtual is None else virtual
    units = _costs(costs)
    grid = compute_actions(schedule.name, pp, microbatches, virtual)
    placement = schedule.placement(pp, virtual)
    lowered = lower(grid, placement)
    validate(lowered, placement)
    simulation = simulate(grid, placement, units)
    if draw:
        title = f"{schedule.name}, {pp} ranks, {microbatches} micro-batches"
        draw_schedule(simulation, Path(draw), title=title, unit="units of time")
    if form == "json":
        facts = {"schedule": name, "pp": pp, "microbatches": microbatches, "virtual": virtual}
        numbers = {
            "costs": astuple(units),
            "makespan": simulation.makespan,
            "bubble_fraction": simulation.bubble,
            "bubble_fraction_of_ranks": simulation.bubbles,
            "peak_in_flight": simulation.peak_in_flight,
        }
        return json.dumps(facts | numbers)
    if form == "summary":
        return _summary(simulation)
    if form == "timeline":
        return timeline(simulation)
    return "\n".join(
        " ".join([f"r{rank}", *map(str, actions)])
        for rank, actions in enumerate(lowered if form == "lowered" else grid)
    )


def _costs(text: str) -> Costs:
    try:
        forward, input_gradient, weight_gradient = map(float, text.split(","))
    except ValueError:
        raise UserError(f"costs {text!r}", "give three numbers F,I,W, like 1,1,1") from None
    return Costs(forward, input_gradient, weight_gradient)


def _summary(simulation: Simulation) -> str:
    peaks = simulation.peak_in_flight
    return (
        f"makespan        {simulation.makespan:g}\n"
        f"bubble          {simulation.bubble:.1%}\n"
        f"peak in flight  {' '.join(map(str, peaks))}  (stage-micro-batches, ranks 0 to "
        f"{len(peaks) - 1})\n\n{timeline(simulation)}"
    )
