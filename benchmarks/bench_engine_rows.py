"""The row operators of an inference engine on a CPU, against the same steps in plain JAX.

    python -m benchmarks.bench_engine_rows

Times are processor seconds of the process, the least of several rounds in which both programs alternate, so
that other work on the machine disturbs them little. Short calls are repeated for the sake of the clock's resolution.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, Final

import jax

from benchmarks.engine_cases import Case, cases
from benchmarks.harness import add_json, cell, save

TOKENS: Final = (1, 64, 1024)
COLUMNS: Final = 2048
EXPERTS: Final = 64
ROUNDS: Final = 9
SECONDS: Final = 0.05  # of a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda s: tuple(map(int, s.split(","))), default=TOKENS)
    parser.add_argument("--only", default="", help="a part of the operators' names")
    add_json(parser)
    arguments = parser.parse_args()
    if jax.default_backend() != "cpu":
        print(f"bench_engine_rows measures processor time, this process runs on {jax.default_backend()}: nothing done")
        return
    found = []
    for case in (c for t in arguments.tokens for c in cases(t, COLUMNS, EXPERTS) if arguments.only in c.name):
        shape = {"operator": case.name, "tokens": case.tokens, "columns": case.columns}
        found.append(cell(*(1e6 * s for s in _seconds(case)), **shape))
        print(found[-1], flush=True)
    save("engine_rows", found, arguments.json)


def _seconds(case: Case) -> list[float]:
    """Returns the processor time of a call, ours and plain."""
    make = jax.jit(case.make)
    calls = [_call(case, function, make) for function in (case.ours, case.plain)]
    number = [max(1, int(SECONDS / max(_cost(call, 3), 1e-7))) for call in calls]
    rounds = [[_cost(call, n) for call, n in zip(calls, number, strict=True)] for _ in range(ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _call(case: Case, function: Callable[..., Any], make: Callable[[jax.Array], Any]) -> Callable[[], None]:
    state = list(make(jax.random.key(0)))
    program = jax.jit(function, donate_argnums=case.donated).lower(*state).compile()

    def call() -> None:
        out = jax.block_until_ready(program(*state))
        if case.donated:
            state[: len(case.donated)] = out[: len(case.donated)]

    call()
    return call


def _cost(call: Callable[[], None], number: int) -> float:
    start = time.process_time()
    for _ in range(number):
        call()
    return (time.process_time() - start) / number


if __name__ == "__main__":
    main()
