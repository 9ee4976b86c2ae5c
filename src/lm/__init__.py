"""What the scripts of language models share; `python -m lm.chat`, `lm.merge` are commands."""
