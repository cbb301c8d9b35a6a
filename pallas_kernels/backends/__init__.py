"""The kernels of each backend as data: one module per backend, with `KERNELS`; see `pallas_kernels.registry`.

These modules are imported for every target, so they only import contracts, and refer to kernels by name.

A function that chooses a contract is passed the part of the call that describes the operation and the weights:

| operations | given |
|---|---|
| on rows: norms, the softmax family, sums over axes, quantisation | the number of columns |
| products, gradients of weights, fused products | a `pallas_kernels.contract.ProductSpec` |
| quantised products | the name of the operands' dtype |
| products of operands split into limbs | the number of limbs |
| attention | the width of a head, the name of the queries' dtype, the width of a head of the values |
| the gated delta rule | the name of the dtype, the width of a head, the width of a head of the values |
| all others | None |
"""
