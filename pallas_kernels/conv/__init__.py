"""Convolutions as products of fixed blocks of terms."""
