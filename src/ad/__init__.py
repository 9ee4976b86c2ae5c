"""Algorithm Distillation: a transformer that learns, in its context alone, on tasks never seen."""
