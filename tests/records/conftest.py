from tests.report.conftest import run_folder

__all__ = ["run_folder"]
