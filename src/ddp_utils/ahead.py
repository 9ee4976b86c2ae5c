"""What a run will need, said before it does, and kept in summary.json beside what it did need."""

import statistics
import time

from ddp_utils import UserError, forecast

WORTH = 10e6  # parameters of a model from which on a run takes the two seconds to predict
FIRST = 5  # steps that tell how long all of them take


class Ahead:
    """Memory before the model is loaded, time after the first steps; on rank 0.

    row_losses(scorer, batch, reference, config) is the script's, budget the rows of a micro-batch.
    """

    def __init__(self, run, config, outline, rows, plan, budget, row_losses):
        large = sum(parameter.numel() for parameter in outline.parameters()) >= WORTH
        self.run, self.seconds, self.speaks = run, [], run.world.is_main and large
        if not self.speaks or getattr(config, "type", "") == "qlora":
            return

        def losses(*batch):
            return row_losses(*batch, config)

        ranks, shared = run.world.world_size, config.layout != "separate"
        largest = forecast.fullest(rows, plan, ranks, budget, shared)
        try:
            found = forecast.predicted_memory_mb(config, outline, largest, losses, run.world)
            run.results["predicted_memory_mb"] = found
            run.say(f"predicted peak memory {found:.0f} MiB a rank")
        except UserError as error:  # a run may do what cannot be predicted
            run.say(f"peak memory is not predicted: {error}")

    def seen(self, step, values):
        """After each step, with its metrics."""
        if not self.speaks:
            return
        run, known, peak = self.run, self.run.results, values["peak_memory_mb"]
        known["peak_memory_mb"] = peak
        self.seconds.append(values["seconds"])
        if len(self.seconds) == FIRST:
            rest = (run.steps - step) * statistics.median(self.seconds)
            known["predicted_seconds"] = time.perf_counter() - run.start + rest
            run.say(f"about {known['predicted_seconds'] / 60:.1f} min for {run.steps} steps")
        if step == run.steps:
            before = known.get("predicted_memory_mb")
            run.say(f"peak memory {peak:.0f} MiB" + (f", predicted {before:.0f}" if before else ""))
