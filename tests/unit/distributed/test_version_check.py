"""Ranks compare all of their code, wherever in the package it lies."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.compat import KNOWN_BAD
from shardmlx.distributed import version_check
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.version_check import ROOT, compare_versions, source_digest
from tests.helpers.local_transport import LocalNetwork


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a file at each depth, and a linked directory, as models is."""
    root = tmp_path / "shardmlx"
    for file in ("top.py", "one/a.py", "one/two/b.py"):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    (tmp_path / "models/sizes").mkdir(parents=True)
    (tmp_path / "models/sizes/shape.py").write_text("x = 1\n")
    (root / "models").symlink_to(tmp_path / "models")
    return root


@pytest.mark.parametrize("file", ["top.py", "one/a.py", "one/two/b.py", "models/sizes/shape.py"])
def test_a_changed_file_changes_the_digest_at_any_depth(package: Path, file: str) -> None:
    before = source_digest(package)
    assert source_digest(package) == before
    (package / file).write_text("x = 2\n")
    assert source_digest(package) != before


def test_a_new_name_changes_the_digest_and_what_is_no_code_does_not(package: Path) -> None:
    before = source_digest(package)
    (package / "one/notes.txt").write_text("x = 3\n")
    assert source_digest(package) == before
    (package / "one/a.py").rename(package / "one/c.py")
    assert source_digest(package) != before


def test_the_package_s_own_digest_is_that_of_its_root() -> None:
    assert (ROOT / "errors.py").is_file()
    assert (ROOT / "models/sizes/shape.py").is_file()
    assert source_digest() == source_digest(ROOT)


def versions_are(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    installed = {"shardmlx": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"} | versions
    monkeypatch.setattr(version_check, "package_versions", lambda: installed)


@pytest.mark.parametrize(
    ("mlx", "warns"), [("0.32.9", False), ("0.33.0", True), ("1.0", True), ("0.31.7.dev1", False)]
)
def test_rank_0_warns_once_of_a_newer_minor_version_than_was_tested(
    mlx: str, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    versions_are(monkeypatch, mlx=mlx)
    LocalNetwork(2).run(compare_versions)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == warns
    assert all(f"mlx {mlx}" in each for each in lines)


def test_a_version_known_to_be_bad_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    (number, why), *_ = KNOWN_BAD["mlx"].items()
    versions_are(monkeypatch, mlx=number)
    with pytest.raises(AgreedError, match=f"mlx {number} {why}"):
        LocalNetwork(1).run(compare_versions)
