"""The parameter server: who owns which part, how pushes are applied, and what goes over the
wire.
"""
