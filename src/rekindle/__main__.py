"""`python -m rekindle` is `rekindle`."""

from rekindle.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
