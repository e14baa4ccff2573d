"""What tests of many small exports leave out, since it takes most of their time."""

from __future__ import annotations

import pytest


@pytest.fixture
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect no garbage: after all that pytest has imported it takes a tenth of a second."""
    monkeypatch.setattr("gc.collect", lambda: 0)
