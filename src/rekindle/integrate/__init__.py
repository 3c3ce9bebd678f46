"""Integrations: `torch.compile` (`dynamo`), Hugging Face Trainer (`transformers`), Lightning
(`lightning`) and data parallel training (`distributed`).

Each module imports its library when it is imported itself, so Rekindle depends on none of them.
"""
