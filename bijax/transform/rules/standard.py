"""Importing this module registers the rules for JAX's primitives."""

from bijax.transform.rules import _elementwise as _elementwise
from bijax.transform.rules import _kept as _kept
from bijax.transform.rules import _ordered as _ordered
from bijax.transform.rules import _programs as _programs
from bijax.transform.rules import _refused as _refused
