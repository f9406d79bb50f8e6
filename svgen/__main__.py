"""`python -m svgen` is the `svgen` command."""

from svgen.cli import main

if __name__ == "__main__":
    main()
