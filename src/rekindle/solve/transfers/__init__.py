"""Moving values to host memory and back, beside recomputing them."""

from rekindle.solve.transfers.search import with_transfers

__all__ = ["with_transfers"]
