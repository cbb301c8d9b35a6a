"""Causal depthwise convolution over tokens."""
