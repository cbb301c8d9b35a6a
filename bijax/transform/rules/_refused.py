"""Rules for operations of JAX that are refused: why, and what to use instead."""

from typing import Final

from bijax.transform.rules.names import CUDNN_ATTENTION, PARTIAL
from bijax.transform.rules.registry import Kind, Rule, is_known, register

_LIBRARY: Final = "a library computes it and chooses its algorithm by the shapes"
_CUDNN: Final = "cuDNN computes it and chooses its kernel by the shapes"
_CUDNN_ATTENTION: Final = (
    f'{_CUDNN}; use bijax.dot_product_attention, or jax.nn.dot_product_attention without implementation="cudnn"'
)
_SCALED: Final = (
    "cuDNN or cuBLAS computes it and chooses its kernel by the shapes; scale the operands and use jnp.matmul or"
    " bijax.matmul"
)
_KERNEL: Final = (
    "bijax knows nothing about this kernel; if its blocks and its order do not depend on the batch, let it pass"
)


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_CUDNN_VARIANTS: Final = {
    "with dropout": f"{_CUDNN}, and its random numbers follow the place in the batch; apply the dropout after"
    " attention (dropout_rate=0)",
    "with a score_mod": f"{_CUDNN}, and bijax cannot see what score_mod computes; use bijax.dot_product_attention with"
    " a bias, logits_soft_cap or alibi_slopes",
    "with ALiBi": f"{_CUDNN}; use bijax.dot_product_attention with alibi_slopes",
    "of packed sequences": f"{_CUDNN}; use bijax.dot_product_attention with cu_query_seq_lengths",
}


HOLDING: Final = frozenset({"call_exported", "custom_partitioning", "select_and_scatter"})
"""Those with programs, which would be plain JAX if allowed."""

REFUSED: Final = {
    "call_exported": "it was lowered when it was exported, and bijax cannot see whether it was made invariant then;"
    " call the function itself",
    "custom_partitioning": "a callback creates the program while XLA partitions",
    PARTIAL: "XLA adds the parts of the devices, in an order of its own; use jax.shard_map, where jax.lax.psum adds"
    " them in a fixed order",
    "ffi_call": "bijax cannot see what the foreign function computes; use the equivalent operation of JAX or bijax",
    "io_callback": "bijax cannot see what the Python callback computes",
    "pure_callback": "bijax cannot see what the Python callback computes",
    "select_and_scatter": "XLA runs its two programs inside one instruction, in an order that depends on the shape",
    "approx_top_k": "which elements it finds depends on the shape; use jax.lax.top_k, which is exact",
    "rng_uniform": "its numbers depend on the shape; use jax.random with a key of threefry2x32",
    "rng_bit_generator": "its numbers depend on the shape; use jax.random with a key of threefry2x32",
    "cudnn_fusion": "cuDNN computes it and chooses its kernel by the shapes; call the function without the fusion",
    **_each(
        _CUDNN_ATTENTION,
        "dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd"
        " dot_product_attention_fp8_bwd_wrapper",
    ),
    **{f"{name} {variant}": why for name in CUDNN_ATTENTION for variant, why in _CUDNN_VARIANTS.items()},
    **_each(_SCALED, "scaled_dot scaled_matmul scaled_matmul_wrapper"),
    **_each(
        f"{_LIBRARY}; factorise outside the invariant function, where all calls have one shape",
        "eig geqp3 hessenberg schur tridiagonal",
    ),
    **_each(_KERNEL, "mosaic_gpu_p tpu_custom_call"),
    "triton_kernel_call with autotuning": "Triton times several configurations of the kernel on the GPU and takes the"
    " fastest, whose bits may differ; give the kernel one configuration",
}
"""Reasons by the name of the primitive. Nothing is known about primitives without a rule."""

for _name, _reason in REFUSED.items():
    register([_name], Rule(Kind.REFUSE, _reason, permitted=Kind.ENTER))


def may_be_allowed(name: str) -> bool:
    """Returns whether allowing a refused primitive can be right.

    A primitive made invariant for other operands would then depend on the batch, and so would a program inside one.
    """
    return name not in HOLDING and (name in REFUSED or not is_known(name))
