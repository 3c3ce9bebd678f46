"""Checkmate and Moccasin: schedules in stages, as MILP, LP and CP models."""
