"""What a model's cache takes, and what fits into a GPU's memory: from the configuration alone, without weights."""
