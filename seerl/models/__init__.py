"""What the trainer and the rollout engine must both know of a transformers model, so that they agree."""
