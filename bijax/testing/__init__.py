"""Bit comparison and batch-invariance sweeps, for this project and for anyone's own functions.

Everything here compares bits as unsigned integers; there is no tolerance anywhere. Only a nan equals any nan in its
place, unless `nan_bits=True` asks for signs and payloads too.
"""

from ._batch_report import BatchDifference as BatchDifference
from ._batch_report import BatchInvarianceError as BatchInvarianceError
from ._batch_report import BatchVarianceReport as BatchVarianceReport
from ._bits import NAN_DISTANCE as NAN_DISTANCE
from ._bits import bits as bits
from ._bits import ulp_distance as ulp_distance
from ._cases import BATCH_SIZES as BATCH_SIZES
from ._cases import NEIGHBOURS as NEIGHBOURS
from ._compare import ElementDifference as ElementDifference
from ._compare import assert_bits_equal as assert_bits_equal
from ._data import hostile_rows as hostile_rows
from ._sweep import assert_batch_invariant as assert_batch_invariant
from ._sweep import batch_variance_report as batch_variance_report
