"""Row programs: operations on rows that one kernel computes on a Hopper GPU, with the bits that they have one by one.

A softmax or its gradient that is written piece by piece costs a pass over the rows for each reduction and one after it.
Here the equations of a program are searched for such pieces (`_regions`), which become one equation (`_programs`), a
kernel's call (`_layout`, `pallas_kernels.row_program`). It is a schedule: no bit depends on it, so contracts and
fingerprints do not tell programs with it from programs without. `fuse_rows=False` of `bijax.invariant` and of the mode
turns it off.

The kernel copies the instructions that XLA:GPU makes of `exp`, `/` and `rsqrt`. `_probe` compares the two once in a
process that has the GPU, before the first such kernel is used.
"""

from bijax.transform.fusion._layout import run_row_program as run_row_program
from bijax.transform.fusion._products import PRODUCT as PRODUCT
from bijax.transform.fusion._programs import ROW_PROGRAM as ROW_PROGRAM
from bijax.transform.fusion._programs import has_row_programs as has_row_programs
from bijax.transform.fusion._programs import with_row_programs as with_row_programs
