"""Order the work of each pipeline rank: which micro-batch it works on, one action after the other.

A schedule is a pure function of pipeline ranks p, micro-batches m and virtual stages v (stages a
rank). Rank r is first written as a row of words such as F or B of a stage; the j-th occurrence of a
word means micro-batch j, and words past the last micro-batch are dropped. Every schedule thus
serves any p and m, and every stage sees its micro-batches in ascending order: gradients are summed
in the order of one process.

Each schedule stands beside a small grid, as ``shardmlx schedule --print timeline`` draws it:
a row a rank, time to the right, ``2F1`` the forward of micro-batch 1 at stage 2, a dot where a rank
idles. F, I and W are drawn equally long, and so is a B that is not divided into I and W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

from shardmlx.errors import UserError
from shardmlx.pipeline.actions import Action, Grid, Kind

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W

Word = tuple[int, Kind]
"""A stage and its work; the micro-batch is the number of earlier occurrences."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: its name, its order of actions, its placement of stages.

    ``order(pp, microbatches, virtual)`` gives the compute actions of each pipeline rank;
    ``placement(pp, virtual)`` the pipeline rank of each of the ``pp * virtual`` stages.
    ``virtual_choices`` lists the stages a rank it can run, ``None`` for any from 1.
    ``fewest_alike(pp, microbatches)`` is the number of micro-batches, not more than there are, from
    which on a rank never holds another set of arrays at a time. ``in_groups`` of p micro-batches
    the order repeats itself, or else with each.
    """

    name: str
    order: Callable[[int, int, int], Grid]
    placement: Callable[[int, int], tuple[int, ...]]
    fewest_alike: Callable[[int, int], int]
    default_virtual: int = 1
    virtual_choices: tuple[int, ...] | None = None
    in_groups: bool = False

    def period(self, pp: int) -> int:
        """Return after how many micro-batches a rank's order repeats itself."""
        return pp if self.in_groups else 1

    def check(self, pp: int, microbatches: int, virtual: int) -> None:
        """Raise ``UserError`` unless the schedule can run with these numbers."""
        for what, count in (
            ("pipeline ranks", pp),
            ("micro-batches", microbatches),
            ("virtual stages a rank", virtual),
        ):
            if count < 1:
                raise UserError(f"schedule {self.name} with {count} {what}", "give 1 or more")
        if self.virtual_choices is not None and virtual not in self.virtual_choices:
            fitting = " or ".join(map(str, self.virtual_choices))
            raise UserError(
                f"schedule {self.name} runs {fitting} stages a rank, not {virtual}",
                f"use {fitting}, or the schedule interleaved-1f1b",
            )


def loop_placement(pp: int, virtual: int) -> tuple[int, ...]:
    """Put stage s on rank s mod p: the pipeline goes round the ranks ``virtual`` times."""
    return tuple(stage % pp for stage in range(pp * virtual))


def v_placement(pp: int, virtual: int) -> tuple[int, ...]:
    """Put the stages down the ranks and back up: the first and the last stage on rank 0."""
    down = tuple(range(pp))
    return tuple(chain.from_iterable(down[:: (-1) ** turn] for turn in range(virtual)))


def _numbered(words: Iterable[Word], microbatches: int) -> tuple[Action, ...]:
    """Give each word the next micro-batch of its own; drop it when there is none left."""
    said: dict[Word, int] = {}
    actions = []
    for word in words:
        microbatch = said.get(word, 0)
        if microbatch < microbatches:
            said[word] = microbatch + 1
            actions.append(Action(*word, microbatch))
    return tuple(actions)


def _one_f_one_b(forwards: list[Word], backwards: list[Word], warm_up: int) -> Iterator[Word]:
    """Yield ``warm_up`` forwards, then a forward and a backward in turn, then the rest."""
    yield from forwards[:warm_up]
    steady = forwards[warm_up:]
    for pair in zip(steady, backwards, strict=False):
        yield from pair
    yield from backwards[len(steady) :]


def gpipe(pp: int, microbatches: int, virtual: int) -> Grid:
    """Order all forwards, then all backwards.

    ::

        r0 0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2
        r1 .   1F0 1F1 1F2 .   .   1B0 1B1 1B2 .
        r2 .   .   2F0 2F1 2F2 2B0 2B1 2B2 .   .

    Bubble (p-1)/(m+p-1); all m micro-batches in flight. Huang et al., GPipe, arXiv:1811.06965;
    with several stages a rank, the breadth-first order of Lamy-Poirier, arXiv:2211.05953.
    """
    m = microbatches
    return tuple(
        _numbered(
            chain(
                *([(stage, F)] * m for stage in range(rank, pp * virtual, pp)),
                *([(stage, B)] * m for stage in reversed(range(rank, pp * virtual, pp))),
            ),
            m,
        )
        for rank in range(pp)
    )


def one_f_one_b(pp: int, microbatches: int, virtual: int) -> Grid:
    """Order a backward as soon as there is one: "one forward, one backward".

    ::

        r0 0F0 0F1 0F2 .   .   0B0 .   0B1 .   0B2
        r1 .   1F0 1F1 .   1B0 1F2 1B1 .   1B2 .
        r2 .   .   2F0 2B0 2F1 2B1 2F2 2B2 .   .

    GPipe's bubble, but only min(m, p-r) micro-batches in flight on rank r. Narayanan et al.,
    PipeDream-Flush, arXiv:2006.09503.
    """
    m = microbatches
    return tuple(
        _numbered(_one_f_one_b([(rank, F)] * m, [(rank, B)] * m, pp - 1 - rank), m)
        for rank in range(pp)
    )


