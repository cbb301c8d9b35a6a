"""The documentation site: `make docs` builds it into build/docs."""

import importlib.metadata
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import docstrings  # noqa: E402
import gallery_table  # noqa: E402
import members  # noqa: E402
import pictures  # noqa: E402
import refused  # noqa: E402

project = "bijax"
author = "The bijax authors"
copyright = "The bijax authors, Apache-2.0"
release = importlib.metadata.version("batch-invariant-jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["generated/*.md"]
nitpicky = False  # annotations name types of JAX and Flax, whose inventories are not read offline

# Pages
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the outputs are stored, and tests/notebooks runs them

# Reference
default_role = "py:obj"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autosummary_generate = False  # tables on the pages; no page for each name
suppress_warnings = ["autosummary.import_cycle"]  # a table may list the module that its page describes
viewcode_follow_imported_members = True
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Appearance
html_theme = "furo"
html_title = "bijax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

linkcheck_timeout = 20


def _generate(app: Any) -> None:
    """Makes what the pages include: pictures, tables from the code, and copies of the notebooks."""
    generated = HERE / "generated"
    generated.mkdir(exist_ok=True)
    pictures.draw(generated)
    (generated / "refused.md").write_text(refused.table(), encoding="utf-8")
    (generated / "gallery.md").write_text(gallery_table.page(), encoding="utf-8")
    members.write_pages(HERE / "modules")
    shutil.copytree(ROOT / "notebooks", HERE / "notebooks", dirs_exist_ok=True)


def setup(app: Any) -> None:
    """Connects the project's own steps."""
    app.add_directive("public-members", members.PublicMembers)
    app.add_directive("page-summary", members.PageSummary)
    app.connect("builder-inited", _generate)
    app.connect("builder-inited", docstrings.show_whole_signatures)
    app.connect("autodoc-process-docstring", docstrings.process_docstring, priority=400)
    app.connect("autodoc-process-signature", docstrings.process_signature)
    app.connect("autodoc-skip-member", docstrings.skip_member)
