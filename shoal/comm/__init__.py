"""Communication between ranks: the mesh and its axes, collectives, and gradient compression."""
