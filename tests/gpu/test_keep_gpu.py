"""The evidence of `tests/transform/test_keep.py` on a GPU, where scatters and sorts are other programs."""

import pytest

from tests.transform import test_keep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columns", [1, 7, 300, 5000])
@pytest.mark.parametrize("name", test_keep.CHOICES)
def test_choices(name: str, columns: int) -> None:
    test_keep.test_choices_do_not_depend_on_the_batch(name, columns)
