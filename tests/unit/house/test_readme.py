"""What README.md shows of numbers, curves and badges is what was measured, run and declared."""

from __future__ import annotations

import importlib
import json
import re

import pytest

from scripts.bench import same_curve
from tests.helpers.sources import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS = (ROOT / "docs/developers/benchmarks.md").read_text(encoding="utf-8")
SPREAD = r"([\d.]+) \(([\d.]+)-([\d.]+)\)"


def test_installing_stands_before_the_first_heading() -> None:
    first = README.partition("\n## ")[0]
    assert "\npip install " in first
    assert first.index("\npip install ") < first.index("docs/pictures/two-macs.svg")


def percent(parts: tuple[str, ...]) -> str:
    """Return median, least and most as README.md writes them."""
    median, least, most = (f"{100 * float(part):.0f}%" for part in parts)
    return f"{median} ({least} to {most})"


def test_speeds_are_those_of_the_benchmarks_with_their_ranges() -> None:
    rows = re.findall(r"^\| (.*) \| .* \| (.* to .*) \| (.* to .*) \|$", README, re.MULTILINE)
    (efficiency,) = re.findall(rf"\| zb-v 2/2/2/2 \| [^|]* \| {SPREAD}", BENCHMARKS)[:1]
    twice = tuple(str(2 * float(part)) for part in efficiency)
    (lora,) = re.findall(rf"\| 2 stages, zb-v \| [^|]* \| {SPREAD}", BENCHMARKS)
    (packed,) = re.findall(rf"\| 2 stages, 1f1b, packed \| [^|]* \| {SPREAD}", BENCHMARKS)
    assert [row[0].split()[0] for row in rows] == ["a", "LoRA", "the"]
    for (_, times, part), measured in zip(rows, (twice, lora, packed), strict=True):
        median, least, most = (f"{float(each):.2f}" for each in measured)
        assert times == f"{median} ({least} to {most})"
        assert part == percent(tuple(str(float(each) / 2) for each in measured))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def test_the_curves_lie_on_each_other_as_closely_as_is_said() -> None:
    losses = json.loads(same_curve.NUMBERS.read_text())["losses"]
    assert list(losses) == ["mlx_lm.lora", "1 rank", "2 ranks", "4 ranks"]
    assert {len(own) for own in losses.values()} == {same_curve.OPTIONS["iters"]}
    assert all(own[-1] < 0.6 * own[0] for own in losses.values())
    difference = same_curve.largest_difference(losses)
    (said,) = re.findall(r"differ by at most ([\d.]+)%", README)
    assert 0 < 100 * difference <= float(said) < 300 * difference


def test_the_picture_of_the_curves_is_drawn_from_the_stored_numbers() -> None:
    numbers = json.loads(same_curve.NUMBERS.read_text())
    assert same_curve.PICTURE.read_text() == same_curve.drawn(numbers["losses"])
    assert numbers["options"] == same_curve.OPTIONS


def test_badges_say_what_the_project_declares(scripts: None) -> None:
    badges = importlib.import_module("badges")
    shown = re.findall(r"\[!\[[^]]*\]\(docs/pictures/badges/(\w+)\.svg\)\]", README)
    assert shown == list(badges.badges())
    for name, badge in badges.badges().items():
        assert (badges.BADGES / f"{name}.svg").read_text() == badge.drawn()
