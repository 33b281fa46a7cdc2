"""The operating system, torch and torchvision: what the other packages need from them."""
