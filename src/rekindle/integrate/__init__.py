"""Rekindle inside other people's training loops: `torch.compile` (`dynamo`), Hugging Face Trainer
(`transformers`), Lightning (`lightning`), and several GPUs (`distributed`).

Each adapter imports its library only when it is imported itself.
"""
