"""The default solver: searches, bounds and an incumbent that they share."""
