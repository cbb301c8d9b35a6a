"""Facts about the libraries and compilers that XLA delegates parts of a program to."""

import dataclasses
import re
from typing import Final, Literal

Verdict = Literal["variant", "suspect", "note", "ours"]


@dataclasses.dataclass(frozen=True)
class Library:
    """One entry.

    Attributes:
        pattern: Matches the kind of a fusion or the target of a custom call.
        kind: Kind of the finding.
        verdict: "note" if its bits do not depend on the batch, as far as known.
        reason: Why.
        only_sums: Whether it matters only where it computes a product or a sum of floats.
        only_floats: Whether it matters only where its result holds floats; it is a note elsewhere.
    """

    pattern: str
    kind: str
    verdict: Verdict
    reason: str
    only_sums: bool = False
    only_floats: bool = False

    def fits(self, name: str) -> bool:
        """Returns whether this entry matches a fusion or call of that name."""
        return re.search(self.pattern, name) is not None


GEMM: Final = "the algorithm, and with it a split of K, is chosen by the shape or by timing"

LIBRARIES: Final = (
    Library(r"^__cublas\$", "library", "variant", f"cuBLAS: {GEMM}"),
    Library(
        r"^__cudnn\$conv", "library", "variant", "cuDNN convolution: the algorithm is chosen by the shape or by timing"
    ),
    Library(r"^__cudnn\$fmha", "library", "variant", "cuDNN attention: kernel and splits are chosen by the shape"),
    Library(r"^__cudnn\$", "library", "variant", "cuDNN: the kernel is chosen by the shape"),
    Library(
        r"^__triton_\w*(gemm|dot)", "tile", "variant", "GEMM fusion: tiles and a split of K are tuned for the shape"
    ),
    Library(r"^__triton", "reduction", "variant", "Triton fusion: tiles of a sum depend on the shape", only_sums=True),
    Library(
        r"^__custom_fusion(?!.*(address_computation|dynamic_slice))|cutlass", "library", "variant", f"CUTLASS: {GEMM}"
    ),
    Library(r"onednn|^__(xnn|ynn)", "library", "variant", "its kernels and the cuts of a sum depend on the shape"),
    Library(r"(?i)eigen", "library", "variant", "Eigen: its blocks and its row-vector form depend on the shape"),
    Library(r"^(lapack|blas)_\w*trsm", "library", "variant", "BLAS: blocks depend on the number of right-hand sides"),
    Library(r"^lapack_", "library", "note", "LAPACK, called once for each matrix"),
    Library(
        r"^(cusolver|cublas_|hipsolver|hipblas|magma)",
        "library",
        "suspect",
        "a routine chosen by the number of matrices",
    ),
    Library(r"(?i)approx|PartialReduce", "library", "suspect", "an approximate selection that depends on the shape"),
    Library(r"(?i)top_?k", "library", "note", "a selection of elements, without arithmetic"),
    Library(r"^__cub\$|^cub_|^__gpu\$.*sort", "library", "note", "CUB sorts and scans"),
    Library(
        r"triton_kernel_call|xla\.gpu\.(triton|ptx)|mosaic_gpu|tpu_custom_call|^pallas",
        "custom_call",
        "suspect",
        "a hand-written kernel, opaque here: its blocks must not depend on the batch",
    ),
    Library(
        r"callback",
        "custom_call",
        "suspect",
        "Python code, opaque here: its numbers must not depend on the batch",
        only_floats=True,
    ),
)

BENIGN: Final = re.compile(
    r"threefry|^(AllocateBuffer|Sharding|SPMD|xla\.sdy|annotate_device_placement|MoveTo|Pin|Unpin|LayoutConstraint"
    r"|InspectSharding|PadToStatic|SliceToDynamic|SetBound|shape_assertion|__dynamic_|__memcpy|__xla\.|X64)"
)
"""Custom calls that compute no sums."""

GPU_NAMES: Final = re.compile(
    r"^__(cublas|cudnn|triton|cub\$|gpu)|^__custom_fusion|mosaic_gpu|xla\.gpu|^cusolver|^cub_"
)
CPU_NAMES: Final = re.compile(r"^__(ynn|xnn|onednn|eigen)|^(lapack|blas)_")


def library(name: str) -> Library | None:
    """Returns the entry for the kind of a fusion or the target of a custom call."""
    return next((entry for entry in LIBRARIES if entry.fits(name)), None)
