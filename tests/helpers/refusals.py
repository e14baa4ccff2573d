"""How bad input must end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardmlx.errors import UserError


def refusal(work: Callable[..., object], *given: Any, **options: Any) -> UserError:
    """Return the error with which a call must end, which is a line."""
    with pytest.raises(UserError) as caught:
        work(*given, **options)
    assert "\n" not in str(caught.value)
    return caught.value
