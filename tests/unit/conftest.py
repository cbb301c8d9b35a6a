"""A fixture for tests of Hopper kernels under Mosaic's interpreter."""

import pytest

from tests.unit.mosaic import Races


@pytest.fixture
def races(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Races:
    """Counts the races that the interpreter printed (JAX 0.11) or logged (0.12)."""
    return lambda: ("".join(capfd.readouterr()) + caplog.text).count("RACE DETECTED")
