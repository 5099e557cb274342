"""`python -m common` is `seppd`."""

from common.cli import main

if __name__ == "__main__":
    main()
