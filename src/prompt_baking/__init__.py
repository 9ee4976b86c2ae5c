"""Prompt baking: what generate_data.py and train_loop.py alone use."""
