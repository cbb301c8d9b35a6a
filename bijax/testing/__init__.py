"""Bit comparison and batch-invariance sweeps, for this project and for anyone's own functions.

Everything here compares bits as unsigned integers; there is no tolerance anywhere. Only a nan equals any nan in its
place, unless `nan_bits=True` asks for signs and payloads too.
"""

from bijax.testing._batch_report import BatchDifference as BatchDifference
from bijax.testing._batch_report import BatchInvarianceError as BatchInvarianceError
from bijax.testing._batch_report import BatchVarianceReport as BatchVarianceReport
from bijax.testing._bits import NAN_DISTANCE as NAN_DISTANCE
from bijax.testing._bits import bits as bits
from bijax.testing._bits import ulp_distance as ulp_distance
from bijax.testing._cases import BATCH_SIZES as BATCH_SIZES
from bijax.testing._cases import NEIGHBOURS as NEIGHBOURS
from bijax.testing._compare import ElementDifference as ElementDifference
from bijax.testing._compare import assert_bits_equal as assert_bits_equal
from bijax.testing._data import hostile_rows as hostile_rows
from bijax.testing._sweep import assert_batch_invariant as assert_batch_invariant
from bijax.testing._sweep import batch_variance_report as batch_variance_report
