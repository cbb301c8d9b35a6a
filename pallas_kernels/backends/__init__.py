"""The kernels of each backend, as data: a module for each, with `KERNELS`; see `pallas_kernels.registry`.

These modules are imported whatever the target is, so they import contracts alone, and name the kernels.

A function that chooses a contract is given what belongs to the operation and the weights:

| operations | given |
|---|---|
| on rows: norms, the softmax family, sums over axes, quantisation | the number of columns |
| products, gradients of weights, fused products | a `pallas_kernels.contract.ProductSpec` |
| quantised products | the name of the operands' dtype |
| products of operands in parts | the number of parts |
| attention | the width of a head, the name of the queries' dtype, the width of a head of the values |
| all others | None |
"""
