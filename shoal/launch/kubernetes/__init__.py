"""`--kubernetes`: one JobSet, whose pods start the ranks."""
