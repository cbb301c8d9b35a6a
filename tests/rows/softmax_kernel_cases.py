"""The softmax family and cross entropy for a Hopper GPU, each with its portable form, on the same arguments."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.contract import online_row_contract, row_contract
from pallas_kernels.cross_entropy import hopper as cross_entropy_hopper
from pallas_kernels.cross_entropy import portable as cross_entropy
from pallas_kernels.schedule.hopper.softmax import OnlineSchedule, fits_warp, ring_schedule, segments_of
from pallas_kernels.softmax import hopper as softmax_hopper
from pallas_kernels.softmax import portable as softmax
from tests.arrays import on_device

Form = Callable[..., Any]


def hostile(columns: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Returns nine rows, four of them with values that are not finite, and a label for each."""
    x = np.random.default_rng(0).standard_normal((9, columns)) * 3
    x[1] = -np.inf
    x[2, columns // 2], x[3, columns // 3], x[4, columns // 4] = np.inf, np.nan, -np.inf
    x[5], x[6], x[7] = np.linspace(-100, 100, columns), x[6] * 30, 80
    last = columns - 1
    labels = [0, last, columns // 2, 0, last // 2, -1, columns, last, min(last, 4100)]
    return jnp.asarray(x, dtype), jnp.asarray(labels, jnp.int32)[:, None]


def forms(x: jax.Array, labels: jax.Array) -> dict[str, tuple[Form, Form]]:
    """Returns for every operation the kernel and the portable form, as functions of nothing but keywords."""
    g = on_device(np.random.default_rng(1).standard_normal(x.shape), x.dtype)
    m, log_sum = jax.jit(lambda x: softmax.logsumexp(x, contract=row_contract()))(x)
    tree, online = ({"contract": c} for c in (row_contract(), online_row_contract(x.shape[1])))

    def both(name: str, *arguments: Any, order: Any = (), **parameters: Any) -> tuple[Form, Form]:
        """`order` has the contracts of the kernel and of the portable form."""
        ours, theirs = (softmax_hopper, softmax) if hasattr(softmax, name) else (cross_entropy_hopper, cross_entropy)

        def call(module: Any, contract: dict[str, Any]) -> Form:
            return lambda **more: getattr(module, name)(*arguments, **parameters, **contract, **more)

        of_ours, of_theirs = order or ({}, {})
        return call(ours, of_ours), call(theirs, of_theirs)

    number = jnp.asarray(np.asarray(g)[:, :1].astype(np.float32))
    return {
        "softmax": both("softmax", x, order=(online, tree)),
        "softmax_gradient": both("softmax_gradient", x, g, order=(tree, tree)),
        "log_softmax": both("log_softmax", x, order=(online, tree)),
        "log_softmax_gradient": both("log_softmax_gradient", x, m, log_sum, g, order=(tree, tree)),
        "logsumexp": both("logsumexp", x, order=(online, tree)),
        "logsumexp_gradient": both("logsumexp_gradient", x, m, log_sum, number),
        "cross_entropy": both("cross_entropy", x, labels, z_loss=0.01, order=(online, tree)),
        "cross_entropy_gradient": both("cross_entropy_gradient", x, labels, m, log_sum, number, z_loss=0.01),
    }


def parts_of_a_warp(columns: int) -> list[OnlineSchedule]:
    """Returns schedules in which a part of a warp has a row."""
    forms = [(threads, vector) for vector in (4, 8) if columns % vector == 0 for threads in (1, 2, 8, 16, 32)]
    fitting = [(t, v) for t, v in forms if min(columns, 128) <= 8 * t * v and t * v <= 128]
    return [OnlineSchedule("warps", threads=t, vector=v) for t, v in fitting]


def schedules(columns: int, itemsize: int) -> list[OnlineSchedule]:
    """Returns schedules of every form that takes rows of `columns` columns, all to give the same bits."""
    segments = segments_of(columns, online_row_contract(columns).segment)
    found = [OnlineSchedule("registers")] if segments <= 8 else []
    if segments > 1:
        found.append(OnlineSchedule("split"))
    if fits_warp(columns):
        found += [OnlineSchedule("warps"), *parts_of_a_warp(columns)]
    if columns >= 128 and columns * itemsize % 128 == 0:
        piece = min(columns, 4096)
        found += [ring_schedule(columns, itemsize), OnlineSchedule("ring", piece, 2, 1, vector=1, unroll=3)]
        if columns > 4096 + 128:
            found.append(OnlineSchedule("ring", 4096, 2, 1, warpgroups=2))
        elif columns > 1024 + 128:
            found.append(OnlineSchedule("ring", 1024, 2, 1, warpgroups=2))
    return found
