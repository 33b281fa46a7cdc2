"""The parts of the operating system, torch and torchvision that the other packages need."""
