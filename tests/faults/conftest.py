"""The servers of the integration tests, each test with its own."""

from tests.integration.conftest import new_server, pytest_pyfunc_call

__all__ = ["new_server", "pytest_pyfunc_call"]
