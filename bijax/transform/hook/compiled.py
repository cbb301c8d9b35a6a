"""Programs compiled earlier and called inside an invariant function.

Such a program is neither traced nor lowered again, so no rule applies to it: it would silently run as compiled. Only
the call itself can be intercepted (`watch.py`).
"""

import contextlib
import re
import threading
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, Final

from jax.interpreters.mlir import ir
from jax.stages import Compiled

from bijax import hlo
from bijax.core.tag import TAG, in_kernel_code
from bijax.hlo._frames import user_line
from bijax.transform.errors import NotInvariantError
from bijax.transform.hook.state import BEFORE_CALLS, INVARIANT, Request, current, requested

NAME: Final = "call_compiled"
"""The name under which `allow` lets such a call pass."""

_ATTRIBUTES: Final = "mhlo.frontend_attributes"
_MARKED: Final = re.compile(rf'frontend_attributes=\{{[^}}\n]*\b{TAG}="{INVARIANT}"')
_passed: "weakref.WeakSet[Compiled]" = weakref.WeakSet()


class _Part(threading.local):
    """Whether this thread lowers an invariant part of a program that is not invariant."""

    entered: bool = False


_part = _Part()


@contextlib.contextmanager
def inside_of(request: Request) -> Iterator[None]:
    """Activates the request of an equation for the program that it holds."""
    outer = _part.entered
    _part.entered = outer or not current().enabled
    try:
        with requested(request):
            yield
    finally:
        _part.entered = outer


def note(module: Any) -> None:
    """Marks a module if all of it is lowered under a request; the mark stays with the compiled program."""
    if not current().enabled or _part.entered:
        return
    attributes = module.operation.attributes
    given: Any = ir.DictAttr(attributes[_ATTRIBUTES]) if _ATTRIBUTES in attributes else ()
    held = {entry.name: entry.attr for entry in given}
    if TAG not in held:
        attributes[_ATTRIBUTES] = ir.DictAttr.get({**held, TAG: ir.StringAttr.get(INVARIANT)})


def _check(program: Compiled) -> None:
    # A kernel's schedules are compared in separate programs.
    if not current().enabled or in_kernel_code():
        return
    if NAME in current().allowed or program in _passed:
        return
    text = program.as_text() or ""
    if _MARKED.search(text.partition("\n")[0]) or (text and hlo.inspect(program).invariant):
        _passed.add(program)
        return
    name = text.partition(",")[0].removeprefix("HloModule ") or "unknown"
    stack = [(frame.filename, frame.lineno or 0) for frame in reversed(traceback.extract_stack())]
    reason = (
        "it was compiled before and runs as it was compiled, and nothing shows that it was made invariant; call the"
        " function itself, or compile it under the mode or from bijax.invariant(jax.jit(f)).lower(...)"
    )
    raise NotInvariantError(NAME, f"{NAME}({name})", reason, user_line(stack), may_be_allowed=False)


BEFORE_CALLS.append(_check)
