"""What a person calls, `python -m ddp_utils.tools.NAME`; no script imports it."""
