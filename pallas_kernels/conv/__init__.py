"""Convolutions as matrix products of fixed blocks of terms."""
