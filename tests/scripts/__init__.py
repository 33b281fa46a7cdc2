"""Real kinds of training scripts, each in plain PyTorch and with Shoal, under every strategy."""
