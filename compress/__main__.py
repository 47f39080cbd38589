"""`python -m compress`; Ctrl-C ends quietly while the command line is imported, too."""

import signal

if __name__ == "__main__":
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # importing torch takes seconds: Ctrl-C ends it without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from compress.cli import run

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    run()
