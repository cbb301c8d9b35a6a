"""Conversion of whole models to batch-invariant layers."""

from .convert import conversion_report as conversion_report
from .convert import convert as convert
from .quantize_linen import quantize_variables as quantize_variables
from .report import Conversion as Conversion
from .report import Decision as Decision
