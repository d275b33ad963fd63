"""Fixtures of the tests of benchmarks."""

from pathlib import Path

import pytest

from tests.shallow_model import shallow_model


@pytest.fixture
def shallow() -> Path:
    """The directory of the first layers of the embedded model."""
    return shallow_model()
