"""Matmul with a fixed order over K."""
