"""What every test has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Helpers hold assertions too: a failed one shows its values, as in a test.
HERE = Path(__file__).parent / "support"
pytest.register_assert_rewrite(
    *(path.stem for path in HERE.rglob("*.py") if not path.stem.startswith(("test_", "conftest")))
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m real` or `-m server` reads no file without such a test: imports take half a minute."""
    mark = config.option.markexpr
    if mark in ("real", "server") and collection_path.suffix == ".py":
        return f"mark.{mark}" not in collection_path.read_text() or None
    return None


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A run in this process leaves its SIGTERM handler behind."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
