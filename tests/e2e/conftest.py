"""What every test here starts from."""

from tests.integrations.conftest import one_thread_and_nothing_enabled  # noqa: F401
