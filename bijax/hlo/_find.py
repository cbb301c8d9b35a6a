"""The rules: they find instructions whose bits may depend on the size of the batch."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Final

from bijax.core.tag import TAG
from bijax.hlo import _gpu
from bijax.hlo._flops import Flops, operand_shapes, terms_of
from bijax.hlo._libraries import BENIGN, Verdict, library
from bijax.hlo._module import Computation, Instruction, Module
from bijax.hlo._opcodes import COLLECTIVES, ORDER_FREE, TRANSCENDENTAL
from bijax.hlo._origin import Origin, is_tagged
from bijax.hlo._report import Finding
from bijax.hlo._shape import without_layout
from bijax.hlo._tiles import split_k_of, tile_of
from bijax.hlo._untagged import Class

_GROUPS: Final = re.compile(r"\{([\d,]+)\}|\[\d+,(\d+)\]<=")
_CLASSES: Final[dict[str, Class]] = {
    **dict.fromkeys(("dot", "convolution", "library", "tile", "split_k", "reduction", "scatter"), "reduction"),
    "elementwise": "approximation",
}
_BY_VECTORS: Final = (
    "XLA took the axis of one row from a product of a kernel and did not give it back, as it does where the product"
    " stands alone; other batches have different bits"
)

Found = tuple[str, Verdict, str, str]  # kind, verdict, implementation, reason
_LOOP: Final = "a loop of one trip is inlined and fused with its neighbours"


class Finder:
    """Applies the rules to a module.

    Args:
        module: The program.
        platform: "cpu", "gpu" or "unknown".
        stage: "optimised" or "lowered".
        origin: Recognises the code of bijax kernels.
        flops: FLOPs of the module.
    """

    def __init__(self, module: Module, platform: str, stage: str, origin: Origin, flops: Flops):
        self._module, self._platform, self._origin, self._flops = module, platform, origin, flops
        fused = (n for _, i in module if i.opcode == "fusion" for n in i.called_as("calls"))
        # Before XLA's rewrites anything may end up in one fusion.
        self._fused = set(fused) if stage == "optimised" else set(module.computations)

    def findings(self) -> Iterator[Finding]:
        """Yields the findings of the rules, in the order of the text."""
        shown = False
        for computation, instruction in self._module:
            if found := self._look(computation, instruction):
                shown = shown or found[0] == "rounding"
                yield self._finding(computation, instruction, *found)
        if self._platform == "gpu" and not shown and self._origin.has_untagged("rounding"):
            # A rounding that XLA dropped cannot be found any more.
            reason = "the lowered program rounds to 16 bits without a fence, which XLA may leave out"
            yield Finding("suspect", "convert", "rounding", "", reason, implementation="XLA")

    def _look(self, computation: Computation, i: Instruction) -> Found | None:
        if computation.name not in self._inside_libraries:
            return self._apply(computation, i)
        in_triton = self._platform == "gpu" and _gpu.is_in_triton(self._module, computation)
        return _gpu.elementwise(self._module, computation, i) if in_triton else None

    @functools.cached_property
    def _inside_libraries(self) -> set[str]:
        """Computations of library fusions, which are reported once, at the call."""
        waiting = [
            n for _, i in self._module if i.opcode == "fusion" and library(_kind(i)) for n in i.called_as("calls")
        ]
        inside: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in inside and name in self._module.computations:
                inside.add(name)
                waiting += [n for i in self._module.computations[name].instructions.values() for n in i.called]
        return inside

    def _apply(self, computation: Computation, i: Instruction) -> Found | None:
        match i.opcode:
            case "fusion":
                return self._fusion(i)
            case "custom-call":
                return _custom_call(i)
            case "dot" | "ragged-dot" | "scaled-dot" if i.is_float:
                return "dot", "variant", "XLA", "XLA chooses blocks, or a form for vectors, by the shape"
            case "convolution" if i.is_float:
                return "convolution", "variant", "XLA", "XLA chooses blocks by the shape"
            case "reduce" | "reduce-window" if i.is_float and self._sums(i):
                return self._reduce(computation, i)
            case "scatter" if i.is_float and self._sums(i) and i.attributes.get("unique_indices") != "true":
                return self._scatter("indices may repeat")
            case "select-and-scatter" if i.is_float:
                return self._scatter("windows overlap")
            case _ if i.opcode in COLLECTIVES and i.is_float and self._sums(i):
                return _collective(i)
            case "all-gather" | "all-gather-start":
                return "collective", "note", "XLA", "gathers an array that is cut over devices; it adds nothing"
            case "fft" | "cholesky" | "triangular-solve":
                return "library", "suspect", "XLA", "the routine may depend on the number of problems"
            case "sort" if len(i.operands) > 1 and i.attributes.get("is_stable") != "true":
                return "sort", "suspect", "XLA", "not stable: the order of equal keys may depend on the shape"
            case "rng" | "rng-bit-generator":
                return "random", "suspect", i.attributes.get("algorithm", ""), "its numbers depend on the shape"
            case "while":
                under = "; it is under bijax.invariant" if TAG in i.frontend_attributes else ""
                return "loop", "note", "XLA", _LOOP + under
        if self._platform == "gpu":
            return _gpu.elementwise(self._module, computation, i)
        return self._elementwise(computation, i)

    def _fusion(self, i: Instruction) -> Found | None:
        entry = library(_kind(i))
        if entry is None or not (work := self._work(i.called_as("calls"))):
            return None
        if work == {"elementwise"}:
            reason = "approximations that a library computes"
            return ("elementwise", "suspect", _kind(i), reason) if self._platform != "gpu" else None
        if entry.only_sums and not work & {"dot", "convolution", "sum"}:
            return None
        kind = "split_k" if split_k_of(self._module, i) > 1 else entry.kind
        return kind, entry.verdict, _kind(i), entry.reason

    def _work(self, names: tuple[str, ...]) -> set[str]:
        """Returns the operations in a fusion's computations that may depend on the shape."""
        work: set[str] = set()
        for name in names:
            if name not in self._module.computations:
                continue
            for i in self._module.computations[name].instructions.values():
                if i.opcode in ("dot", "convolution", "scaled-dot"):
                    work.add("convolution" if i.opcode == "convolution" else "dot")
                elif i.opcode in ("reduce", "reduce-window") and i.is_float and self._sums(i):
                    work.add("sum")
                elif i.opcode in TRANSCENDENTAL:
                    work.add("elementwise")
                elif i.opcode == "custom-call" and (inner := library(i.target)) and inner.verdict == "variant":
                    work.add("dot")
                elif i.opcode == "fusion":
                    work |= self._work(i.called_as("calls"))
        return work

    def _reduce(self, computation: Computation, i: Instruction) -> Found:
        producer = self._module.producer(computation, i)
        if producer and i.integers("dimensions") == (0,) and split_k_of(self._module, producer[1]) > 1:
            return "split_k", "variant", "XLA", "adds the parts of a split K"
        return "reduction", "variant", "XLA", "the order of the sum depends on the shape"

    def _scatter(self, why: str) -> Found:
        if self._platform == "cpu":
            return "scatter", "suspect", "XLA", f"{why}: XLA chooses in which order it adds"
        return "scatter", "variant", "atomics", f"{why}: atomic additions in the order of arrival"

    def _elementwise(self, computation: Computation, i: Instruction) -> Found | None:
        if not i.is_float or not i.shapes[0].dims:
            return None
        verdict: Verdict = "variant" if self._platform == "cpu" else "note"
        where = "" if self._platform == "cpu" else "on a CPU, "
        if i.opcode in TRANSCENDENTAL and not self._origin.is_ours(computation, i, "approximation"):
            return "elementwise", verdict, "LLVM", f"{where}the vector loop and its remainder are compiled differently"
        if _was_a_division(computation, i) and not is_tagged(i):
            return "division", verdict, "XLA", f"{where}a product with the reciprocal, or a division, by the shape"
        if i.opcode in ("add", "subtract") and computation.name in self._fused:
            for factor in computation.operands(i):
                if factor.opcode == "multiply" and not self._is_our_pair(computation, i, factor):
                    return "elementwise", verdict, "LLVM", f"{where}contracted with the product, or not, by the shape"
        return None

    def _is_our_pair(self, computation: Computation, i: Instruction, factor: Instruction) -> bool:
        of = self._origin.product_class(factor)
        return all(self._origin.is_ours(computation, member, of) for member in (i, factor))

    def _by_vectors(self, computation: Computation, i: Instruction) -> bool:
        """Returns whether an operand of a stack of products has no remaining free axis."""
        axes = len(i.integers("lhs_batch_dims")) + len(i.integers("lhs_contracting_dims"))
        return "lhs_batch_dims" in i.attributes and any(
            len(shape.dims) == axes for shape in operand_shapes(computation, i)
        )

    def _sums(self, i: Instruction) -> bool:
        """Returns whether a combiner depends on the order."""
        combiner = self._module.opcodes(i.called_as("to_apply") or i.called)
        return bool(combiner - ORDER_FREE) or not i.called

    def _finding(
        self, computation: Computation, i: Instruction, kind: str, verdict: Verdict, implementation: str, reason: str
    ) -> Finding:
        of = _CLASSES.get(kind) if i.opcode not in ("fft", "cholesky", "triangular-solve", "custom-call") else None
        # Element-wise code of bijax kernels is excluded already.
        fenced_everywhere = self._platform == "gpu" and kind in ("elementwise", "rounding")
        ours = implementation != "LLVM" and not fenced_everywhere and self._origin.is_ours(computation, i, of)
        if ours and self._platform == "cpu" and kind == "dot" and self._by_vectors(computation, i):
            ours, reason = False, _BY_VECTORS
        if not ours and verdict == "variant" and kind in _CLASSES and self._origin.has_lost_its_tag(i):
            reason += "; XLA created it, perhaps from the code of a bijax kernel"
        flops = self._flops.of(computation, i)
        return Finding(
            verdict="ours" if ours else verdict,
            opcode=i.opcode,
            kind=kind,
            shape=without_layout(i.shape_text),
            reason=reason,
            source=self._origin.source(computation, i),
            operation=self._origin.operation(computation, i),
            implementation=implementation,
            tile=tile_of(self._module, i),
            split_k=split_k_of(self._module, i),
            terms=self._terms(computation, i),
            trips=_trips(i) if kind == "loop" else 0,
            invariant_loop=kind == "loop" and TAG in i.frontend_attributes,
            dtypes=tuple(dict.fromkeys(s.dtype for s in operand_shapes(computation, i))),
            flops=flops,
            share=flops / self._flops.total if self._flops.total else 0.0,
            name=i.name,
        )

    def _terms(self, computation: Computation, i: Instruction) -> int:
        if i.opcode != "fusion":
            return terms_of(computation, i)
        inner = (self._module.computations[n] for n in i.called_as("calls") if n in self._module.computations)
        return max((terms_of(c, j) for c in inner for j in c.instructions.values()), default=0)


