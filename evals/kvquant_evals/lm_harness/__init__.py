"""lm-eval (EleutherAI's language model evaluation harness): our caches as a model of its, and its tasks as ours."""
