"""A run's recorded rollouts as training data for other programs: TRL, OpenAI's fine-tuning, ATIF."""
