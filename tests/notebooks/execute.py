"""Executing a notebook in a new kernel.

`python -m tests.notebooks.execute notebooks/NAME.ipynb` stores the outputs in the notebook.
"""

import os
import sys
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class _Client(NotebookClient):
    def create_kernel_manager(self) -> AsyncKernelManager:
        # Without folders to look for kernels in, there is the one of this interpreter, which is always installed.
        self.km = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        return self.km


def execute(path: Path) -> NotebookNode:
    """Returns the notebook with the outputs of a run in this interpreter and this source tree.

    Args:
        path: The notebook, which stays as it is.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises an error.
    """
    notebook = nbformat.read(path, as_version=4)
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The backend of matplotlib is left to the kernel, which shows pictures below the cells.
    environment = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"} | {"PYTHONPATH": os.pathsep.join(search)}
    client = _Client(notebook, timeout=TIMEOUT_S, record_timing=False, coalesce_streams=True)
    executed: NotebookNode = client.execute(cwd=str(path.parent), env=environment)
    # What the kernel says of itself, such as its version, is no part of a notebook.
    executed.metadata = nbformat.from_dict(_METADATA)
    return executed


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(execute(Path(name).resolve()), name)
