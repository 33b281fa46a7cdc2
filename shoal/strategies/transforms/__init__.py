"""Strategies that replace one function and move no parameter."""
