"""The public functions that inspect one program."""

from collections.abc import Callable
from typing import Any

from bijax.hlo._find import Finder, merged
from bijax.hlo._flops import Flops
from bijax.hlo._origin import Origin
from bijax.hlo._read import Program, read, read_for, read_text
from bijax.hlo._report import Finding, Report
from bijax.hlo.errors import HloInvarianceError


def inspect(program: Any, *args: Any, **kwargs: Any) -> Report:
    """Finds what in a compiled program may make bits depend on the size of the batch.

    It looks for matrix products and convolutions left to XLA, library calls (cuBLAS, cuDNN, oneDNN, YNNPACK, Eigen),
    tuned GEMM fusions with their tiles and splits of K, sums of floats, scatters with repeated indices, collectives
    that add, unstable sorts, random bit generators, opaque calls, and on the CPU element-wise code that LLVM compiles
    depending on the shape. Code of bijax kernels is recognised by its tag.

    The inspection is static: it reports what XLA may do, and does not prove equal bits. `bijax.testing` measures them.

    Args:
        program: A function, jitted or not, which is compiled for the present devices; a `jax.stages.Lowered`, which
            is compiled too; a `jax.stages.Compiled`; the text of HLO, such as XLA's dump of a program for a GPU, which
            can be read on any machine; or the `pathlib.Path` of a file of such text.
        *args: Arguments of a function: arrays or `jax.ShapeDtypeStruct`.
        **kwargs: Keyword arguments of a function.

    Returns:
        What was found.

    Raises:
        HloParseError: If a text is not HLO.
        TypeError: If `program` is none of these, or arguments are passed with something other than a function.
        ValueError: If the platform does not expose the HLO of a compiled program.

    Example:
        >>> import jax.numpy as jnp
        >>> report = inspect(lambda x, w: x @ w, jnp.ones((8, 64)), jnp.ones((64, 64)))
        >>> report.invariant, [f.terms for f in report.variant]
        (False, [64])
    """
    return report_of(read(program, args, kwargs))


def inspect_text(text: str, *, platform: str | None = None) -> Report:
    """Like `inspect`, for the HLO text of a compiled program, with an explicit platform.

    Args:
        text: One or more modules.
        platform: "cpu", "gpu" or "cuda"; None to infer it from the libraries that are called. Without any it is
            "unknown", and findings that matter only on a CPU become notes.

    Raises:
        HloParseError: If the text is not HLO.
    """
    return report_of(read_text(text, platform))


def inspect_for(platform: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Inspects the program that is handed to the compiler of any platform; needs no such device.

    That program does not contain libraries, tiles or splits of K yet: every product and sum outside bijax kernels is
    variant. The trip counts of loops are not known yet, so a loop body counts once.

    Args:
        platform: "cuda", "cpu", "rocm" or "tpu".
        fn: A function, jitted or not.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`.
        **kwargs: Its keyword arguments.

    Returns:
        What was found; the stage is "lowered".

    Raises:
        TypeError: If `fn` is not a function.
        ValueError: If the platform is none of these.

    Example:
        >>> import jax.numpy as jnp
        >>> report = inspect_for("cuda", lambda x: x.sum(1), jnp.ones((8, 64)))
        >>> report.platform, report.stage, [f.kind for f in report.variant]
        ('gpu', 'lowered', ['reduction'])
    """
    return report_of(read_for(platform, fn, args, kwargs))


def assert_hlo_invariant(fn: Any, *args: Any, **kwargs: Any) -> None:
    """Fails if a compiled program holds anything whose bits may depend on the size of the batch.

    A regression test in one line: it fails when an operation is left to XLA, or when a new version of XLA rewrites
    something that it did not rewrite before.

    Args:
        fn: As for `inspect`.
        *args: Arguments of a function.
        **kwargs: Keyword arguments of a function.

    Raises:
        HloInvarianceError: An `AssertionError` with the table of what was found.

    Example:
        >>> import jax.numpy as jnp
        >>> assert_hlo_invariant(lambda x: jnp.maximum(x, 0), jnp.ones((8, 64)))
        >>> assert_hlo_invariant(lambda x, w: x @ w, jnp.ones((8, 64)), jnp.ones((64, 64)))
        Traceback (most recent call last):
        bijax.hlo.errors.HloInvarianceError: expected a program without ...
    """
    report = inspect(fn, *args, **kwargs)
    if not report.invariant:
        raise HloInvarianceError(report)


def report_of(program: Program) -> Report:
    """Returns the findings of the rules in the modules of a program."""
    findings: list[Finding] = []
    total = instructions = 0
    for module in program.modules:
        flops = Flops(module)
        total += flops.total
        instructions += sum(1 for _ in module)
        findings += Finder(module, program.platform, program.stage, Origin(module, program.untagged), flops).findings()
    return Report(merged(findings), program.platform, program.stage, total, instructions)
