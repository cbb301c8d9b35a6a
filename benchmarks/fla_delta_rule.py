"""Times flash-linear-attention's gated delta rule, in a process without JAX: `bench_delta_rule_gpu` runs it.

    python -m benchmarks.fla_delta_rule PROMPTS STEPS    # prints a JSON object of µs by case

PROMPTS and STEPS are JSON lists of [sequences, tokens]. Needs PyTorch, Triton and `fla-core` (pip install fla-core
--no-deps), which refuses gradients with some versions of Triton: then their times are missing. Times are device times
of all kernels of a call, from PyTorch's profiler, the median of several calls.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

KEY_HEADS: Final = 16
VALUE_HEADS: Final = 32
SIZE: Final = 128
_CALLS: Final = 12
_SETS: Final = 4  # of states, so that none is in the L2 cache when its turn comes


def tokens(sequences: int, count: int) -> dict[str, Any]:
    """Random tokens with keys and queries of length 1."""

    def normal(*shape: int) -> Any:
        return torch.randn(sequences, count, *shape, device="cuda")

    q, k = (torch.nn.functional.normalize(normal(KEY_HEADS, SIZE), dim=-1).bfloat16() for _ in range(2))
    g, beta = -torch.exp(normal(VALUE_HEADS) * 1.5 - 3), torch.sigmoid(normal(VALUE_HEADS))
    return {"q": q, "k": k, "v": normal(VALUE_HEADS, SIZE).bfloat16(), "g": g, "beta": beta}


def device_time_us(calls: list[Callable[[], Any]]) -> float:
    """Returns the median time of all kernels of a call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    times = []
    for i in range(_CALLS):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            calls[i % len(calls)]()
            torch.cuda.synchronize()
        on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        times.append(sum(e.device_time for e in on_gpu))
    return statistics.median(times)


def prompt(sequences: int, count: int) -> list[Callable[[], Any]]:
    x = tokens(sequences, count)
    return [lambda: chunk_gated_delta_rule(**x, scale=SIZE**-0.5, output_final_state=True)]


def trained(sequences: int, count: int) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
    """Returns a call of the gradients alone, and one of outputs and gradients."""
    x = {name: a.requires_grad_() for name, a in tokens(sequences, count).items()}
    cotangent = torch.randn_like(x["v"])

    def forward() -> Any:
        return chunk_gated_delta_rule(**x, scale=SIZE**-0.5)[0]

    kept = forward()
    return [lambda: kept.backward(cotangent, retain_graph=True)], [lambda: forward().backward(cotangent)]


def step(sequences: int, count: int) -> list[Callable[[], Any]]:
    x = tokens(sequences, count)
    states = [torch.randn(sequences, VALUE_HEADS, SIZE, SIZE, device="cuda") * 0.1 for _ in range(_SETS)]

    def call(state: Any) -> Any:
        return fused_recurrent_gated_delta_rule(**x, scale=SIZE**-0.5, initial_state=state, output_final_state=True)

    return [lambda state=state: call(state) for state in states]


if __name__ == "__main__":
    prompts, steps = (json.loads(a) for a in sys.argv[1:3])
    with torch.no_grad():
        found = {f"prefill {b}x{t}": device_time_us(prompt(b, t)) for b, t in prompts}
        found |= {f"decode {b}x{t}": device_time_us(step(b, t)) for b, t in steps}
    try:
        for b, t in prompts:
            for name, calls in zip(("backward", "training"), trained(b, t), strict=True):
                found[f"{name} {b}x{t}"] = device_time_us(calls)
    except RuntimeError as error:  # with Triton 3.4.0 to 3.7.0 its gradients are wrong on Hopper, and it refuses them
        print(f"no gradients of flash-linear-attention: {error}", file=sys.stderr)
    print(json.dumps(found))
