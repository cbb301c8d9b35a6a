"""What the machine code of the Triton kernels of the gated delta rule must be like."""

import re
from typing import Final

from pallas_kernels.target import Target
from tests.jax_triton.machine_code import MachineCode

SPILLED: Final = 1024
"""Bytes of registers that a thread keeps in local memory at most: where a prompt is continued, and with 8 tokens."""


def check(code: MachineCode, target: Target, *, atomic: bool) -> None:
    """Checks what a program occupies, and that its chains add as the contract says."""
    assert code.shared <= target.shared_memory, f"{code.shared} bytes of shared memory on {target}"
    assert code.local <= SPILLED, f"{code.local} bytes of local memory on {target}"
    assert "tcgen05.mma" not in code.ptx, "products would be of two instruction families"
    assert atomic or not code.count(r"\b(RED|ATOM|ATOMG|ATOMS)\b")
    assert not re.search(r"atom\S*\.f", code.ptx)
    # Operands that hold more elements in 32 bits hand them to mma.sync in another order.
    assert "kWidth = 4" not in code.ttgir
    if "wgmma" in code.ptx:
        # What threads store in shared memory is not an operand of wgmma: Triton 3.6 was seen to put the fence that this
        # needs after the barrier. Here each operand is in registers or comes from asynchronous copies ("mutable").
        products = re.findall(r"warp_group_dot %.*", code.ttgir)
        assert products
        assert all("dot_op<{opIdx = 0" in product or product.count("mutable>") == 2 for product in products)
        assert not re.search(r"local_alloc %|local_store", code.ttgir)
