"""Whole programs made batch-invariant."""

# The rules register themselves; those of the expansions are a plug-in.
from bijax.transform import expansions as expansions
from bijax.transform._audit_report import Audit as Audit
from bijax.transform._audit_report import Operation as Operation
from bijax.transform.accumulate import GradientSum as GradientSum
from bijax.transform.accumulate import accumulate_gradients as accumulate_gradients
from bijax.transform.audit import audit as audit
from bijax.transform.contracts import Manifest as Manifest
from bijax.transform.contracts import contracts as contracts
from bijax.transform.errors import NotInvariantError as NotInvariantError
from bijax.transform.invariant import invariant as invariant
from bijax.transform.mode import disable_batch_invariant_mode as disable_batch_invariant_mode
from bijax.transform.mode import enable_batch_invariant_mode as enable_batch_invariant_mode
from bijax.transform.mode import is_batch_invariant_mode_enabled as is_batch_invariant_mode_enabled
from bijax.transform.mode import set_batch_invariant_mode as set_batch_invariant_mode
from bijax.transform.rules import standard as standard
