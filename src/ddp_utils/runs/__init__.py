"""The run folder on disk: metrics, checkpoints, resume, stopping, the checks of a run."""
