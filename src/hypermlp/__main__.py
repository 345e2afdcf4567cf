"""`python -m hypermlp` is the command `hypermlp`."""

from hypermlp.cli import main

if __name__ == "__main__":
    main()
