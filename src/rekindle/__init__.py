"""Rekindle: train any PyTorch model inside the memory you have."""
