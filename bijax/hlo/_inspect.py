"""The public functions that look at one program."""

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
    that add, unstable sorts, generators of random bits, opaque calls, and on the CPU element-wise code that LLVM
    compiles by the shape. Instructions of bijax kernels are told apart by their tag.

    The inspection is static: it says what XLA may do, and proves no equality of bits. `bijax.testing` measures it.

    Args:
        program: A function, jitted or not, which is compiled for the present devices; a `jax.stages.Lowered`, which
            is compiled too; a `jax.stages.Compiled`; the text of HLO, such as XLA's dump of a program for a GPU, which
            can be read anywhere; or the `pathlib.Path` of a file with such a text.
        *args: Arguments of a function: arrays or `jax.ShapeDtypeStruct`.
        **kwargs: Keyword arguments of a function.

    Returns:
        What was found.

    Raises:
        HloParseError: If a text is not HLO.
        TypeError: If `program` is none of these, or arguments are given with what is no function.
        ValueError: If the platform does not give out the HLO of a compiled program.

    Example:
        >>> import jax.numpy as jnp
        >>> report = inspect(lambda x, w: x @ w, jnp.ones((8, 64)), jnp.ones((64, 64)))
        >>> report.invariant, [f.terms for f in report.variant]
        (False, [64])
    """
    return report_of(read(program, args, kwargs))


def inspect_text(text: str, *, platform: str | None = None) -> Report:
    """As `inspect` for the HLO text of a compiled program, with the platform said.

    Args:
        text: One or more modules.
        platform: "cpu", "gpu" or "cuda"; None to find it out from the libraries that are called. If there are none, it
            is "unknown", and what matters on a CPU alone is a note.

    Raises:
        HloParseError: If the text is not HLO.
    """
    return report_of(read_text(text, platform))


def inspect_for(platform: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Looks at the program that is handed to the compiler of any platform, without a device of it.

    That program holds no libraries, tiles and splits of K yet: every product and sum in it that is no code of a bijax
    kernel is variant. In a loop the number of trips is not known yet, so its work counts once.

    Args:
        platform: "cuda", "cpu", "rocm" or "tpu".
        fn: A function, jitted or not.
        *args: Its arguments: arrays or `jax.ShapeDtypeStruct`.
        **kwargs: Its keyword arguments.

    Returns:
        What was found; the stage is "lowered".

    Raises:
        TypeError: If `fn` is no function.
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
    what was not rewritten before.

    Args:
        fn: What `inspect` takes.
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
    """Returns what the rules find in the modules of a program."""
    findings: list[Finding] = []
    total = instructions = 0
    for module in program.modules:
        flops = Flops(module)
        total += flops.total
        instructions += sum(1 for _ in module)
        findings += Finder(module, program.platform, program.stage, Origin(module, program.untagged), flops).findings()
    return Report(merged(findings), program.platform, program.stage, total, instructions)
