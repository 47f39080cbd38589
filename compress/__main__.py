"""`python -m compress`; Ctrl-C ends quietly while the command line is imported, too."""

import sys

if __name__ == "__main__":
    try:
        from compress.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
