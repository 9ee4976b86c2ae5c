"""Other forms in which people bring settings and data; imported when they do."""
