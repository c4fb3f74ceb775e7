"""`python -m dat`, which is also what torchrun starts: `torchrun ... -m dat train RECIPE`."""

from dat.cli import main

if __name__ == "__main__":
    main()
