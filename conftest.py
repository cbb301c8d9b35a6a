"""Modules that need a library which is not installed have no doctests to collect."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("tunix") else ["bijax/integrations/tunix.py"]
