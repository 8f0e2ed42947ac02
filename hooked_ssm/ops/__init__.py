"""Mathematical operations: one signature per op over all implementations."""

from hooked_ssm.ops.dispatch import Impl, last_impl, use_impl
from hooked_ssm.ops.output import ScanOutput

__all__ = ["Impl", "ScanOutput", "last_impl", "use_impl"]
