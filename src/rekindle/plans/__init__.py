"""A plan as data: options, the record, its file, and the account that reports print."""
