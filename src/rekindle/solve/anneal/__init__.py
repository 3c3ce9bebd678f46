"""FastSA: simulated annealing over schedules."""
