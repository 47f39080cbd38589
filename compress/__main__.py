"""`python -m compress`: importing torch takes seconds, in which Ctrl-C ends quietly too."""

import sys

if __name__ == "__main__":
    try:
        from compress.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
