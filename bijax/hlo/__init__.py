"""Reading compiled programs: what in them may make bits follow the size of the batch."""

from ._compare import Comparison as Comparison
from ._compare import Difference as Difference
from ._compare import compare as compare
from ._compare import compare_hlo as compare_hlo
from ._inspect import assert_hlo_invariant as assert_hlo_invariant
from ._inspect import inspect as inspect
from ._inspect import inspect_for as inspect_for
from ._inspect import inspect_text as inspect_text
from ._report import Finding as Finding
from ._report import Report as Report
from .errors import HloInvarianceError as HloInvarianceError
from .errors import HloParseError as HloParseError
