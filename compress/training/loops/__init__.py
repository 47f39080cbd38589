"""QAT within other loops."""
