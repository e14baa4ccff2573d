"""Put the root of the project on the path, for a script that uses what it shares with the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

sys.path.insert(0, str(ROOT))
