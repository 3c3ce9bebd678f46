"""A lowered plan under autograd: the runner, the managed module, its table of plans."""
