"""Inspects compiled programs for code whose bits may depend on the size of the batch."""

from bijax.hlo._compare import Comparison as Comparison
from bijax.hlo._compare import Difference as Difference
from bijax.hlo._compare import compare as compare
from bijax.hlo._compare import compare_hlo as compare_hlo
from bijax.hlo._inspect import assert_hlo_invariant as assert_hlo_invariant
from bijax.hlo._inspect import inspect as inspect
from bijax.hlo._inspect import inspect_for as inspect_for
from bijax.hlo._inspect import inspect_text as inspect_text
from bijax.hlo._report import Finding as Finding
from bijax.hlo._report import Report as Report
from bijax.hlo.errors import HloInvarianceError as HloInvarianceError
from bijax.hlo.errors import HloParseError as HloParseError
