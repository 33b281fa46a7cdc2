"""Scripts by their field, one class each, written in our own words after well-known originals."""
