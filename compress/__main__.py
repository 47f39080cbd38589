"""`python -m compress`."""

from compress.cli import main

if __name__ == "__main__":
    main()
