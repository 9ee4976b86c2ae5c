"""The same numbers in less time and memory; each is tried on the model before it is used."""
