"""All strategies on all models, against one process."""
