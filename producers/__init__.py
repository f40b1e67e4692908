"""Tasks in, steps out: environments, rewards, rollout engines and the rollout worker."""