def merged(findings: list[Finding]) -> tuple[Finding, ...]:
    """Merges equal findings, for example of identical layers, into one with a count."""
    groups: dict[Finding, list[Finding]] = {}
    for found in findings:
        alike = dataclasses.replace(found, flops=0, share=0.0, name="")
        groups.setdefault(alike, []).append(found)
    return tuple(
        dataclasses.replace(
            group[0], flops=sum(f.flops for f in group), share=sum(f.share for f in group), count=len(group)
        )
        for group in groups.values()
    )


def _kind(i: Instruction) -> str:
    custom = i.fusion_config.get("custom_fusion_config", {})
    name = custom.get("name", "") if isinstance(custom, dict) else ""
    return f"{i.fusion_config.get('kind', '')}{f' {name}' if name else ''}"


def _custom_call(i: Instruction) -> Found | None:
    if BENIGN.search(i.target):
        return None
    entry = library(i.target)
    if entry is None:
        return "custom_call", "suspect", i.target, "an unknown call, opaque here"
    if entry.only_floats and not any(shape.is_float for shape in i.shapes):  # such as printing
        return entry.kind, "note", i.target, "it results in no floats"
    return entry.kind, entry.verdict, i.target, entry.reason


def _was_a_division(computation: Computation, i: Instruction) -> bool:
    """Returns whether XLA turned a division into a product, other than by a scalar constant, where it always does."""
    if i.opcode != "multiply" or i.metadata.get("op_name", "").rpartition("/")[2] != "div":
        return False
    return not any(_is_scalar_constant(computation, factor) for factor in computation.operands(i))


def _is_scalar_constant(computation: Computation, i: Instruction) -> bool:
    while i.opcode in ("broadcast", "bitcast", "reshape") and (operands := computation.operands(i)):
        i = operands[0]
    return i.opcode == "constant" and all(n == 1 for n in i.shapes[0].dims)


def _collective(i: Instruction) -> Found | None:
    groups = _GROUPS.findall(i.attributes.get("replica_groups", ""))
    sizes = {len(listed.split(",")) if listed else int(each) for listed, each in groups}
    if sizes == {1}:
        return None
    if sizes and sizes <= {1, 2}:
        return "collective", "note", "XLA", "adds two terms, which commute"
    return "collective", "variant", "XLA", "ring, tree and chunks are chosen by the size of the message"


def _trips(i: Instruction) -> int:
    """Returns the number of trips of a loop, or 0 if XLA does not know it."""
    known = i.config.get("known_trip_count")
    return int(known.get("n", 0)) if isinstance(known, dict) else 0
