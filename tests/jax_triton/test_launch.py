"""Launching Triton kernels: compiled for any GPU, under stated settings, whatever the environment says."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import packages, registry
from pallas_kernels.errors import UnsupportedError
from pallas_kernels.packages import Packages
from pallas_kernels.parts.jax_triton import library
from pallas_kernels.parts.jax_triton.launch import recorded_launches
from pallas_kernels.registry import Kernel
from pallas_kernels.target import Target
from tests.jax_triton.machine_code import TARGETS, check_resources, compiled, launches_of, needs_triton
from tests.jax_triton.packages import needs_jax_triton
from tests.jax_triton.small_launch import X, multiply_add
from tests.tiers import tiered

ROOT = Path(__file__).parents[2]


@needs_triton
@pytest.mark.parametrize("target", tiered(TARGETS, fast=("sm_80",)))
def test_a_launch_is_compiled_for_its_target_and_fuses_only_if_it_says_so(target: str) -> None:
    for fuses in (True, False):
        (found,) = launches_of(lambda x, y, fuses=fuses: multiply_add(x, y, target, fuses), X, X)
        assert found.arguments == ("float32", "float32", 100)
        assert found.grid == (2, 1, 1)
        code = compiled(found)
        check_resources(code, found.target)
        assert bool(code.count(r"\bFFMA\b")) == fuses
        assert f".target {target}" in code.ptx


_PTX = """
import json, sys
import jax
from tests.jax_triton.machine_code import compiled, launches_of
from tests.jax_triton.small_launch import X, multiply_add
codes = [compiled(launches_of(lambda x, y: multiply_add(x, y, "sm_80", f), X, X)[0]) for f in (True, False)]
print(json.dumps([code.count(r"\\bFFMA\\b") for code in codes]))
"""
_HOSTILE = (
    {"TRITON_DEFAULT_FP_FUSION": "0", "TRITON_F32_DEFAULT": "ieee"},
    {"TRITON_DEFAULT_FP_FUSION": "1", "TRITON_FORCE_DISABLE_FP_FUSION": "1", "TRITON_OVERRIDE_ARCH": "sm70"},
)


@needs_triton
@pytest.mark.tier("full", fast=("1",))
@pytest.mark.parametrize("number", [0, 1])
def test_the_environment_does_not_change_the_machine_code(number: int) -> None:
    environment = {**os.environ, **_HOSTILE[number]}
    command = [sys.executable, "-c", _PTX]
    run = subprocess.run(command, check=True, cwd=ROOT, env=environment, capture_output=True, text=True)
    fused, plain = json.loads(run.stdout.splitlines()[-1])
    assert fused > 0
    assert plain == 0


@needs_triton
def test_settings_are_restored() -> None:
    from triton import knobs

    environment = dict(os.environ)
    with knobs.runtime.scope():
        knobs.runtime.override_arch = "sm75"
        with library.pinned_settings():
            assert knobs.runtime.override_arch is None
        assert knobs.runtime.override_arch == "sm75"
    assert dict(os.environ) == environment


@needs_jax_triton
def test_a_program_with_a_launch_is_lowered_without_a_gpu() -> None:
    environment = dict(os.environ)

    def lowered(target: str) -> str:
        function = jax.jit(lambda x: multiply_add(x, x, target, True))
        return function.trace(X).lower(lowering_platforms=("cuda",)).as_text()

    assert "triton_kernel_call" in lowered("sm_80")
    assert lowered("sm_80") != lowered("sm_90")
    assert dict(os.environ) == environment


@needs_triton
@pytest.mark.parametrize("version", ["0.3", "0.4", "another"])
def test_versions_of_jax_triton(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def call_3(*args: Any, kernel: Any, out_shape: Any, enable_fp_fusion: bool, **options: Any) -> Any:
        given.update(out=out_shape, fuses=enable_fp_fusion, **options)
        return args[:1]

    def call_4(*args: Any, kernel: Any, out_type: Any, backend_options: Any, **options: Any) -> Any:
        given.update(out=out_type, fuses=backend_options["enable_fp_fusion"], **options)
        return args[:1]

    def call_5(*args: Any, kernel: Any, **options: Any) -> Any:
        raise AssertionError

    chosen = {"0.3": call_3, "0.4": call_4, "another": call_5}[version]
    monkeypatch.setattr(library, "_library", lambda: chosen)
    from tests.jax_triton import small_kernel

    options: dict[str, Any] = {"name": "kernel", "grid": (1, 1, 1), "constants": {"BLOCK": 64}, "warps": 4, "stages": 1}

    def run() -> None:
        library.call(small_kernel.multiply_add, [jnp.ones(8)], [X], fuses=False, compute_capability=80, **options)

    if version == "another":
        with pytest.raises(UnsupportedError, match=r"expected jax-triton 0\.3 or 0\.4, .*\(args, kernel, options\)"):
            run()
        return
    run()
    assert given["out"] == (X,)
    assert given["fuses"] is False
    assert (given["BLOCK"], given["num_warps"], given["compute_capability"]) == (64, 4, 80)


@needs_triton
def test_an_interpreted_kernel_is_refused() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from tests.jax_triton import small_kernel

    with pytest.raises(UnsupportedError, match="expected a kernel that Triton compiles, got InterpretedFunction"):
        library.call(
            InterpretedFunction(small_kernel.multiply_add.fn),
            [],
            [X],
            name="kernel",
            grid=(1, 1, 1),
            constants={},
            warps=4,
            stages=1,
            fuses=False,
            compute_capability=80,
        )


def test_without_its_packages_a_kernel_serves_nothing_and_warns_once() -> None:
    needed = Packages(("numpy", "no-such-package|neither-this"), "cuda13")
    assert needed.missing == ("no-such-package|neither-this",)
    tuned = Kernel("number", "sm_80+", lambda target: 1, packages=needed, takes_target=True)
    plain = Kernel("number", "cuda", lambda: 2)
    target = Target("cuda", "sm_80")
    with registry.registered(tuned, plain):
        with pytest.warns(UserWarning, match=r"no-such-package or neither-this not installed; .*cuda13"):
            assert registry.find("number", target, None).function() == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert registry.find("number", target, None).function() == 2
    packages._warned.discard(needed)


def test_a_kernel_gets_its_target() -> None:
    tuned = Kernel("name", "sm_80+", lambda target: str(target), packages=Packages(("numpy",), "x"), takes_target=True)
    with registry.registered(tuned):
        assert registry.find("name", Target("cuda", "sm_86"), None).function() == "sm_86"


@needs_triton
def test_launches_are_recorded_inside_alone() -> None:
    with recorded_launches() as found:
        pass
    jax.eval_shape(lambda x: multiply_add(x, x, "sm_80", True), X)
    assert found == []
