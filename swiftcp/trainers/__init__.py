"""Training: the loop, the step, the optimizer, evaluation, and per-token log-probabilities. Knows no family."""