def interleaved_one_f_one_b(pp: int, microbatches: int, virtual: int) -> Grid:
    """Order 1F1B over ``virtual`` stages a rank: the bubble is divided by their number.

    ::

        r0 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
        r1 .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 .

    Micro-batches go through a rank's stages in groups. For m a multiple of p the groups have p
    micro-batches: Narayanan et al., Megatron-LM, arXiv:2104.04473. Other m are dealt to the same
    number of groups as evenly as can be, so that no group is smaller than p unless m is, and the
    first micro-batch of a group is back from its round when the last has set out.
    """
    if virtual == 1:  # a longer warm-up would only hold more memory
        return one_f_one_b(pp, microbatches, virtual)
    rounds = max(1, microbatches // pp)
    groups = [(microbatches + i) // rounds for i in reversed(range(rounds))]

    def words(stages: Sequence[int], kind: Kind) -> list[Word]:
        return [(stage, kind) for size in groups for stage in stages for _ in range(size)]

    def rank_words(rank: int) -> Iterator[Word]:
        stages = range(rank, pp * virtual, pp)
        warm_up = (virtual - 1) * groups[0] + 2 * (pp - 1 - rank)
        return _one_f_one_b(words(stages, F), words(stages[::-1], B), warm_up)

    return tuple(_numbered(rank_words(rank), microbatches) for rank in range(pp))


def zb_h1(pp: int, microbatches: int, virtual: int) -> Grid:
    """Order 1F1B with the backward split, W p-1 micro-batches behind F on every rank.

    ::

        r0 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
        r1 .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
        r2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Bubble time (p-1)(F+I-W) for m >= p and W no dearer than F or I; at most min(m, p)
    micro-batches in flight, from F to the end of W. Qi et al., Zero Bubble Pipeline Parallelism,
    arXiv:2401.10241.
    """
    return tuple(
        _numbered(
            [(rank, F)] * (pp - 1 - rank)
            + [(rank, F), (rank, I)] * rank
            + [(rank, F), (rank, I), (rank, W)] * microbatches,
            microbatches,
        )
        for rank in range(pp)
    )


def zb_v(pp: int, microbatches: int, virtual: int) -> Grid:
    """Order zero-bubble work on a V: rank r runs stage r on the way down, 2p-1-r on the way up.

    ::

        r0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
        r1 .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    At F = I = W and m >= 2p-1 no rank idles between its first action and its last. At most 2p
    stage-micro-batches are in flight: no more memory than 1F1B, as a stage has half the layers.
    Qi et al., arXiv:2401.10241 and 2405.15362.
    """

    def rank_words(rank: int) -> list[Word]:
        down, up = rank, 2 * pp - 1 - rank
        forward_up: list[Word] = [(up, F), (up, I), (up, W)]
        return (
            [(down, F)] * (2 * (pp - rank) - 1)  # until the first micro-batch comes back up
            + [(up, F), (down, F)] * rank  # until its gradient comes from rank 0
            + forward_up * (pp - rank)  # until the gradient comes back to the stage going down
            + [(down, F), (down, I), (down, W), *forward_up] * (microbatches - pp)
            + [(down, I), (up, I)] * rank  # other ranks wait for these; W can come later
            + [(down, I), (down, W)] * (pp - rank)
            + [(up, W), (down, W)] * rank
        )

    return tuple(_numbered(rank_words(rank), microbatches) for rank in range(pp))


def _all(pp: int, microbatches: int) -> int:
    """Return all micro-batches: each further one is held beside the others."""
    return microbatches


def _of_fill_and_drain(pp: int, microbatches: int) -> int:
    """Return as many as fill the pipeline, do the same over and over, and drain it."""
    return min(microbatches, 4 * pp)


def _of_groups(pp: int, microbatches: int) -> int:
    """Return the same for groups of micro-batches, with as many larger ones among them."""
    larger = microbatches % pp
    groups = max(4, larger + 3)
    return min(microbatches, groups * pp + larger)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        schedule.name: schedule
        for schedule in (
            Schedule("gpipe", gpipe, loop_placement, _all),
            Schedule("1f1b", one_f_one_b, loop_placement, _of_fill_and_drain, 1, (1,)),
            Schedule(
                "interleaved-1f1b",
                interleaved_one_f_one_b,
                loop_placement,
                _of_groups,
                default_virtual=2,
                in_groups=True,
            ),
            Schedule("zb-h1", zb_h1, loop_placement, _of_fill_and_drain, 1, (1,)),
            Schedule("zb-v", zb_v, v_placement, _of_fill_and_drain, 2, (2,)),
        )
    }
)


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name. Raises ``UserError``, which lists the names."""
    if name not in SCHEDULES:
        raise UserError(f"unknown schedule {name!r}", f"use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def compute_actions(name: str, pp: int, microbatches: int, virtual: int | None = None) -> Grid:
    """Return the compute actions of each pipeline rank.

    ``virtual`` defaults to the schedule's own. Raises ``UserError`` with numbers that the schedule
    cannot run.
    """
    schedule = get_schedule(name)
    stages = schedule.default_virtual if virtual is None else virtual
    schedule.check(pp, microbatches, stages)
    return schedule.order(pp, microbatches, stages)
