"""Trainers of other libraries whose steps are taken by a strategy of Shoal."""
