"""Attention over fixed blocks of keys as XLA programs, which the backends for CPUs and for any GPU share."""
