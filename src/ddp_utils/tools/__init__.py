"""What a person calls, `python -m ddp_utils.tools.NAME`; runs use `changes` and `report`."""
