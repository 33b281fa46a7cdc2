"""Optimizers that PyTorch lacks."""
