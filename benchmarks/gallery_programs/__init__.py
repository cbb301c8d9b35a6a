"""Programs of other libraries, unmodified, as their documentation writes them."""

import importlib

from benchmarks.gallery_programs.program import EXAMPLES as EXAMPLES
from benchmarks.gallery_programs.program import Program as Program
from benchmarks.gallery_programs.program import take as take

MODULES = (
    "dense",
    "convolutional",
    "sequences",
    "training",
    "probabilistic",
    "graphs",
    "equivariant",
    "solvers",
    "games",
    "densities",
    "simulations",
)


def programs(*modules: str) -> dict[str, Program]:
    """Returns the programs of some modules, of all by default, by name; other libraries are not imported."""
    chosen = [importlib.import_module(f"benchmarks.gallery_programs.{module}") for module in modules or MODULES]
    return {program.name: program for module in chosen for program in module.PROGRAMS}
